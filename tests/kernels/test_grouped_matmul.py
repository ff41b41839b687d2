"""The grouped product against a loop over groups in float64: forward, both gradients, every backend."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import arrange, grouped_matmul, triton
from pallas_kernels.registry import ANY_CARD, Backend, never_refuses

CASES = {
    "one huge group and empty ones": [0] * 43 + [3] * 2,
    "every group": list(range(5)) * 9,
    "no item in the first and the last": [1, 2, 3] * 15,
}


arranged = jax.jit(arrange, static_argnums=(1, 2, 3))


@given(st.lists(st.integers(0, 6), min_size=40, max_size=40), st.sampled_from([1, 16]))
@settings(max_examples=30, deadline=None)
def test_rows_are_sorted_by_group_in_whole_blocks(items, block):
    groups, row_of, item_of = arranged(jnp.asarray(items), 7, "auto", block)
    item_of, block_group = np.asarray(item_of), np.asarray(groups.block_group)
    np.testing.assert_array_equal(item_of[np.asarray(row_of)], np.arange(len(items)))
    assert sorted(item_of[item_of < len(items)]) == list(range(len(items)))
    for row, item in enumerate(item_of):
        assert item == len(items) or block_group[row // block] == items[item]
    counts = np.bincount(items, minlength=7)
    np.testing.assert_array_equal(np.diff(groups.first), -(-counts // block))


def expected(items, x, weight, dy):
    """(y, dx, dw) of items in float64."""
    y, dx, dw = np.zeros((len(x), weight.shape[1])), np.zeros_like(x), np.zeros_like(weight)
    for item, group in enumerate(items):
        y[item] = weight[group] @ x[item]
        dx[item] = weight[group].T @ dy[item]
        dw[group] += np.outer(dy[item], x[item])
    return y, dx, dw


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_a_loop_over_items(dtype, backend, monkeypatch):
    (o, i), rng = (40, 24), np.random.default_rng(0)
    if backend == "triton":
        interpreted = SimpleNamespace(
            multiply=partial(triton.multiply, interpret=True), outer=partial(triton.outer, interpret=True)
        )
        here = Backend("triton", interpreted, never_refuses, {ANY_CARD: "here"})
        monkeypatch.setattr("pallas_kernels.grouped_matmul.BACKENDS", (here,))

    @jax.jit
    def both(x, weight, dy, arrangement):
        x, dy = (jnp.take(rows, arrangement.item_of, axis=0, mode="fill", fill_value=0) for rows in (x, dy))
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, arrangement.groups), x, weight)
        return y, *back(dy)

    for items in CASES.values():
        x, dy, weight = (
            jnp.asarray(rng.normal(size=shape), dtype) for shape in ((len(items), i), (len(items), o), (5, o, i))
        )
        arrangement = arranged(jnp.asarray(items), 5, backend, 16)
        y, dx, dw = both(x, weight, dy, arrangement)
        exact = expected(items, *(np.asarray(values, np.float64) for values in (x, weight, dy)))
        for found, wanted in zip((y[arrangement.row_of], dx[arrangement.row_of], dw), exact):
            bound = (2e-6 if dtype == "float32" else 1e-2) * np.abs(wanted).max()
            assert np.abs(np.asarray(found, np.float64) - wanted).max() <= bound
        unused = np.asarray(arrangement.item_of) == len(items)
        assert not np.asarray(y)[unused].any() and not np.asarray(dx)[unused].any()


def test_what_a_frozen_weight_multiplies_is_not_saved():
    arrangement = arranged(jnp.arange(40) % 5, 5, "xla")
    x, weight = jnp.ones((len(arrangement.item_of), 24)), jnp.ones((5, 40, 24))
    _, frozen = jax.vjp(lambda x: grouped_matmul(x, weight, arrangement.groups), x)
    _, trained = jax.vjp(lambda w: grouped_matmul(x, w, arrangement.groups), weight)
    assert x.shape not in [leaf.shape for leaf in jax.tree.leaves(frozen)]
    assert x.shape in [leaf.shape for leaf in jax.tree.leaves(trained)]


def test_what_does_not_fit_together_is_refused():
    groups = arranged(jnp.arange(40) % 5, 5, "xla").groups
    rows = 16 * len(groups.block_group)
    with pytest.raises(ValueError, match=r"x \(\d+, 8\) must be \(rows, i\)"):
        grouped_matmul(jnp.ones((rows, 8)), jnp.ones((5, 8, 9)), groups)
    with pytest.raises(ValueError, match="are not those of the groups"):
        grouped_matmul(jnp.ones((rows, 8)), jnp.ones((4, 8, 8)), groups)
