"""Quantized weights: decoded values, the weight and its products against float64, on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels.quant_cases import HALF_ULP, WEIGHTS, Weight, assert_product, assert_weight, in_float64, rows_of

from pallas_kernels import quant_matmul as op
from pallas_kernels.gpus import GPUS, Device
from pallas_kernels.quant_matmul import ELEMENTS, dequantize, fused, quant_matmul, triton, xla
from pallas_kernels.quant_matmul.layout import layout_of

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")


@pytest.mark.parametrize("elements", [name for name, kind in ELEMENTS.items() if kind.arithmetic])
def test_arithmetic_equals_the_table(elements):
    kind = ELEMENTS[elements]
    code = jnp.arange(len(kind.values), dtype=jnp.uint8)
    assert np.array_equal(jax.jit(kind.decode)(code), np.array(kind.values, np.float32), equal_nan=True)


def test_tables_are_what_they_are_known_as():
    assert ELEMENTS["e2m1"].values[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    assert ELEMENTS["e2m1"].values[8:] == tuple(-value for value in ELEMENTS["e2m1"].values[:8])
    assert ELEMENTS["int4"].values == (0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
    e4m3 = np.array(ELEMENTS["e4m3"].values)
    assert list(np.flatnonzero(np.isnan(e4m3))) == [0x7F, 0xFF]
    assert e4m3[0x7E] == 448 and e4m3[0x81] == -(2.0**-9)
    assert ELEMENTS["int8"].values[127:129] == (127, -128)


@pytest.mark.every_jax
@pytest.mark.parametrize("elements", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [64, 256])
def test_equals_bitsandbytes(elements, block):
    torch = pytest.importorskip("torch")
    functional = pytest.importorskip("bitsandbytes.functional")
    assert functional.get_4bit_type(elements, "cpu").tolist() == list(ELEMENTS[elements].values)
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, blocksize=block, quant_type=elements)
    expected = functional.dequantize_4bit(packed, state).numpy()
    codes, scales = packed.numpy().reshape(24, -1), state.absmax.numpy().reshape(24, -1)
    got = dequantize(codes, scales, elements=elements, dtype=jnp.float32)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


# Every element type in one shape, and every other shape with the type that has it.
KINDS = [("NVFP4", elements) for elements in ELEMENTS]
KINDS += [("bitsandbytes", "fp4"), ("MXFP4", "e2m1"), ("square", "e4m3"), ("per channel", "int4"), ("wide", "int8")]


@pytest.mark.parametrize(("weight", "elements"), KINDS)
@pytest.mark.parametrize("backend", [partial(triton.dequantize, interpret=True), xla.dequantize], ids=["triton", "xla"])
def test_weight_equals_float64(backend, weight, elements):
    arrays = WEIGHTS[weight].arrays(elements, nan=True)
    assert_weight(backend(*arrays, layout_of(*arrays, elements), jnp.float32), arrays, elements, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("elements", ELEMENTS)
def test_weight_is_rounded_once(elements, dtype):
    arrays = WEIGHTS["NVFP4"].arrays(elements)
    layout = layout_of(*arrays, elements)
    whole = dequantize(*arrays, elements=elements, dtype=dtype)
    assert_weight(whole, arrays, elements, dtype)
    assert np.array_equal(whole, triton.dequantize(*arrays, layout, jnp.dtype(dtype), interpret=True))


@given(
    blocks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    block=st.tuples(st.integers(1, 40), st.integers(1, 600)),
    elements=st.sampled_from(["nf4", "e4m3"]),
)
@settings(max_examples=5, deadline=None)
def test_blocks_of_any_size(blocks, block, elements):
    block = block[0], block[1] * ELEMENTS[elements].packed
    arrays = Weight(blocks[0] * block[0], blocks[1] * block[1], block).arrays(elements)
    layout = layout_of(*arrays, elements)
    for got in (triton.dequantize(*arrays, layout, jnp.float32, interpret=True), xla.dequantize(*arrays, layout, "f4")):
        assert_weight(got, arrays, elements, "float32")


# Rows of x, splits of the contraction (None: one for each step) and dtype.
FUSED = {
    "NVFP4": (40, 1, "float16"),
    "bitsandbytes": (5, 2, "bfloat16"),
    "per channel": (70, None, "bfloat16"),
    "square": (3, 1, "bfloat16"),
}


@pytest.mark.every_jax
@pytest.mark.parametrize(("weight", "elements"), [kind for kind in KINDS if kind[0] in FUSED])
def test_fused_products_equal_float64(weight, elements):
    (m, splits, dtype), weight = FUSED[weight], WEIGHTS[weight]
    arrays = weight.arrays(elements)
    layout, expected = layout_of(*arrays, elements), in_float64(*arrays, elements)
    x, d_out = rows_of(m, weight.columns, dtype), rows_of(m, weight.rows, dtype)
    multiply = partial(fused.multiply, splits=splits, interpret=True)
    assert_product(multiply(x, *arrays, layout, transposed=False), x, expected.T, dtype)
    assert_product(multiply(d_out, *arrays, layout, transposed=True), d_out, expected, dtype)


def test_what_lies_beyond_a_row_of_x_is_not_read_as_its_own():
    """Rows of NaN and tiles that extend past the weight do not affect the other rows."""
    arrays = WEIGHTS["NVFP4"].arrays("nf4")
    layout = layout_of(*arrays, "nf4")
    x = rows_of(4, 96, "bfloat16").at[1].set(jnp.nan)
    got = np.asarray(fused.multiply(x, *arrays, layout, False, interpret=True), np.float32)
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2, 3]]).all()


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("elements", ELEMENTS)
def test_product_and_gradient_equal_float64(elements, dtype):
    """The public op on this device, jitted: forward, dx, and no gradient for frozen arrays."""
    weight = WEIGHTS["NVFP4"]
    arrays = weight.arrays(elements)
    x, d_out = rows_of(11, weight.columns, dtype), rows_of(11, weight.rows, dtype)

    @jax.jit
    def both(x, tensor_scale):
        out, pull = jax.vjp(lambda x, s: quant_matmul(x, *arrays[:2], s, elements=elements), x, tensor_scale)
        return out, *pull(d_out)

    out, d_x, d_scale = both(x, arrays[2])
    expected = in_float64(*arrays, elements)
    assert out.dtype == d_x.dtype == x.dtype and d_scale == 0
    assert_product(out, x, expected.T, dtype)
    assert_product(d_x, d_out, expected, dtype)


def test_only_the_stored_weight_is_kept_for_the_gradient():
    codes, scales, tensor_scale = WEIGHTS["NVFP4"].arrays("e2m1")
    x = rows_of(11, 96, "bfloat16")
    _, pull = jax.vjp(lambda x: quant_matmul(x, codes, scales, tensor_scale, elements="e2m1"), x)
    kept = sorted((leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull))
    assert kept == sorted([("uint8", codes.shape), ("uint8", scales.shape), ("float32", ())])


@pytest.mark.parametrize("what", ["rows of x", "rows of the weight"])
def test_inside_a_shard_map(what):
    """Either x or the weight is sharded: products and gradients equal one device's."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    codes, scales, _ = Weight(8, 128, (1, 64)).arrays("nf4")
    x = rows_of(8, 128, "float32")
    specs = {"rows of x": (P("data"), P(), P("data")), "rows of the weight": (P(), P("tensor"), P(None, "tensor"))}
    of_x, of_weight, of_out = specs[what]

    def loss(multiply, x, codes, scales):
        return jnp.sum(jnp.sin(multiply(x, codes, scales)))

    multiply = partial(quant_matmul, elements="nf4")
    expected = jax.value_and_grad(partial(loss, multiply))(x, codes, scales)
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(multiply, in_specs=(of_x, of_weight, of_weight), out_specs=of_out)
        given = (jax.device_put(x, spec) for x, spec in zip((x, codes, scales), (of_x, of_weight, of_weight)))
        got = jax.jit(jax.value_and_grad(partial(loss, sharded)))(*given)
    for ours, true in zip(got, expected):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gpu", "rows", "kernel"),
    [("h100", 64, "quant_matmul"), ("h100", 65, "dequantize"), ("rtx4090", 256, "quant_matmul"), ("h100", 0, None)],
)
def test_few_rows_take_the_fused_kernel(gpu, rows, kernel, monkeypatch):
    device = Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability)
    monkeypatch.setattr(op, "current_device", lambda: device)
    codes, scales, _ = Weight(64, 128, (1, 64)).arrays("nf4")

    def gradient(x):
        return jax.vjp(lambda x: quant_matmul(x, codes, scales, elements="nf4"), x)[1](jnp.ones((rows, 64), x.dtype))

    program = str(jax.make_jaxpr(gradient)(jnp.ones((rows, 128), jnp.bfloat16)))
    assert ("name=quant_matmul_transposed" in program) == (kernel == "quant_matmul")
    assert ("name=dequantize" in program) == (kernel != "quant_matmul")


