"""The grouped product against a loop over groups in float64: forward, both gradients, every backend."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.grouped_cases import arranged, assert_equal_to_float64

from pallas_kernels.gpus import Device
from pallas_kernels.grouped_matmul import BACKENDS, grouped_matmul, triton, xla_by_block, xla_by_group
from pallas_kernels.registry import ANY_GPU, Backend, choose, never_refuses

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

CASES = {
    "one huge group and empty ones": [0] * 43 + [3] * 2,
    "every group": list(range(5)) * 9,
    "no item in the first and the last": [1, 2, 3] * 15,
}


@given(st.lists(st.integers(0, 7), min_size=40, max_size=40), st.sampled_from([1, 16]))
@settings(max_examples=30, deadline=None)
def test_rows_are_sorted_by_group_in_whole_blocks(items, block):
    """Items of an eighth group, which is not one of the seven, have no row."""
    groups, row_of, item_of = arranged(jnp.asarray(items), 7, "auto", block)
    item_of, row_of, block_group = np.asarray(item_of), np.asarray(row_of), np.asarray(groups.block_group)
    here = [item for item, group in enumerate(items) if group < 7]
    np.testing.assert_array_equal(item_of[row_of[here]], here)
    assert (np.delete(row_of, here) >= len(item_of)).all()
    assert sorted(item_of[item_of < len(items)]) == here
    for row, item in enumerate(item_of):
        assert item == len(items) or block_group[row // block] == items[item]
    counts = np.bincount(items, minlength=8)[:7]
    np.testing.assert_array_equal(np.diff(groups.first), -(-counts // block))


@pytest.mark.parametrize("share", [1, 4])
def test_the_expected_fraction_of_filled_blocks_is_that_of_balanced_items(share):
    """With a share of 4, three in four items have a group on another device, and no row here."""
    items = np.random.default_rng(0).integers(0, 32 * share, 8192 * share)
    groups, _, item_of = arranged(jnp.asarray(np.minimum(items, 32)), 32, "auto", 64)
    filled = int(groups.first[-1]) / len(groups.block_group)
    assert groups.filled(8192, len(item_of)) == pytest.approx(filled, rel=0.03)


@pytest.mark.parametrize("backend", ["xla by group", "xla by block", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_a_loop_over_groups(dtype, backend, monkeypatch):
    run = {
        "xla by group": xla_by_group,
        "xla by block": xla_by_block,
        "triton": SimpleNamespace(
            multiply=partial(triton.multiply, interpret=True), outer=partial(triton.outer, interpret=True)
        ),
    }[backend]
    here = Backend(backend, run, never_refuses, {ANY_GPU: "here"})
    monkeypatch.setattr("pallas_kernels.grouped_matmul.BACKENDS", (here,))
    for items in CASES.values():
        assert_equal_to_float64(items, 5, (40, 24), dtype, backend, block=16)


def test_a_cpu_loops_over_groups_and_a_gpu_over_blocks():
    weight = jax.ShapeDtypeStruct((5, 40, 24), jnp.float32)
    for device, run in ((Device("cpu", "cpu", None), xla_by_group), (Device("gpu", "a GPU", (9, 0)), xla_by_block)):
        assert choose("grouped_matmul", BACKENDS, device, weight, "xla").run is run


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
    with pytest.raises(ValueError, match="do not match the groups"):
        grouped_matmul(jnp.ones((rows, 8)), jnp.ones((4, 8, 8)), groups)
