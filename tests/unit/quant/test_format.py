"""Quantized arrays and their formats: against bitsandbytes, against their definition, and as pytrees."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP

FORMATS = ("nf4", "fp4", "fp8", "nvfp4", "mxfp4", "int8", "int4")


def weights(shape=(64, 512), seed=0) -> np.ndarray:
    """Draw normal weights, with rows of very different size, a block of zeros, and an outlier."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))
    values[3, :128], values[5, 7] = 0.0, 50.0
    return values.astype(np.float32)


def quantize(weight, **options):
    return jax.jit(format_of(QuantOptions(**options), "mlp.up.weight").quantize)(jnp.asarray(weight))


@pytest.fixture
def functional():
    pytest.importorskip("torch", reason="bitsandbytes needs torch, whose CPU build exists for Python 3.11 only")
    return pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")


@pytest.mark.every_jax
@pytest.mark.parametrize("block", [64, 128, 256, 512])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_and_scales_are_those_of_bitsandbytes(functional, one_device, kind, block):
    import torch

    weight = torch.from_numpy(weights())
    codes, state = functional.quantize_4bit(weight, blocksize=block, quant_type=kind)
    ours = quantize(weights(), format=kind, block_size=block, double_quant=False)
    assert np.array_equal(np.asarray(ours.codes).reshape(-1, 1), codes.numpy())
    assert np.array_equal(np.asarray(ours.scales).reshape(-1), state.absmax.numpy())
    theirs = functional.dequantize_4bit(codes, state).numpy()
    assert np.abs(np.asarray(jax.jit(type(ours).dequantize)(ours)) - theirs).max() <= 1e-6

    doubly, states = quantize(weights(), format=kind, block_size=block), state.absmax - state.absmax.mean()
    # bitsandbytes' 8-bit CPU kernel does not round to the nearest; its default backend does, on its map.
    table, groups = functional.create_dynamic_map().numpy(), np.pad(states.numpy(), (0, -len(states) % 256))
    groups = groups.reshape(-1, 256)
    largest = np.abs(groups).max(1, keepdims=True)
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, groups * (1 / largest)).reshape(-1)[: len(states)]
    assert np.array_equal(np.asarray(doubly.scales).reshape(-1), nearest)
    assert np.allclose(np.asarray(doubly.outer_scales), largest[:, 0], rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_any_size_of_weights_stays_finite_and_what_is_too_small_becomes_zero(one_device, format):
    quantize = jax.jit(format_of(QuantOptions(format=format), "").quantize)
    dequantize = jax.jit(lambda array: array.dequantize())
    ordinary = np.random.default_rng(0).normal(size=(128, 256))
    ordinary[0, :7] = 0
    for exponent in (-44, -38, -36, -35, -30, -10, 0, 10, 29):
        weight = (ordinary * 10.0**exponent).astype(np.float32)
        error = np.abs(np.asarray(dequantize(quantize(jnp.asarray(weight))), np.float64) - weight)
        most = 0.25 if format == "mxfp4" else 0.2  # in MXFP4, 8 times a scale becomes 6 times it
        assert (error <= (most if exponent > -33 else 1) * np.abs(weight).max()).all(), exponent


def test_what_has_no_whole_blocks_or_bytes_says_so():
    assert "do not divide" in (format_of(QuantOptions(format="nf4"), "").misfit((128, 96)) or "")
    assert "share a byte" in (format_of(QuantOptions(format="int4", block_size=3), "").misfit((4, 96)) or "")
    assert format_of(QuantOptions(format="int8", block_size=3), "").misfit((4, 96)) is None


@pytest.mark.every_jax
def test_the_dynamic_map_is_that_of_bitsandbytes(functional):
    assert np.array_equal(DYNAMIC_MAP, functional.create_dynamic_map().numpy())


@pytest.mark.parametrize(
    ("options", "largest_error"),
    [
        # Half the widest gap of the format, times the amax of the block.
        (dict(format="nf4", double_quant=False), 0.1520),
        (dict(format="fp8", block_size=64), 2**-4),
        (dict(format="fp8", block_size="channel"), 2**-4),
        (dict(format="fp8", block_size="tensor"), 2**-4),
        (dict(format="int8"), 0.5 / 127),
        (dict(format="int8", block_size=32), 0.5 / 127),
        (dict(format="int4", block_size=32), 0.5 / 7),
    ],
    ids=str,
)
def test_errors_are_at_most_half_a_gap(one_device, options, largest_error):
    weight = weights()
    array = quantize(weight, **options)
    assert array.shape == weight.shape and array.codes.dtype == jnp.uint8
    rows, columns = (size // blocks for size, blocks in zip(weight.shape, array.scales.shape))
    absmax = np.abs(weight).reshape(weight.shape[0] // rows, rows, -1, columns).max((1, 3))
    bound = np.repeat(np.repeat(absmax, rows, 0), columns, 1) * largest_error
    error = np.abs(np.asarray(jax.jit(type(array).dequantize)(array), np.float64) - weight)
    assert (error <= bound * (1 + 1e-5)).all()


def nvfp4_reference(weight: np.ndarray, becomes: float) -> np.ndarray:
    """Quantize to NVFP4 in float64, with the largest value of each block scaled to `becomes`."""
    tensor_scale = np.abs(weight).max() / (448 * 6)
    blocks = weight.reshape(weight.shape[0], -1, 16).astype(np.float64)
    wanted = np.clip(np.abs(blocks).max(-1, keepdims=True) / becomes / tensor_scale, 2.0**-9, 448)
    scale = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * tensor_scale
    values = (blocks / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (values * scale).reshape(weight.shape)


def test_nvfp4_is_its_definition_and_four_over_six_is_never_worse(one_device):
    weight = weights(seed=1)
    plain, adaptive = (
        np.asarray(jax.jit(lambda q: q.dequantize())(quantize(weight, format="nvfp4", four_over_six=on)))
        for on in (False, True)
    )
    expected = nvfp4_reference(weight, 6.0)
    assert (np.abs(plain - expected) <= 1e-5 * np.abs(expected)).mean() > 0.999  # except halves, rounded in float32
    block_error = lambda actual: np.square(actual - weight).reshape(len(weight), -1, 16).sum(-1)  # noqa: E731
    assert (block_error(adaptive) <= block_error(plain) * (1 + 1e-5) + 1e-12).all()
    assert block_error(adaptive).sum() < 0.98 * block_error(plain).sum()


def test_mxfp4_is_its_definition(one_device):
    weight = weights(seed=1)
    array = quantize(weight, format="mxfp4")
    blocks = weight.reshape(len(weight), -1, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** np.where(amax > 0, np.frexp(amax)[1] - 1 - 2, -126)
    values = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale
    assert np.array_equal(np.asarray(array.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float64), scale[..., 0])
    assert np.array_equal(jax.jit(type(array).dequantize)(array), values.reshape(weight.shape))
    assert (np.abs(blocks) > 6 * scale).any()  # some values saturate


def test_what_is_mxfp4_keeps_its_values(one_device):
    """Also if the largest value of a block does not have e2m1's largest exponent, so that the scale changes."""
    rng = np.random.default_rng(0)
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    for most in (16, 7, 6, 4, 2):  # the largest magnitude is 6, 4, 3, 1.5 and 0.5
        codes = rng.integers(0, 16, (64, 8, 32)) if most == 16 else rng.integers(0, most, (64, 8, 32))
        weight = (elements[codes] * 2.0 ** rng.integers(-20, 20, (64, 8, 1))).reshape(64, -1).astype(np.float32)
        array = quantize(weight, format="mxfp4")
        assert np.array_equal(jax.jit(type(array).dequantize)(array), weight)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))
def test_shapes_sizes_and_stacks(one_device, format, rows, columns, seed):
    shape = (128 * rows, 128 * columns)
    array = quantize(np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16), format=format)
    assert array.shape == shape and array.dtype == jnp.bfloat16
    bytes_per_weight = {"nf4": 0.52, "fp4": 0.52, "nvfp4": 0.5627, "mxfp4": 0.5313, "fp8": 1.001}
    bytes_per_weight |= {"int8": 1.04, "int4": 0.54}
    assert array.nbytes <= bytes_per_weight[format] * array.codes.shape[0] * shape[1] + 8
    abstract = format_of(QuantOptions(format=format), "").abstract(
        (3, *shape), jnp.bfloat16, ("layers", "mlp", "embed")
    )
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), array)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), abstract, stacked)
    assert all(jax.tree.leaves(same)) and stacked.shape == (3, *shape)


def test_a_stack_dequantizes_as_its_matrices_do_and_survives_a_checkpoint(one_device, tmp_path):
    matrices = [quantize(weights(seed=seed), format="nf4") for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *matrices)
    whole = jax.jit(type(stacked).dequantize)(stacked)
    ocp.save(str(tmp_path / "saved"), stacked)
    restored = ocp.load(str(tmp_path / "saved"), jax.eval_shape(lambda: stacked))
    for i, matrix in enumerate(matrices):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], restored)
        assert np.array_equal(whole[i], jax.jit(type(one).dequantize)(matrix))
        assert np.array_equal(whole[i], jax.jit(type(one).dequantize)(one))


def test_experts_are_int4_in_the_mix():
    mix = QuantOptions(format="weight_only_mix")
    assert format_of(mix, "mlp.experts.up.weight").elements == "int4"
    assert format_of(mix, "mlp.up.weight").elements == "int8"
