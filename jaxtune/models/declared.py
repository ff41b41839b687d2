"""How a module declares a parameter: shape, layout and random values, without any value."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Init = Callable[[Array, tuple[int, ...], Any], Array]


def declared(
    shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init, kind: type[nnx.Variable] = nnx.Param
) -> Any:
    """A parameter with a logical name for each dimension; `decoder.bind` puts a value in its place."""
    return kind(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, init=init)
