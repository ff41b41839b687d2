"""All-to-all exchange of tokens with the devices that hold their experts, in rounds of a fixed size; none is dropped.

An item is a pair of a token and one of its experts. A round moves items in rows, a fixed number of rows from each
device to each other: shapes under jit are static, so rows without an item are zeros. If routing is balanced, one round
moves all items; the busiest device decides how many further rounds there are.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, k chosen experts of a
token, a items of a device (b * s * k), n devices that divide the experts, m rows of a round (n * rows per device).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.mixture.expert_sort import from_rows, to_rows
from jaxtune.parallel.layout import Axes, shards
from pallas_kernels import cost
from pallas_kernels.manual_axes import vary_over, varying_axes

Experts = Callable[[Any, Float[Array, "m d"], Int[Array, " m"], Int[Array, " m"]], Float[Array, "m d"]]


class Items(NamedTuple):
    """The items of a device and where they go. An item is a token and one of its experts; item = token * k + choice.

    Attributes:
        expert: the item's expert, counted from the first expert of its device.
        device: the device that holds this expert.
        place: the item's number among all items for that device.
        order: item numbers, sorted by device.
        count: how many items go to each device.
        first: index in `order` of the first item for each device.
    """

    expert: Int[Array, " a"]
    device: Int[Array, " a"]
    place: Int[Array, " a"]
    order: Int[Array, " a"]
    count: Int[Array, " n"]
    first: Int[Array, " n"]


def through_experts(
    experts: Experts,
    values: Any,
    x: Float[Array, "b s d"],
    chosen: Int[Array, "b s k"],
    weights: Float[Array, "b s k"],
    local_experts: int,
    axes: Axes,
    factor: float,
) -> Float[Array, "b s d"]:
    """Inside a shard_map: return the weighted sum over the experts of each token, float32.

    In a round a device sends each device `factor` times the rows that it would get under balanced routing. There are as
    many rounds as the busiest device needs, one if routing is balanced. The rounds after the first are recomputed in
    the backward pass, so that only one round takes memory.

    Args:
        experts: runs the experts of a device on rows. Its arguments are `values`, the rows, the expert of each row
            (counted from the device's first), and the token of each row (counted over the tokens of all devices). Rows
            without a token are zeros, with expert `local_experts`.
        values: all arrays that `experts` needs; it must not close over any, because the custom derivative would miss
            them.
        chosen: the experts of each token, numbered over all devices.
        local_experts: the number of experts on a device.
        axes: mesh axes over which experts and tokens are divided.
        factor: rows of a round for each device, as a multiple of the rows that it would get under balanced routing.
    """
    tokens, active, parts = x.shape[0] * x.shape[1], chosen.shape[2], shards(axes, jax.sharding.get_abstract_mesh())
    most = tokens * min(active, local_experts)  # rows for one device at most: a token goes to an expert once
    size = min(most, math.ceil(factor * tokens * active / parts))
    # Rows n * size to (n + 1) * size go to device n, and arrive in the order of senders. The exchange is its own
    # inverse, so it also takes results back.
    exchanged = partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    # Gradients of parameters that other axes replicate are summed over these axes. Done here, the sum happens once and
    # outside the rounds; inside, not all devices would take part, because their numbers of rounds may differ.
    values = jax.tree.map(lambda value: vary_over(varying_axes(x), value)[0], values)
    leaves, structure = jax.tree.flatten((values, x, weights))

    def run_round(number: Array | int, leaves: list[Array], items: Items) -> Array:
        # To rows by device, to the devices of the experts, through them, back by the same all-to-all, to tokens.
        values, x, weights = structure.unflatten(leaves)
        item_of, row_of = _rows(items, number, size)
        token_of = item_of // active
        expert = jnp.take(items.expert, item_of, mode="fill", fill_value=local_experts)
        rows, expert, token = map(exchanged, (to_rows(x, token_of, row_of), expert, token_of))
        # Received rows are ordered by sender, `size` rows each: number their tokens over all devices.
        token += jnp.repeat(jnp.arange(parts, dtype=jnp.int32) * tokens, size)
        return from_rows(exchanged(experts(values, rows, expert, token)), item_of, row_of, weights)

    items = _by_device(chosen.reshape(-1), parts, local_experts)
    total = run_round(0, leaves, items)
    if size == most:  # the first round has room for every item
        return total
    # The same number on all devices: a device with fewer rounds would leave the others waiting in the all-to-all.
    rounds = jax.lax.pmax(-(-items.count.max() // size), axes)
    return _with_further_rounds(run_round, total, rounds, leaves, items)


def _by_device(chosen: Int[Array, " a"], parts: int, local_experts: int) -> Items:
    # The stable sort keeps the items for a device in the order of tokens; `place` is its inverse, counted by device.
    device, expert = jnp.divmod(chosen, local_experts)
    numbers = jnp.arange(len(chosen), dtype=jnp.int32)
    order = jnp.argsort(device, stable=True).astype(jnp.int32)
    count = jnp.bincount(device, length=parts).astype(jnp.int32)
    first = jnp.cumsum(count).astype(jnp.int32) - count
    place = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True) - first[device]
    return Items(expert, device, place, order, count, first)


def _rows(items: Items, number: Array | int, size: int) -> tuple[Int[Array, " m"], Int[Array, " a"]]:
    """Return the item of each row of a round and the row of each item; a device sends `size` rows to each device.

    A row without an item has the number of items; an item that is not in this round has the number of rows.
    """
    # Round n has the items with places n * size to (n + 1) * size - 1 of each device.
    place = number * size + jnp.arange(size, dtype=jnp.int32)
    # Places past the count of a device read items of the next one; the line below replaces them.
    item_of = jnp.take(items.order, items.first[:, None] + place, mode="clip")
    item_of = jnp.where(place < items.count[:, None], item_of, len(items.order)).reshape(-1)
    row_of = jnp.where(items.place // size == number, items.device * size + items.place % size, len(item_of))
    return item_of, row_of


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_further_rounds(in_round: Callable, total: Array, rounds: Array, leaves: list[Array], items: Items) -> Array:
    """Add the further rounds to the total of the first."""
    # A custom derivative, because a fori_loop with a dynamic number of iterations has no reverse mode.
    with cost.iterations(0):  # the number of further rounds if routing is balanced, for cost estimates
        return jax.lax.fori_loop(1, rounds, lambda number, total: total + in_round(number, leaves, items), total)


def _forward(in_round: Callable, *arguments: Any) -> tuple[Array, tuple]:
    """`_with_further_rounds` for arguments that are marked as differentiated or not (`symbolic_zeros`)."""
    total, rounds, leaves, items = jax.tree.map(lambda argument: argument.value, arguments)
    # Frozen weights, quantized ones among them, get no gradient: only differentiated leaves have a float32 sum.
    differentiated = [leaf.value if leaf.perturbed else None for leaf in arguments[2]]
    fixed = [None if leaf.perturbed else leaf.value for leaf in arguments[2]]
    return _with_further_rounds(in_round, total, rounds, leaves, items), (rounds, differentiated, fixed, items)


def _backward(in_round: Callable, residuals: tuple, d_total: Array) -> tuple[Array, None, list[Array | None], None]:
    rounds, differentiated, fixed, items = residuals

    def add(number: Array, sums: list[Array | None]) -> list[Array | None]:
        # Recompute the round and pull the cotangent back through it.
        def run_round(differentiated: list[Array | None]) -> Array:
            return in_round(
                number, [one if other is None else other for one, other in zip(differentiated, fixed)], items
            )

        return jax.tree.map(lambda total, one: total + one, sums, jax.vjp(run_round, differentiated)[1](d_total)[0])

    zeros = jax.tree.map(
        lambda leaf: vary_over(varying_axes(leaf), jnp.zeros(leaf.shape, jnp.float32))[0], differentiated
    )
    # The cotangent of `total` passes through unchanged: the first round's own derivative is outside this function.
    with cost.iterations(0):
        sums = jax.lax.fori_loop(1, rounds, add, zeros)
    return d_total, None, jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, differentiated), None


_with_further_rounds.defvjp(_forward, _backward, symbolic_zeros=True)
