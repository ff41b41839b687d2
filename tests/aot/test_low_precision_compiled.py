"""Products of low-precision linear layers compiled for GPUs: the resulting calls, and no copy of a weight."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxtune.host.process import compiler_options
from jaxtune.parallel.layout import by_token, sharding
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.parallel.random import Noise
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.matmul import MAXIMA, LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul
from jaxtune.quant import nvfp4_format
from pallas_kernels import aot

# Rows of tokens, unequal to any weight's rows and columns; a model's width and its MLP's; layers.
ROWS, LENGTH, HIDDEN, INTERMEDIATE, LAYERS = 2, 1536, 4096, 12_288, 3
F8_CALL, NVFP4_CALL, BF16_CALL = "__cublas$lt$matmul$f8", "__cudnn$blockScaledDot", "__cublas$lt$matmul"
FP8, FP8_ROTATED = Fp8Matmul(hadamard=False, online=False), Fp8Matmul(hadamard=True, online=False)
NVFP4 = Nvfp4Matmul(stochastic_rounding=True, hadamard=True, four_over_six=True)


def leaf(numbers, shape, axes, trained: bool, delayed: bool = False) -> LowPrecision:
    stack, stack_axes = (LAYERS, *shape), (None, *axes)
    weight = jax.ShapeDtypeStruct(stack, jnp.bfloat16, sharding=sharding(*stack_axes)) if trained else None
    scales = jax.ShapeDtypeStruct((LAYERS, 2), jnp.float32, sharding=sharding(None, None)) if delayed else None
    return LowPrecision(numbers.abstract(stack, jnp.bfloat16, stack_axes), weight, scales, numbers)


def compiled(numbers, *, trained: bool, card: str = "h100", cards: int = 1, delayed: bool = False) -> aot.Compiled:
    """Gradients of an MLP's two linear layers, scanned over layers; their outputs are saved for the backward pass."""
    mesh = make_mesh(MeshOptions(fsdp=cards), aot.devices(card, per_host=cards))
    up = leaf(numbers, (INTERMEDIATE, HIDDEN), ("mlp", "embed"), trained, delayed)
    down = leaf(numbers, (HIDDEN, INTERMEDIATE), ("embed", "mlp"), trained, delayed)
    x = jax.ShapeDtypeStruct(
        (cards * ROWS, LENGTH, HIDDEN), jnp.bfloat16, sharding=jax.NamedSharding(mesh, by_token(None))
    )
    rows = jax.ShapeDtypeStruct((cards * ROWS,), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P(by_token()[0])))

    def gradients(up, down, x, rows):
        noise = Noise(jax.random.key(0), rows)

        def linear(x, leaf, axis, name):
            return checkpoint_name(leaf.matmul(x, axis, noise.site(name)), "product")

        def layer(x, leaves):
            up, down = leaves
            return x + linear(jax.nn.silu(linear(x, up, "tensor", "up")), down, None, "down"), None

        def loss(differentiated):
            x, weights, scales = differentiated
            leaves = [LowPrecision(leaf.operands, *given, numbers) for leaf, *given in zip((up, down), weights, scales)]
            policy = jax.checkpoint_policies.save_only_these_names("product", MAXIMA)
            body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            return jnp.sum(jax.lax.scan(body, x, tuple(leaves))[0].astype(jnp.float32) ** 2)

        return jax.grad(loss)((x, [up.weight, down.weight], [up.scales, down.scales]))

    options = compiler_options()
    return aot.compile_for(card, gradients, up, down, x, rows, mesh=mesh, compiler_options=options)


