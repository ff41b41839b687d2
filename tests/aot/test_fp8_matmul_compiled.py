"""FP8 products compiled for GPUs with FP8 units: cuBLASLt's call without copies of the weight, and Mosaic's wgmma."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.fp8_matmul import block_scales, fp8_matmul, mosaic, quantize
from pallas_kernels.fp8_matmul.request import request_for
from pallas_kernels.gpus import GPUS

COVERS = ("pallas_kernels", ":!pallas_kernels/flash_attention")

# All tests of this file, which takes seconds: each version's XLA finds FP8 calls by a pattern of its own, and only
# newer versions of Mosaic multiply e5m2.
pytestmark = pytest.mark.every_jax

# A layer's width and a number of rows, all different.
ROWS, COLUMNS, DEPTH = 1024, 2048, 4096
F8_CALL = {"__cublas$lt$matmul$f8": 1}
compile_for = partial(aot.compile_for, compiler_options={"xla_gpu_enable_triton_gemm": False})


def operands(x_scale=(1, 1), weight_scale=(1, 1), x_dtype="float8_e4m3fn", rows=ROWS):
    shapes = (
        ((rows, DEPTH), x_dtype),
        ((COLUMNS, DEPTH), "float8_e4m3fn"),
        (x_scale, "float32"),
        (weight_scale, "float32"),
    )
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def wide_weights(hlo: str) -> list[str]:
    """Arrays with the shape of the weight or of its transpose, in more than 8 bits."""
    shapes = rf"\[(?:1,)?(?:{COLUMNS},{DEPTH}|{DEPTH},{COLUMNS})\]"
    return re.findall(rf"\b(?:bf16|f16|f32){shapes}", hlo)


@pytest.mark.parametrize("card", ["rtx4090", "h100", "b200"])
@pytest.mark.parametrize(
    "given",
    [
        operands(),
        operands(x_dtype="float8_e5m2"),
        operands((ROWS, 1), (COLUMNS, 1)),
        operands((1000, 1), (1, 1), rows=1000),
    ],
    ids=["tensor", "e5m2", "rows and channels", "1000 rows"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cublaslt_is_called_on_the_codes(card, given, dtype):
    compiled = compile_for(card, partial(fp8_matmul, dtype=dtype), *given)
    assert compiled.custom_calls == F8_CALL
    assert not wide_weights(compiled.hlo)
    # The weight is passed unchanged.
    call = next(line for line in compiled.hlo.splitlines() if "custom_call_target=" in line)
    weight = re.search(r"custom-call\(%\S+, %(\S+),", call)[1]
    assert re.search(rf"%{re.escape(weight)} = f8e4m3fn\[{COLUMNS},{DEPTH}\]\S* parameter\(1\)", compiled.hlo)


@pytest.mark.parametrize(("fast_accumulation", "precision"), [(False, "HIGHEST"), (True, "DEFAULT")])
def test_fast_accumulation_is_asked_for_by_the_precision(fast_accumulation, precision):
    compiled = compile_for("h100", partial(fp8_matmul, fast_accumulation=fast_accumulation), *operands())
    assert f'"operand_precision":["{precision}","{precision}"]' in compiled.hlo


@pytest.mark.parametrize("card", ["rtx4090", "h100", "b200"])
def test_stacked_weights_in_a_scan(card):
    """The layers of a model: uint8 codes, activations quantized before the product. Only a layer's slice is copied."""

    def model(x, codes, weight_scales):
        def layer(x, stacked):
            codes, weight_scale = stacked
            weight = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
            x_scale = block_scales(x)
            out = fp8_matmul(quantize(x, x_scale), weight, x_scale, weight_scale)
            return x + jnp.concatenate([out, out], axis=1), None

        return jax.lax.scan(layer, x, (codes, weight_scales))[0]

    x = jax.ShapeDtypeStruct((ROWS, DEPTH), jnp.bfloat16)
    codes = jax.ShapeDtypeStruct((3, COLUMNS, DEPTH), jnp.uint8)
    compiled = compile_for(card, model, x, codes, jax.ShapeDtypeStruct((3, 1, 1), jnp.float32))
    assert compiled.custom_calls == F8_CALL
    assert not wide_weights(compiled.hlo)
    # A slice, x in FP8, the result, cuBLASLt's 4 MiB; another slice would be 8 MiB.
    expected = COLUMNS * DEPTH + ROWS * DEPTH + 2 * ROWS * COLUMNS + 2**22
    assert compiled.memory.temporaries < expected + 2**20


def test_cards_without_fp8_units():
    """Refused by name; 'auto' multiplies in float32 by cuBLASLt."""
    with pytest.raises(ValueError, match="FP8 units"):
        compile_for("a100", partial(fp8_matmul, backend="cublaslt"), *operands())
    assert compile_for("a100", fp8_matmul, *operands()).custom_calls == {"__cublas$lt$matmul": 1}


BLOCKS = (ROWS, DEPTH // 128), (COLUMNS // 128, DEPTH // 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("x_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_mosaic_multiplies_by_wgmma_without_spills(x_dtype, dtype):
    given = operands(*BLOCKS, x_dtype)
    request = request_for(*given, dtype)
    if x_dtype == "float8_e5m2" and jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic GPU multiplies e5m2 by e4m3 from jax 0.11 on")
    (kernel,) = aot.compile_for("h100", partial(mosaic.multiply, request=request), *given).kernels
    assert kernel.grid == (ROWS // 128, COLUMNS // 128, 1)
    # A block of 128 is four steps of k = 32.
    assert kernel.wgmma == 4 and kernel.mma_sync == 0 and kernel.spill_bytes == 0
    assert kernel.shared_memory <= GPUS["h100"].shared_memory_per_block and kernel.occupancy > 0


def test_mosaic_on_shards_of_a_mesh():
    """Rows over one axis and columns over the other, by the public op."""
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    specs = P("fsdp"), P("tensor"), P("fsdp"), P("tensor")
    multiply = jax.shard_map(partial(fp8_matmul, backend="mosaic"), in_specs=specs, out_specs=P("fsdp", "tensor"))
    given = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(operands(*BLOCKS), specs)
    ]
    compiled = aot.compile_for("h100", multiply, *given, mesh=mesh)
    assert [kernel.grid for kernel in compiled.kernels] == [(ROWS // 256, COLUMNS // 256, 1)]
    assert not compiled.collectives
