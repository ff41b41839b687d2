"""Parts that layers with a recurrent state share: gated delta net and Mamba-2.

Shape letters: b rows of the batch, s positions in a row, t earlier tokens that the convolution sees (kernel - 1), h
heads of n features each, c channels of a convolution.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.layers.attention import Inputs
from jaxtune.models.layers.convolution import convolve
from jaxtune.models.structure.mixers import DeltaNet, Mamba2, RandomSteps
from jaxtune.parallel.layout import P, by_head
from jaxtune.parallel.sequence import deal_positions, from_heads, gather_positions, to_heads


class RecurrentCache(NamedTuple):
    """A layer's cache in decoding.

    Attributes:
        tails: the last t inputs of each convolution; None, three times: rows begin.
        state: the recurrent state, float32; None: it is zero.
    """

    tails: Any  # (b, t, c), three times
    state: Any  # (b, *net.state_shape)


ROWS_BEGIN = RecurrentCache((None, None, None), None)


def memory(net: DeltaNet | Mamba2, batch: int, dtype: jnp.dtype) -> RecurrentCache:
    """Return shapes and dtypes of a layer's cache, which is zero before the first token."""
    tails = (jax.ShapeDtypeStruct((batch, net.kernel - 1, heads * size), dtype) for heads, size in net.convolved_heads)
    return RecurrentCache(tuple(tails), jax.ShapeDtypeStruct((batch, *net.state_shape), jnp.float32))


def run_recurrence(
    recur: Callable[..., tuple[Array, RecurrentCache]],
    projections: Any,
    parameters: Any,
    heads: tuple[Any, Any],
    inputs: Inputs,
    cache: RecurrentCache | None,
) -> tuple[Float[Array, "b s h n"], RecurrentCache | None]:
    """Run a recurrence: each device has whole rows of some heads or, in decoding, all heads of some rows.

    Args:
        recur: a function of (projections, parameters, positions, valid, cache) of a device, in row order, that returns
            its outputs (b, s, h, n) and its updated cache.
        projections: arrays (b, s, h * n).
        parameters: arrays whose first axis has the heads, or None.
        heads: the number of heads of each array of `projections`, and of `parameters`. Fewer heads than devices are
            repeated, so that groups of Mamba-2 are copied to the devices of their heads.
        inputs: the inputs that all layers share.
        cache: the cache before these positions; None: they begin rows, and no cache is returned.
    """
    rows, positions, *_ = by_head()
    of_rows: Any = (inputs.positions, inputs.valid, inputs.place)
    if cache is None:
        projections, parameters = _to_heads(projections, heads[0], 2), _to_heads(parameters, heads[1], 0)
        of_rows = _reshard(of_rows, P(rows, positions))
    else:
        projections, of_rows, cache = _reshard((projections, of_rows, cache), P(rows))
        parameters = _reshard(parameters, P())

    def on_device(projections: Any, parameters: Any, of_rows: Any, cache: RecurrentCache | None) -> Any:
        positions, valid, place = of_rows
        if place is not None:  # the recurrence runs over positions in row order
            in_rows = partial(gather_positions, place=place, axes=())
            projections, positions, valid = jax.tree.map(in_rows, (projections, positions, valid))
        out, after = recur(projections, parameters, positions, valid, cache or ROWS_BEGIN)
        return out if place is None else deal_positions(out, place), cache and after

    # In a shard_map, because the recurrence of the local heads needs no communication.
    arguments = projections, parameters, of_rows, cache
    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
    outs = (by_head(), None) if cache is None else P(rows)
    out, cache = jax.shard_map(on_device, in_specs=specs, out_specs=outs)(*arguments)
    return from_heads(out), cache


def _to_heads(arrays: Any, heads: Any, axis: int) -> Any:
    return jax.tree.map(lambda count, x: None if x is None else to_heads(x, count, axis), heads, arrays)


def _reshard(arrays: Any, spec: P) -> Any:
    return jax.tree.map(lambda array: jax.reshard(array, spec), arrays)


def convolve_heads(
    net: DeltaNet | Mamba2, xs: Any, kernels: Any, biases: Any, positions: Int[Array, "b s"], tails: Any
) -> tuple[list[Float[Array, "b s h n"]], Any]:
    """Return the activated convolutions of a layer's three inputs (b, s, h * n), by head, and their next tails."""
    convolved = [
        convolve(x, kernel, positions, bias, tail) for x, kernel, bias, tail in zip(xs, kernels, biases, tails)
    ]
    by_head = [
        jax.nn.silu(y).reshape(*y.shape[:2], -1, size) for (y, _), (_, size) in zip(convolved, net.convolved_heads)
    ]
    return by_head, tuple(tail for _, tail in convolved)


def draw_step_biases(steps: RandomSteps, key: Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, " h"]:
    """Draw biases whose softplus is a step size, log-uniform between bounds and then at least the floor.

    As `_init_weights` of transformers' nemotron_h, mamba2 and olmo_hybrid.
    """
    drawn = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(steps.low), math.log(steps.high)))
    drawn = jnp.maximum(drawn, steps.floor)
    return drawn + jnp.log(-jnp.expm1(-drawn))  # the inverse of softplus
