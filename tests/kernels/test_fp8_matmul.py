"""FP8 products and quantization on a CPU: float64, ml_dtypes' rounding, and Mosaic GPU in jax's interpreter.

The interpreter multiplies in place of wgmma, on memory that starts as NaN, and raises on a race. ptxas' treatment of
the kernel, and the bits with which a tensor core really accumulates, need a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.fp8_cases import BLOCKS, ROW, TENSOR, Arguments, Case, arguments, assert_close, dequantize_in_float64

from pallas_kernels import registry
from pallas_kernels.fp8_matmul import BACKENDS, block_scales, cublaslt, fp8_matmul, mosaic, quantize
from pallas_kernels.fp8_matmul.request import request_for
from pallas_kernels.gpus import GPUS, Device

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

CASES = {
    "tensor": Case(),
    "tensor, e5m2, float32": Case(x_dtype="float8_e5m2", dtype="float32"),
    "rows and channels": Case(blocks=ROW, dtype="float32"),
    "blocks": Case(blocks=BLOCKS, dtype="float32"),
    "blocks, float16": Case(blocks=BLOCKS, dtype="float16"),
    "a row": Case(rows=1, blocks=BLOCKS),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_float64(case):
    given = arguments(case)
    assert_close(jax.jit(partial(fp8_matmul, dtype=case.dtype))(*given), given, case.dtype)


@pytest.mark.every_jax
@pytest.mark.parametrize("fast_accumulation", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES.values() if case.blocks != BLOCKS], ids=str)
def test_the_expression_for_cublaslt_equals_float64(case, fast_accumulation):
    """Fast accumulation does not exist on a CPU, where XLA computes the product itself."""
    given = arguments(case)
    request = request_for(*given, case.dtype, fast_accumulation)
    assert_close(jax.jit(partial(cublaslt.multiply, request=request))(*given), given, case.dtype)


@given(
    blocks=st.tuples(*[st.integers(1, 3)] * 3),
    size=st.tuples(*[st.integers(1, 9)] * 3),
    data=st.integers(0, 2**32 - 1),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_quantized_products_of_any_shape(blocks, size, data):
    """Any number of blocks of any size: the product equals the codes' product, and codes approximate the numbers."""
    (row_blocks, column_blocks, depth_blocks), (row_size, column_size, depth_size) = blocks, size
    rng = np.random.default_rng(data)

    def side(blocks, size):
        shape = blocks * size, depth_blocks * depth_size
        values = rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 6, shape)
        values = jnp.asarray(values, jnp.float32)
        scale = jax.jit(block_scales, static_argnums=1)(values, (size, depth_size))
        assert scale.shape == (blocks, depth_blocks)
        codes = jax.jit(quantize)(values, scale)
        error, unit = np.abs(dequantize_in_float64(codes, scale) - values), dequantize_in_float64(np.ones(shape), scale)
        # Three bits of mantissa; 2^-9 is the smallest number.
        assert (error <= np.maximum(np.abs(values) * 2**-4, unit * 2**-10) * (1 + 1e-5)).all()
        return codes, scale

    (x, x_scale), (weight, weight_scale) = side(row_blocks, row_size), side(column_blocks, column_size)
    given = Arguments(x, weight, x_scale, weight_scale)
    assert_close(jax.jit(partial(fp8_matmul, dtype="float32"))(*given), given, "float32")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax's interpreter of Mosaic GPU can run it from 0.12 on")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [
        # More blocks of k than slots; rows that do not fill a tile.
        Case(rows=130, depth=768, blocks=BLOCKS, dtype="float32"),
        Case(rows=40, columns=128, depth=128, blocks=BLOCKS),
        Case(rows=128, columns=384, depth=256, blocks=BLOCKS, x_dtype="float8_e5m2", dtype="float16"),
    ],
    ids=str,
)
def test_mosaic_interpreted(case):
    given = arguments(case)
    request = request_for(*given, case.dtype)
    assert_close(mosaic.multiply(*given, request, interpret=True), given, case.dtype)


def device(name: str) -> Device:
    return Device("gpu", GPUS[name].kind, GPUS[name].capability)


def request(case: Case):
    return request_for(*arguments(case), case.dtype)


@pytest.mark.parametrize("card", ["rtx4090", "h100", "b200"])
def test_cublaslt_is_chosen_where_there_are_fp8_units(card):
    assert registry.choose("fp8_matmul", BACKENDS, device(card), request(Case())).name == "cublaslt"
    assert registry.choose("fp8_matmul", BACKENDS, device(card), request(Case(blocks=BLOCKS))).name == "xla"