U8, F32 = jnp.uint8, jnp.float32


@pytest.mark.parametrize(
    ("codes", "scales", "options", "message"),
    [
        (((4, 32), U8), ((4, 1), F32), {"elements": "nf5"}, "unknown elements 'nf5'; choose from 'nf4'"),
        (((4, 32), jnp.int8), ((4, 1), F32), {}, "codes are uint8, not int8"),
        (((4, 32), U8), ((4, 1), jnp.bfloat16), {}, "scales are float32, or uint8"),
        (((4, 32), U8), ((4,), F32), {}, "two dimensions"),
        (((4, 32), U8), ((4, 3), F32), {}, "3 scales do not divide the 64 columns"),
        (((4, 32), U8), ((3, 1), F32), {}, "3 scales do not divide the 4 rows"),
        (((4, 3), U8), ((4, 2), F32), {}, "blocks of 3 columns separate the two codes of a byte"),
        (((0, 3), U8), ((0, 2), F32), {}, "empty"),
        (((2**16, 2**14), U8), ((1, 1), F32), {}, "fewer than 2.31 are supported"),
        (
            ((4, 32), U8),
            ((4, 1), F32),
            {"tensor_scale": jax.ShapeDtypeStruct((1,), F32)},
            "tensor_scale is one float32",
        ),
        (((4, 32), U8), ((4, 1), F32), {"x": jax.ShapeDtypeStruct((2, 32), F32)}, r"must be \(rows, 64\)"),
        (((4, 32), U8), ((4, 1), F32), {"x": jax.ShapeDtypeStruct((2, 64), jnp.int8)}, "x has dtype int8"),
        (((4, 32), U8), ((4, 1), F32), {"backend": "fused"}, "compute capability 8.0"),
        (((4, 32), U8), ((4, 1), F32), {"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_what_does_not_fit_is_said(codes, scales, options, message):
    codes, scales = (jax.ShapeDtypeStruct(*array) for array in (codes, scales))
    options = {"elements": "nf4", "x": jax.ShapeDtypeStruct((2, 64), jnp.bfloat16), "tensor_scale": None, **options}
    x, tensor_scale = options.pop("x"), options.pop("tensor_scale")
    with pytest.raises(ValueError, match=f"quant_matmul: .*{message}"):
        jax.eval_shape(partial(quant_matmul, **options), x, codes, scales, tensor_scale)


def test_a_weight_of_a_dtype_that_cannot_be_made():
    codes, scales, _ = WEIGHTS["bitsandbytes"].arrays("nf4")
    with pytest.raises(ValueError, match="dtype int32; bfloat16, float16 and float32"):
        dequantize(codes, scales, elements="nf4", dtype=jnp.int32)
