"""Items in groups of every kind, their float64 products, and the tolerance for a backend."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import Arrangement, arrange, grouped_matmul

# Largest error relative to the tensor's amax.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


class Arguments(NamedTuple):
    x: jax.Array
    weight: jax.Array
    dy: jax.Array


arranged = jax.jit(arrange, static_argnums=(1, 2, 3))


def arguments(items: list[int], groups: int, shape: tuple[int, int], dtype: str) -> Arguments:
    """Return inputs for items in these groups, and weights of the shape (o, i)."""
    rng, (o, i) = np.random.default_rng(0), shape
    shapes = (len(items), i), (groups, o, i), (len(items), o)
    return Arguments(*(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes))


@jax.jit
def outputs_and_gradients(given: Arguments, arrangement: Arrangement) -> tuple[jax.Array, ...]:
    """Return y and dx by row, and dw."""
    x, dy = (jnp.take(rows, arrangement.item_of, axis=0, mode="fill", fill_value=0) for rows in (given.x, given.dy))
    y, pull = jax.vjp(lambda x, weight: grouped_matmul(x, weight, arrangement.groups), x, given.weight)
    return y, *pull(dy)


def in_float64(items: list[int], given: Arguments) -> tuple[np.ndarray, ...]:
    """Return (y, dx, dw) by item, computed by a loop over groups."""
    x, weight, dy = (np.asarray(values, np.float64) for values in given)
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(weight)
    for group, held in enumerate(weight):
        of_group = np.equal(items, group)
        y[of_group], dx[of_group] = x[of_group] @ held.T, dy[of_group] @ held
        dw[group] = dy[of_group].T @ x[of_group]
    return y, dx, dw


def assert_equal_to_float64(
    items: list[int], groups: int, shape: tuple[int, int], dtype: str, backend: str, block: int | None = None
) -> None:
    """Check forward and both gradients. Rows without an item and groups without items must be exactly zero."""
    given, arrangement = arguments(items, groups, shape, dtype), arranged(jnp.asarray(items), groups, backend, block)
    y, dx, dw = (np.asarray(found, np.float64) for found in outputs_and_gradients(given, arrangement))
    found = y[arrangement.row_of], dx[arrangement.row_of], dw
    for name, got, wanted in zip(("y", "dx", "dw"), found, in_float64(items, given)):
        error, largest = np.abs(got - wanted).max(), np.abs(wanted).max()
        assert error <= TOLERANCE[dtype] * largest, f"{name}: error {error:.2e} of {largest:.2e}"
    unused = np.asarray(arrangement.item_of) == len(items)
    assert not y[unused].any() and not dx[unused].any()
    assert not dw[np.bincount(items, minlength=groups) == 0].any()