@pytest.mark.parametrize(
    ("card", "case", "reason"),
    [
        ("a100", Case(), "FP8 units"),
        ("h100", Case(blocks=BLOCKS), "equal along k"),
        ("h100", Case(columns=264), "multiples of 16, not 264 x 384"),
        ("h100", Case(depth=200), "multiples of 16, not 256 x 200"),
        ("h100", Case(rows=1), "single row"),
        ("h100", Case(dtype="float16"), "overflow"),
    ],
)
def test_cublaslt_refuses(card, case, reason):
    assert reason in cublaslt.refuses(device(card), request(case))


@pytest.mark.parametrize(
    ("card", "case", "reason"),
    [
        ("b200", Case(blocks=BLOCKS), "Hopper"),
        ("h100", Case(), r"of shapes (24, 3) and (2, 3), not (1, 1) and (1, 1)"),
        ("h100", Case(columns=192, blocks=((1, 128), (64, 128))), "multiples of 128, not 192 x 384"),
    ],
)
def test_mosaic_refuses(card, case, reason):
    assert reason in registry.on_hopper(mosaic.refuses)(device(card), request(case))


def test_mosaic_takes_e5m2_from_jax_0_11_on(monkeypatch):
    blocks, e5m2 = request(Case(blocks=BLOCKS)), request(Case(blocks=BLOCKS, x_dtype="float8_e5m2"))
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert mosaic.refuses(device("h100"), blocks) is None
    assert "e5m2" in mosaic.refuses(device("h100"), e5m2)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert mosaic.refuses(device("h100"), e5m2) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a._replace(x=a.x[0]), r"must be \(m, k\)"),
        (lambda a: a._replace(weight=a.weight[:, :-1]), "differ in k"),
        (lambda a: a._replace(x=a.x.astype(jnp.bfloat16)), "not bfloat16; .*bitcast"),
        (lambda a: a._replace(weight=a.weight.astype(jnp.float8_e5m2)), "the weight is float8_e4m3fn"),
        (lambda a: a._replace(weight_scale=a.weight_scale.astype(jnp.float16)), "weight_scale is float32"),
        (lambda a: a._replace(x_scale=jnp.ones((5, 1))), r"x_scale \(5, 1\) does not cut \(24, 384\)"),
        (lambda a: a._replace(weight_scale=jnp.ones(())), r"weight_scale \(\) does not cut"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        fp8_matmul(*change(arguments(Case())))


def test_results_that_cannot_be():
    with pytest.raises(ValueError, match="the result can be bfloat16"):
        fp8_matmul(*arguments(Case()), dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="'mosaic' cannot run this on cpu"):
        fp8_matmul(*arguments(Case(blocks=BLOCKS)), backend="mosaic")
    with pytest.raises(ValueError, match="blocks of 1 x 7 do not divide"):
        block_scales(jnp.ones((2, 12)), (1, 7))


@pytest.mark.parametrize("backend", ["cublaslt", "xla"])
def test_scales_of_the_dtype_of_the_result_are_a_part_of_the_product(backend):
    """The pattern that XLA passes to cuBLASLt; a CPU rounds both sides to bfloat16 first."""
    given = arguments(Case())
    scales = [scale.astype("bfloat16") for scale in (given.x_scale, given.weight_scale)]
    multiply = {one.name: one.run for one in BACKENDS}[backend]
    request = request_for(given.x, given.weight, *scales)
    found = np.asarray(multiply(given.x, given.weight, *scales, request=request), np.float64)
    expected = dequantize_in_float64(given.x, scales[0]) @ dequantize_in_float64(given.weight, scales[1]).T
    assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_are_rounded_as_by_ml_dtypes(dtype):
    """All codes, the midpoints between them and their neighbours: round to nearest, ties to even."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
    values = values.astype(np.float32)[None]
    got = quantize(jnp.asarray(values), jnp.ones((1, 1)), dtype)
    expected = values.astype(getattr(ml_dtypes, dtype))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16"])
def test_a_block_fills_the_dtype(dtype, most, value_dtype):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256)), value_dtype)
    scale = block_scales(values, (2, 128), dtype)
    codes = np.asarray(quantize(values, scale, dtype), np.float64).reshape(2, 2, 2, 128)
    np.testing.assert_array_equal(np.abs(codes).max(axis=(1, 3)), most)
    magnitude = np.abs(np.asarray(values, np.float64)).reshape(2, 2, 2, 128).max(axis=(1, 3))
    np.testing.assert_allclose(scale, magnitude / most, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_what_is_too_large_for_a_scale_saturates(dtype, most):
    """A plain conversion would give NaN or infinity."""
    codes = quantize(jnp.asarray([[1e6, -1e6, 3e38, 8.0]]), jnp.full((1, 1), 2.0), dtype)
    np.testing.assert_array_equal(np.asarray(codes, np.float32), [[most, -most, most, 4.0]])


def test_zeros_and_the_smallest_numbers_have_scale_one():
    values = jnp.concatenate([jnp.zeros((2, 128)), jnp.full((2, 128), 1e-37), jnp.ones((2, 128))], axis=1)
    scale = block_scales(values, (1, 128))
    np.testing.assert_allclose(scale, [[1, 1, 1 / 448]] * 2)
    codes = np.asarray(quantize(values, scale), np.float32)
    assert not codes[:, :256].any() and (codes[:, 256:] == 448).all()


def test_what_is_not_finite_becomes_nan_and_leaves_the_rest_alone():
    values = np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32)
    values[0, 1], values[1, 2], values[2, 3] = np.nan, np.inf, -np.inf
    finite = np.isfinite(values)
    scale = block_scales(jnp.asarray(values))
    np.testing.assert_allclose(scale[0, 0], np.abs(values[finite]).max() / 448, rtol=1e-6)
    codes = np.asarray(quantize(jnp.asarray(values), scale), np.float32)
    np.testing.assert_array_equal(np.isfinite(codes), finite)
    weight = arguments(Case(depth=128)).weight
    out = np.asarray(fp8_matmul(quantize(jnp.asarray(values), scale), weight, scale, jnp.ones((1, 1))))
    assert np.isnan(out[:3]).all() and np.isfinite(out[3]).all()


def test_differentiating_is_an_error():
    """By any argument, and through jit and remat. A custom_vjp around the op is the way to differentiate it."""
    given = arguments(Case(dtype="float32"))
    x, scale = jnp.ones((24, 384)), given.weight_scale

    def loss(x, scale):
        codes = jax.lax.stop_gradient(quantize(x, given.x_scale))
        return jnp.sum(fp8_matmul(codes, given.weight, given.x_scale, scale, dtype="float32"))

    with pytest.raises(TypeError, match="fp8_matmul has no derivative"):
        jax.grad(jax.jit(jax.checkpoint(loss)), 1)(x, scale)
    with pytest.raises(TypeError, match="quantize has no derivative"):
        jax.grad(loss)(x, scale)
    with pytest.raises(TypeError, match="fp8_matmul has no derivative"):
        jax.grad(lambda x: jnp.sum(fp8_matmul(x.astype("float8_e4m3fn"), *given[1:]).astype("float32")))(x)

    @jax.custom_vjp
    def linear(x):
        return fp8_matmul(quantize(x, given.x_scale), *given[1:], dtype="float32")

    weight = jnp.asarray(dequantize_in_float64(given.weight, given.weight_scale), jnp.float32)
    linear.defvjp(lambda x: (linear(x), None), lambda _, d_out: (d_out @ weight,))
    d_x = jax.grad(lambda x: jnp.sum(jax.checkpoint(linear)(x)))(x)
    np.testing.assert_allclose(d_x, jnp.ones((24, 256)) @ weight, rtol=1e-5)


def test_shards_of_a_mesh():
    """Rows over one axis and columns over the other; the scales' blocks are split with them."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    rows, columns = jax.P("fsdp"), jax.P("tensor")
    with jax.set_mesh(mesh):
        for blocks in (BLOCKS, ROW, TENSOR):
            given = arguments(Case(blocks=blocks, dtype="float32"))
            specs = rows, columns, *((jax.P(), jax.P()) if blocks is TENSOR else (rows, columns))
            multiply = jax.shard_map(
                partial(fp8_matmul, dtype="float32"),
                in_specs=specs,
                out_specs=jax.P("fsdp", "tensor"),
            )
            sharded = Arguments(*(jax.device_put(x, spec) for x, spec in zip(given, specs)))
            assert_close(jax.jit(multiply)(*sharded), given, "float32")
