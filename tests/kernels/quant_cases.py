"""Quantized weights of every shape, their float64 results, and the tolerance for a backend."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul import ELEMENTS, reference

# Half a unit in the last place, relative to the number.
HALF_ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Weight:
    """Shapes of a weight. `low_scales`: float8_e4m3fn scales (as bits) and a scale for the tensor, as in NVFP4."""

    rows: int
    columns: int
    block: tuple[int, int]
    low_scales: bool = False

    def arrays(self, elements: str, nan: bool = False, seed: int = 0) -> tuple[Any, Any, Any]:
        """Return random codes (with NaN only if requested), scales, and the tensor's scale or None."""
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (self.rows, self.columns // ELEMENTS[elements].packed), np.uint8)
        if elements == "e4m3":
            codes = np.where((codes & 0x7F == 0x7F) & (not nan), 0, codes)
        shape = (self.rows // self.block[0], self.columns // self.block[1])
        if self.low_scales:
            return codes, rng.integers(0, 0x50, shape, np.uint8), np.float32(0.37)
        return codes, rng.uniform(0.5, 1.5, shape).astype(np.float32), None


WEIGHTS = {
    "bitsandbytes": Weight(70, 192, (1, 64)),
    "MXFP4": Weight(37, 96, (1, 32)),
    "NVFP4": Weight(37, 96, (1, 16), low_scales=True),
    "square": Weight(64, 256, (32, 128)),
    "per channel": Weight(66, 138, (1, 138)),
    "wide": Weight(3, 1500, (1, 1500)),
}


def in_float64(codes, scales, tensor_scale, elements) -> np.ndarray:
    with jax.enable_x64(True):
        return np.array(reference.weight(codes, scales, tensor_scale, elements, jnp.float64))


def assert_weight(got, arrays: tuple[Any, Any, Any], elements: str, dtype: str) -> None:
    """Allow three roundings in float32 and one to the dtype; NaN must match."""
    expected, got = in_float64(*arrays, elements), np.asarray(got, np.float64)
    assert (np.isnan(got) == np.isnan(expected)).all()
    bound = np.abs(expected) * (HALF_ULP[dtype] + 3 * HALF_ULP["float32"])
    # Subnormal numbers of float16 are further apart.
    bound += 2.0**-25 if dtype == "float16" else 0
    assert (np.abs(got - expected) <= bound)[~np.isnan(expected)].all()


def assert_product(got, x, weight, dtype):
    """Compare with float64: the weight is rounded to the dtype, and the product once more."""
    expected = np.asarray(x, np.float64) @ weight
    error = np.abs(np.asarray(got, np.float64) - expected)
    # Each product is within the roundings of its terms, even if the terms cancel.
    terms = np.abs(np.asarray(x, np.float64)) @ np.abs(weight)
    assert (error <= HALF_ULP[dtype] * (terms + np.abs(expected)) + 1e-6 * terms).all()


def rows_of(m, width, dtype, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(m, width)), dtype)
