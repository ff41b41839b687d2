"""Rows sent to the devices that have their experts, and back, so many at once; none is dropped."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.layers.expert_sort import from_rows, to_rows
from jaxtune.parallel.layout import Axes, shards
from pallas_kernels import cost
from pallas_kernels.manual_axes import vary_over, varying_axes

Experts = Callable[[Any, Float[Array, "m d"], Int[Array, " m"], Int[Array, " m"]], Float[Array, "m d"]]


class Items(NamedTuple):
    """A token and one of its experts each, of a device, in the order of their numbers but for `order`.

    expert: which of the experts of its device. device: where that is. place: its number among those that go there.
    order: the items, by device. count, first: of each device, how many go there and which place in `order` is the first
    of them.
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
    here: int,
    axes: Axes,
    factor: float,
) -> Float[Array, "b s d"]:
    """Inside a shard_map: the weighted sum over the experts of each token, float32.

    In a round a device sends each of the others `factor` times the rows that would go there if all got as many; there
    are as many rounds as the busiest device needs, one where routing is balanced. Those after the first are computed
    again in the backward pass, so that no more than one takes memory.

    Args:
        experts: what the experts of a device make of rows. Takes `values`, the rows, the expert of each, counted from
            the first of the device, and its token, counted over those of all devices. Rows without a token are zeros,
            and their expert is `here`.
        values: arrays that `experts` needs; none may come by its closure.
        chosen: experts of each token, of those of all devices.
        here: the number of experts of a device.
        axes: mesh axes over which experts and tokens are divided.
    """
    tokens, active, parts = x.shape[0] * x.shape[1], chosen.shape[2], shards(axes, jax.sharding.get_abstract_mesh())
    most = tokens * min(active, here)  # a token goes to an expert once
    size = min(most, math.ceil(factor * tokens * active / parts))
    exchanged = partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    # Of parameters that other axes replicate, gradients are summed over these axes once, and not by devices of which
    # some have rounds that others have not.
    values = jax.tree.map(lambda value: vary_over(varying_axes(x), value)[0], values)
    leaves, structure = jax.tree.flatten((values, x, weights))

    def in_round(number: Array | int, leaves: list[Array], items: Items) -> Array:
        values, x, weights = structure.unflatten(leaves)
        item_of, row_of = _rows(items, number, size)
        token_of = item_of // active
        expert = jnp.take(items.expert, item_of, mode="fill", fill_value=here)
        rows, expert, token = map(exchanged, (to_rows(x, token_of, row_of), expert, token_of))
        token += jnp.repeat(jnp.arange(parts, dtype=jnp.int32) * tokens, size)
        return from_rows(exchanged(experts(values, rows, expert, token)), item_of, row_of, weights)

    items = _by_device(chosen.reshape(-1), parts, here)
    total = in_round(0, leaves, items)
    if size == most:
        return total
    rounds = jax.lax.pmax(-(-items.count.max() // size), axes)
    return _with_further_rounds(in_round, total, rounds, leaves, items)


def _by_device(chosen: Int[Array, " a"], parts: int, here: int) -> Items:
    device, expert = jnp.divmod(chosen, here)
    numbers = jnp.arange(len(chosen), dtype=jnp.int32)
    order = jnp.argsort(device, stable=True).astype(jnp.int32)
    count = jnp.bincount(device, length=parts).astype(jnp.int32)
    first = jnp.cumsum(count).astype(jnp.int32) - count
    place = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True) - first[device]
    return Items(expert, device, place, order, count, first)


def _rows(items: Items, number: Array | int, size: int) -> tuple[Int[Array, " m"], Int[Array, " a"]]:
    """Of a round, in which a device sends so many rows to each: the item of each row, and the row of each item."""
    place = number * size + jnp.arange(size, dtype=jnp.int32)
    item_of = jnp.take(items.order, items.first[:, None] + place, mode="clip")
    item_of = jnp.where(place < items.count[:, None], item_of, len(items.order)).reshape(-1)
    row_of = jnp.where(items.place // size == number, items.device * size + items.place % size, len(item_of))
    return item_of, row_of


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_further_rounds(in_round: Callable, total: Array, rounds: Array, leaves: list[Array], items: Items) -> Array:
    """The total of the first round and of those after it."""
    with cost.iterations(0):  # where routing is balanced
        return jax.lax.fori_loop(1, rounds, lambda number, total: total + in_round(number, leaves, items), total)


def _forward(in_round: Callable, *arguments: Any) -> tuple[Array, tuple]:
    """`_with_further_rounds` of arguments that say whether they are differentiated."""
    total, rounds, leaves, items = jax.tree.map(lambda argument: argument.value, arguments)
    moved = [leaf.value if leaf.perturbed else None for leaf in arguments[2]]
    fixed = [None if leaf.perturbed else leaf.value for leaf in arguments[2]]
    return _with_further_rounds(in_round, total, rounds, leaves, items), (rounds, moved, fixed, items)


def _backward(in_round: Callable, residuals: tuple, d_total: Array) -> tuple[Array, None, list[Array | None], None]:
    rounds, moved, fixed, items = residuals

    def add(number: Array, sums: list[Array | None]) -> list[Array | None]:
        def of(moved: list[Array | None]) -> Array:
            return in_round(number, [one if other is None else other for one, other in zip(moved, fixed)], items)

        return jax.tree.map(lambda total, one: total + one, sums, jax.vjp(of, moved)[1](d_total)[0])

    zeros = jax.tree.map(lambda leaf: vary_over(varying_axes(leaf), jnp.zeros(leaf.shape, jnp.float32))[0], moved)
    with cost.iterations(0):
        sums = jax.lax.fori_loop(1, rounds, add, zeros)
    return d_total, None, jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, moved), None


_with_further_rounds.defvjp(_forward, _backward, symbolic_zeros=True)
