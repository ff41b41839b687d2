"""Reference for FP8 and NVFP4 products of a linear layer: rounded by ml_dtypes, multiplied in float64.

R rows, S sequence, I inner, O out; x [R, S, I], W [O, I], dy [R, S, O].
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxtune.parallel.layout import by_token
from jaxtune.parallel.random import Noise
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.hadamard import PLAIN
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul

ROWS, LENGTH, INNER, OUT = 2, 32, 64, 48
AXES = ("embed", "rank")
FP8, FP8_ROTATED = Fp8Matmul(hadamard=False, online=False), Fp8Matmul(hadamard=True, online=False)
NVFP4 = Nvfp4Matmul(stochastic_rounding=False, hadamard=False, four_over_six=False)
NVFP4_ALL = Nvfp4Matmul(stochastic_rounding=True, hadamard=True, four_over_six=True)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def case(length=LENGTH, seed=0):
    """Draw x, W, dy: normal, rows of different size, an outlier in each."""
    rng = np.random.default_rng(seed)
    shapes = (ROWS, length, INNER), (OUT, INNER), (ROWS, length, OUT)
    arrays = [rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1))) for shape in shapes]
    for array in arrays:
        array.flat[5] = 20.0
    return [array.astype(np.float32) for array in arrays]


def noise(key=0):
    return Noise(jax.random.key(key), jnp.arange(7, 7 + ROWS))


def products(x, weight: LowPrecision, dy, noise=None):
    """Return (y, dx, dW or None, cotangent of the scales or None)."""
    trained = weight.weight if isinstance(weight.weight, jax.Array) else None

    @jax.jit
    def run(x, trained, scales, dy):
        def apply(x, trained, scales):
            leaf = LowPrecision(weight.operands, weight.weight if trained is None else trained, scales, weight.numbers)
            return leaf.matmul(x, None, noise)

        y, backward = jax.vjp(apply, x, trained, scales)
        return y, *backward(dy.astype(y.dtype))

    return run(jnp.asarray(x), trained, weight.scales, jax.device_put(dy, by_token()))


def plain(x, w, dy):
    x, w, dy = (np.asarray(array, np.float64) for array in (x, w, dy))
    return x @ w.T, dy @ w, np.einsum("bso,bsi->oi", dy, x)


def relative(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


def assert_same(actual, expected, within=1e-6):
    assert np.abs(np.asarray(actual, np.float64) - expected).max() <= within * np.abs(expected).max()


# References: a matrix, contracted over its last dimension, rounded to a format.


def scale_of_bfloat16(scale):
    return np.float32(scale).astype(ml_dtypes.bfloat16).astype(np.float32)


def in_fp8(matrix, dtype, scale=None):
    most = np.float32(ml_dtypes.finfo(dtype).max)
    scale = scale_of_bfloat16(np.abs(matrix).max().astype(np.float32) / most if scale is None else scale)
    return np.clip(matrix / scale, -most, most).astype(dtype).astype(np.float64) * np.float64(scale)


def in_nvfp4(matrix, rows=1, four_over_six=False):
    matrix = np.asarray(matrix, np.float32)
    blocks = matrix.reshape(len(matrix) // rows, rows, -1, 16)
    absmax = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    tensor_scale = np.abs(matrix).max() / np.float32(6 * 448)

    def rounded(becomes):
        scales = np.clip(absmax / np.float32(becomes) / tensor_scale, 2.0**-9, 448)
        scales = scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
        values = np.clip(blocks / scales, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
        return values.astype(np.float64), np.square(values - blocks).sum(axis=(1, 3), keepdims=True)

    values, error = rounded(6)
    if four_over_six:
        to_four, to_four_error = rounded(4)
        values = np.where(to_four_error < error, to_four, values)
    return values.reshape(matrix.shape)


def rotated_in_blocks(matrix, by=PLAIN):
    return (matrix.reshape(-1, 16).astype(np.float64) @ by.T).reshape(matrix.shape).astype(np.float32)


def tokens(array):
    return array.reshape(-1, array.shape[-1])
