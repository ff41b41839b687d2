"""Number formats of a run."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Recipe:
    """The dtype of activations, to which weights are cast where they are used, and how products are computed."""

    dtype: jnp.dtype
    matmul_precision: str  # of jax.default_matmul_precision: float32 products are not to become TF32


RECIPES = {
    "bf16": Recipe(jnp.dtype("bfloat16"), "default"),
    "fp32": Recipe(jnp.dtype("float32"), "highest"),
}
