"""Stacks of matrices with 8-bit moments, and the allowed difference between two computations of their update."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.adamw_8bit import Adam, AdamStep, QuantizedMoment, Updated

ADAM = Adam(0.9, 0.99, 1e-8)


@dataclass(frozen=True)
class Stack:
    """Shapes of a parameter (layers, rows, columns) and of a block, and dtypes."""

    shape: tuple[int, int, int]
    block: tuple[int, int]
    dtype: str = "bfloat16"
    gradient: str = "bfloat16"

    def arguments(self, seed: int = 0, finite: bool = True) -> tuple[jax.Array, Updated, AdamStep]:
        """Gradient, arrays and step. The arrays contain all codes, rows of different scale, and a block of zeros."""
        rng, (layers, rows, columns) = np.random.default_rng(seed), self.shape
        blocks = layers, rows // self.block[0], columns // self.block[1]

        def moment(size: float) -> QuantizedMoment:
            absmax = size * np.exp(rng.normal(size=blocks))
            absmax[-1, -1, -1] = 0
            codes = rng.integers(0, 256, self.shape, np.uint8)
            return QuantizedMoment(jnp.asarray(codes), jnp.asarray(absmax, jnp.float32))

        gradient = 1e-3 * rng.normal(size=self.shape) * np.exp(rng.normal(size=(layers, rows, 1)))
        gradient[-1, -self.block[0] :, -self.block[1] :] = 0
        parameter = jnp.asarray(rng.normal(size=self.shape), self.dtype)
        step = AdamStep(
            count=jnp.int32(7),
            rate=jnp.asarray(rng.uniform(0.01, 0.1, layers), jnp.float32),
            decay=jnp.asarray(rng.uniform(0, 0.1, layers), jnp.float32),
            factor=jnp.float32(0.7),
            finite=jnp.bool(finite),
            key=jnp.asarray(rng.integers(0, 2**32, 2, np.uint32)),
            origin=jnp.asarray([3, 2**31 + 5, 1000], jnp.uint32),
        )
        return jnp.asarray(gradient, self.gradient), (parameter, moment(1e-3), moment(1e-6)), step


STACKS = {
    "blocks of 256": Stack((2, 5, 768), (1, 256)),
    "blocks of 172, float32": Stack((2, 8, 344), (1, 172), "float32", "float32"),
    "short rows": Stack((1, 96, 8), (32, 8), "float32"),
    "vector": Stack((3, 1, 512), (1, 256)),
    "float16": Stack((2, 3, 48), (1, 16), "float16"),
    "blocks of two rows": Stack((2, 6, 24), (2, 24)),
}


def assert_updated(found: Updated, expected: Updated) -> None:
    """Assert equality, except where two compilers round differently (fused multiply-adds, say) around a tie.

    There, a code may differ by one, and a parameter may be the other of the two adjacent numbers.
    """
    for ours, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == true.dtype and ours.shape == true.shape
        ulp = float(jnp.finfo(ours.dtype).eps) if jnp.issubdtype(ours.dtype, jnp.floating) else 0.0
        ours, true = (np.asarray(array, np.float64) for array in (ours, true))
        apart = np.abs(ours - true)
        if ulp < 1e-6 and ulp:
            assert (apart <= 4 * ulp * np.maximum(np.abs(true), np.abs(true).max() / 100)).all()
        else:
            assert (apart <= (ulp * np.abs(true) if ulp else 1)).all()
            assert (apart > 0).sum() <= 1 + 1e-3 * apart.size
