"""FP8 products with scales of every kind, their float64 results, and the tolerance for a backend."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Largest error relative to the amax. Rounding to bfloat16 is off by up to 2^-8, and cuBLASLt's results are
# rounded twice.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}
# Rows and columns that share a scale, for x and for the weight; None: all rows or columns.
TENSOR, ROW, BLOCKS = ((None, None), (None, None)), ((1, None), (1, None)), ((1, 128), (128, 128))


@dataclass(frozen=True)
class Case:
    rows: int = 24
    columns: int = 256
    depth: int = 384
    blocks: tuple = TENSOR
    x_dtype: str = "float8_e4m3fn"
    dtype: str = "bfloat16"


class Arguments(NamedTuple):
    x: jax.Array
    weight: jax.Array
    x_scale: jax.Array
    weight_scale: jax.Array


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Return codes over most of their range, and scales that all differ."""
    rng = np.random.default_rng(seed)

    def side(rows, dtype, block):
        codes = jnp.asarray(rng.normal(size=(rows, case.depth)) * 60, jnp.float32).clip(-448, 448).astype(dtype)
        shape = tuple(1 if part is None else size // part for size, part in zip(codes.shape, block))
        return codes, jnp.asarray(rng.uniform(0.001, 0.01, shape), jnp.float32)

    x, x_scale = side(case.rows, case.x_dtype, case.blocks[0])
    weight, weight_scale = side(case.columns, "float8_e4m3fn", case.blocks[1])
    return Arguments(x, weight, x_scale, weight_scale)


def dequantize_in_float64(codes, scale) -> np.ndarray:
    """Decode codes and scales in float64."""
    codes, scale = np.asarray(codes, np.float64), np.asarray(scale, np.float64)
    return codes * np.kron(scale, np.ones((codes.shape[0] // scale.shape[0], codes.shape[1] // scale.shape[1])))


def assert_close(got, given: Arguments, dtype: str, tolerance: float = 0.0) -> None:
    """Check a product's dtype, and its values against float64 with `tolerance` or the dtype's tolerance."""
    assert got.dtype == dtype
    expected = dequantize_in_float64(given.x, given.x_scale) @ dequantize_in_float64(given.weight, given.weight_scale).T
    assert (
        np.abs(np.asarray(got, np.float64) - expected).max()
        <= max(TOLERANCE[dtype], tolerance) * np.abs(expected).max()
    )
