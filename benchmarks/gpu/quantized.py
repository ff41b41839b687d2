"""Random weights in the formats of jaxtune.quant, and the errors of results."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gpu.workers import Row
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of

# Arguments of the kernels: codes, scales, tensor_scale.
Weight = tuple[Array, Array, Array | None]


def format_named(name: str, double_quant: bool = True) -> Format:
    """Return a format with the options of its recipe in configs/."""
    options: Any = SimpleNamespace(format=name, block_size=None, double_quant=double_quant, four_over_six=True)
    return format_of(options, "")


@functools.cache
def weights(format: str, shape: tuple[int, int], count: int) -> list[Weight]:
    """Return normally distributed matrices in a format of jaxtune.quant, without double quantization, for kernels."""
    quantize = format_named(format, double_quant=False).quantize

    @jax.jit
    def make(key: Array) -> Weight:
        matrix = quantize(jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5)
        return matrix.codes, *matrix.kernel_scales()

    return [make(key) for key in jax.random.split(jax.random.key(0), count)]


@jax.jit
def largest_error(found: Float[Array, "*shape"], wanted: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Return the largest error of an element over the root mean square of `wanted`; NaN if any element is NaN."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.abs(found - wanted).max() / jnp.sqrt(jnp.square(wanted).mean())


@jax.jit
def largest_relative_error(found: Float[Array, "*shape"], wanted: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Return the largest relative error of an element; infinite if zero is wanted and the result is not zero."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.where(found == wanted, 0.0, jnp.abs(found - wanted) / jnp.abs(wanted)).max()


def wrong(what: str, error: float, allowed: float) -> Row:
    """Return the columns of a row for a wrong result, which is not timed; empty if the result is correct."""
    if error <= allowed:
        return {}
    return {"error": f"wrong: the largest error of {what} is {error:.1e}, allowed is {allowed:.1e}"}