# On every version of jax, because its XLA decides which conversions to drop.
@pytest.mark.every_jax
@pytest.mark.parametrize("scales", [lambda x: nvfp4_format.block_scales(x, 1.0, False), nvfp4_format.rounded_up])
def test_scales_are_rounded_to_e4m3(scales):
    """XLA for GPUs drops a conversion to float8 and back, so elements would not be divided by the stored scale."""
    shape = (64, 1, 8, 16) if scales is not nvfp4_format.rounded_up else (64, 8)
    made = aot.compile_for("h100", scales, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert re.search(r"f8e4m3fn\[[\d,]*\]\S* convert\(", made.hlo)
    assert not re.search(r"compare\((%[\w.\-]+), \1\), direction=LT", made.hlo)


# The plain ones on every version of jax, because each writes its own pattern, by which XLA finds an FP8 call.
NUMBERS = [
    pytest.param(FP8, id="plain", marks=pytest.mark.every_jax),
    pytest.param(FP8_ROTATED, id="hadamard"),
]
WEIGHT = rf"\[(?:1,)?(?:{INTERMEDIATE},{HIDDEN}|{HIDDEN},{INTERMEDIATE})\]"


def copies(hlo: str) -> list[str]:
    """Operations that copy or transpose the codes of a weight, except for a scan's slice of a layer.

    In bfloat16 that slice would have twice the bytes.
    """
    found = re.findall(rf"= (?:u8|f8e4m3fn){WEIGHT}\S* (?:copy|transpose)\(.*", hlo)
    return [line for line in found if "(%dynamic_slice" not in line]


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_frozen_fp8_weights_go_into_cublaslt_as_they_are(numbers, delayed):
    """Two calls for each linear layer: no product is recomputed, and no weight is transposed or wider than a byte."""
    made = compiled(numbers, trained=False, delayed=delayed)
    assert made.custom_calls[F8_CALL] == 4
    assert not copies(made.hlo)
    assert not re.search(rf"(bf16|f32){WEIGHT}", made.hlo)
    # Temporaries have room for the saved arrays of each layer, the slices of its weights, and little else.
    kept = LAYERS * ROWS * LENGTH * (2 * HIDDEN + INTERMEDIATE) * 2
    assert made.memory.temporaries < kept + 2 * HIDDEN * INTERMEDIATE + 2**26


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_all_three_products_of_a_trained_weight_are_fp8(numbers, delayed):
    made = compiled(numbers, trained=True, delayed=delayed)
    assert made.custom_calls[F8_CALL] == 6
    assert not copies(made.hlo)


# On every version of jax, because its XLA decides where to gather and which layers to take out of the loop.
@pytest.mark.every_jax
def test_gpus_gather_a_byte_an_element_and_scatter_gradients():
    """Over fsdp: one byte an element in both passes, no bfloat16 weight; a quarter of each gradient is returned."""
    made = compiled(FP8, trained=True, cards=4)
    # XLA takes the last layer of the backward pass out of its loop.
    layers, gathers = 2, made.collectives["all-gather"]
    assert made.custom_calls[F8_CALL] == 2 + 4 * layers
    assert gathers == (2 + 2 * layers, (2 + 2 * layers) * HIDDEN * INTERMEDIATE)
    assert made.collectives["reduce-scatter"] == (2 * layers, 2 * layers * HIDDEN * INTERMEDIATE * 2 // 4)


# The cheaper one on every version of jax, because each lowers jax.nn.scaled_matmul differently.
@pytest.mark.parametrize(("trained", "calls"), [pytest.param(False, 4, marks=pytest.mark.every_jax), (True, 6)])
def test_nvfp4_is_multiplied_by_blackwell_and_emulated_in_bfloat16_elsewhere(trained, calls):
    blackwell = compiled(NVFP4, trained=trained, card="b200")
    assert blackwell.custom_calls[NVFP4_CALL] == calls
    assert not any("dequantize" in kernel.name for kernel in blackwell.kernels)
    hopper = compiled(NVFP4, trained=trained)
    assert NVFP4_CALL not in hopper.custom_calls
    assert hopper.custom_calls[BF16_CALL] >= calls
    assert any("dequantize" in kernel.name for kernel in hopper.kernels)
