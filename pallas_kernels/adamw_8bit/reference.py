"""The update in plain jnp, the reference of the kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.adamw_8bit.adam import SIGNED, Adam, AdamStep, QuantizedMoment, Updated, block_of, inverse
from pallas_kernels.adamw_8bit.dynamic_map import TABLES, decode, encode
from pallas_kernels.stochastic_rounding import random_bits, round_to_dtype

# Everything except absmax is computed in the shape of the parameter, not in blocks. On a GPU, XLA then fuses it with
# the rounding of the parameter into one loop, and does not store a float32 moment.


def update(gradient: Float[Array, "l o i"], before: Updated, step: AdamStep, adam: Adam) -> Updated:
    """Return the parameter and the moments after a step; see `adamw_8bit`."""
    parameter, *moments = before
    decayed = [_dequantize(moment, beta, signed) for moment, beta, signed in zip(moments, adam.betas, SIGNED)]
    after, mean, square = adam(
        gradient.astype(jnp.float32),
        parameter.astype(jnp.float32),
        (decayed[0], decayed[1]),
        adam.factors(step),
        step.rate[:, None, None],
        step.decay[:, None, None],
    )
    indices = (jax.lax.broadcasted_iota(jnp.uint32, after.shape, axis) + step.origin[axis] for axis in range(3))
    block = block_of(moments[0])
    new = (
        round_to_dtype(after, parameter.dtype, random_bits(step.key, *indices)),
        _quantize(mean, block, signed=True),
        _quantize(square, block, signed=False),
    )
    return jax.tree.map(lambda new, old: jnp.where(step.finite, new, old), new, before)


def _quantize(moment: Float32[Array, "l o i"], block: tuple[int, int], signed: bool) -> QuantizedMoment:
    (layers, rows, columns), (r, c) = moment.shape, block
    absmax = jnp.abs(moment).reshape(layers, rows // r, r, columns // c, c).max(axis=(2, 4))
    return QuantizedMoment(encode(moment * _spread(inverse(absmax), moment.shape), TABLES[signed]), absmax)


def _dequantize(moment: QuantizedMoment, beta: float, signed: bool) -> Float32[Array, "l o i"]:
    """Return the moment times beta."""
    return decode(moment.codes, TABLES[signed]) * _spread(beta * moment.absmax, moment.codes.shape)


def _spread(block_values: Float32[Array, "l o/r i/c"], shape: tuple[int, ...]) -> Float32[Array, "l o i"]:
    """Repeat the value of each block for its elements."""
    (layers, rows, columns), (_, down, across) = shape, block_values.shape
    repeated = (layers, down, rows // down, across, columns // across)
    return jnp.broadcast_to(block_values[:, :, None, :, None], repeated).reshape(shape)
