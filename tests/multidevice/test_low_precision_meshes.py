"""A linear in FP8 or NVFP4 on eight devices equals that on one: scales, product and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.config.schema import Mesh
from jaxtune.models.dropout import Noise
from jaxtune.models.mark import undivided_blocks
from jaxtune.models.parameters import Parameter
from jaxtune.parallel.layout import RULES, TOKENS, P, spec
from jaxtune.parallel.mesh import make_mesh
from jaxtune.precision.fp8 import Fp8Numbers
from jaxtune.precision.matmul import LowPrecision, matmul
from jaxtune.precision.nvfp4 import Nvfp4Numbers
from jaxtune.precision.operands import abstract_operands, make_operands

ROWS, LENGTH, LAYERS = 8, 64, 2
NUMBERS = {
    "fp8": Fp8Numbers(hadamard=False, online=False),
    "fp8 hadamard": Fp8Numbers(hadamard=True, online=False),
    "nvfp4": Nvfp4Numbers(stochastic_rounding=True, hadamard=True, four_over_six=True),
}
MESHES = {"fsdp tensor": Mesh(data=2, fsdp=2, tensor=2), "sequence": Mesh(fsdp=2, sequence=2, tensor=2)}
# A linear whose products are sharded over the mesh's tensor axis, and one whose sums are.
SHAPES = {("mlp", "embed"): (96, 64), ("embed", "mlp"): (64, 96)}


def axis_of(axes):
    return None if axes[0] == "embed" else RULES.mlp


def case(axes, dyadic: bool):
    """Stacked weights, x and dy: normal, or small integers, which both formats hold exactly."""
    out, inner = SHAPES[axes]
    rng = np.random.default_rng(0)
    shapes = (LAYERS, out, inner), (ROWS, LENGTH, inner), (ROWS, LENGTH, out)
    if not dyadic:
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    # 7 over the largest of e4m3 and of e5m2 is a power of two, so scales round nothing.
    arrays = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    arrays[0][:, 0, 0] = arrays[1][0, 0, 0] = 7.0
    arrays[2][0, 0, 0] = 7.0
    return arrays


@functools.cache
def computed(numbers, axes, mesh: Mesh, devices: int, dyadic: bool = False):
    """(operands, y, dx, dW, largest magnitudes), fetched: dW is of both layers, each made by a scan."""
    make_mesh(mesh, jax.devices()[:devices])
    w, x, dy = case(axes, dyadic)
    axis, place = axis_of(axes), spec(*axes)
    inner = None if place[1] == "fsdp" else place[1]
    x, dy = jax.device_put(x, P(*TOKENS, inner)), jax.device_put(dy, P(*TOKENS, axis))
    w, rows = jax.device_put(w, P(None, *place)), jax.device_put(np.arange(ROWS, dtype=np.int32), P(TOKENS[0]))
    scales = jnp.asarray([[7 / 448, 7 / 57344]] * LAYERS, jnp.float32) if numbers.delayed else None

    @jax.jit
    def run(w, scales, x, dy, rows):
        operands = jax.lax.map(lambda w: make_operands(w, numbers, axes), w)

        def layers(x, w, scales):
            noise = Noise(jax.random.key(0), rows)

            def layer(_, scanned):
                leaf, number = scanned
                return None, matmul(x, leaf, axis, noise.layer(number))

            leaf = LowPrecision(operands, w, scales, numbers)
            return jax.lax.scan(layer, None, (leaf, jnp.arange(LAYERS)))[1]

        y, backward = jax.vjp(layers, x, w, scales)
        return operands, y, *backward(jnp.stack([dy] * LAYERS))

    operands, y, dx, dw, maxima = run(w, scales, x, dy, rows)
    declared = abstract_operands(numbers, w.shape, w.dtype, (None, *axes))
    for found, expected in zip(jax.tree.leaves(operands), jax.tree.leaves(declared)):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim), (found.sharding, expected.sharding)
    assert jax.typeof(dw).sharding.spec == P(None, *place)
    return jax.tree.map(np.asarray, (operands, y, dx, dw, maxima))


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        ("fsdp tensor", ("mlp", "embed")),
        ("sequence", ("embed", "mlp")),
        pytest.param("fsdp tensor", ("embed", "mlp"), marks=pytest.mark.slow),
        pytest.param("sequence", ("mlp", "embed"), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_equal_one(mesh, numbers, axes):
    """Scales and random bits do not depend on the mesh; sums are in another order."""
    operands, *expected, maxima = computed(numbers, axes, Mesh(fsdp=1), 1)
    found_operands, *found, found_maxima = computed(numbers, axes, MESHES[mesh], 8)
    jax.tree.map(np.testing.assert_array_equal, found_operands, operands)
    if maxima is not None:
        np.testing.assert_array_equal(found_maxima, maxima)
    for one, eight in zip(expected, found):
        assert np.abs(eight - one).max() <= 1e-5 * np.abs(one).max()


@pytest.mark.parametrize("axes", SHAPES, ids=["out", "in"])
def test_numbers_that_fp8_holds_are_multiplied_exactly_on_any_mesh(axes):
    w, x, dy = case(axes, dyadic=True)
    for mesh, devices in ((Mesh(fsdp=1), 1), (MESHES["fsdp tensor"], 8), (MESHES["sequence"], 8)):
        _, y, dx, dw, _ = computed(NUMBERS["fp8"], axes, mesh, devices, dyadic=True)
        np.testing.assert_array_equal(y, np.einsum("bsi,loi->lbso", x, w))
        np.testing.assert_array_equal(dx, np.einsum("bso,loi->bsi", dy, w))
        np.testing.assert_array_equal(dw, np.broadcast_to(np.einsum("bso,bsi->oi", dy, x), w.shape))


def test_a_shard_holds_its_part_of_the_codes():
    make_mesh(MESHES["fsdp tensor"], jax.devices())
    for numbers in NUMBERS.values():
        operands = abstract_operands(numbers, (LAYERS, 96, 64), jnp.float32, (None, "mlp", "embed"))
        for operand in (operands.forward, operands.backward):
            if operand is not None:
                size = operand.codes.size
                assert np.prod(operand.codes.sharding.shard_shape(operand.codes.shape)) == size // 4


def test_a_mesh_that_splits_a_block_of_16_is_refused():
    """Also the only one: its numbers would be rotated, or scaled, across rows."""

    def parameter(rows, columns):
        zeros = jax.nn.initializers.zeros
        axes = ("layers", "kv_heads", "embed")
        return Parameter((2, rows, columns), axes, zeros, False, "attention.k.weight", (0, 1), True, False, True)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    for numbers in NUMBERS.values():
        assert undivided_blocks({"k": parameter(32, 64)}, {"k": numbers}, mesh, "another mesh") == []
        (complaint,) = undivided_blocks({"k": parameter(16, 64)}, {"k": numbers}, mesh, "another mesh")
        assert complaint.startswith("mesh.tensor=2 does not divide the 16 features of kv_heads in blocks of 16")
