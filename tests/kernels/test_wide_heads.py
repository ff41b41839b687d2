"""The attention kernels for heads above 256 against a float64 reference, forward and backward; interpreted."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.attention_cases import (
    Case,
    arguments,
    assert_close,
    by_intervals_alone,
    in_float64,
    outputs_and_gradients,
    poison_unseen,
)

from pallas_kernels.flash_attention import differentiate, reference, triton_wide
from pallas_kernels.flash_attention.triton_wide import WideTile, WideTiles

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

# Small blocks, different in the two directions, and several programs for the columns of a block.
TILES = WideTiles(
    forward=WideTile(32, 16, 4, 2, columns=256), dq=WideTile(16, 32, 4, 2, 128), dkdv=WideTile(16, 32, 4, 2, 256)
)
interpreted = {"tiles": TILES, "interpret": True}
OP = differentiate.attention(partial(triton_wide.forward, **interpreted), partial(triton_wide.backward, **interpreted))


def run(case: Case, problem):
    return outputs_and_gradients(OP, by_intervals_alone(case.variant), problem)


# Cases with the same shapes and soft-cap are compiled once.
PACKED = ((9, 1, -3, 20, 1), ())
CAPPED = Case(37, head_dim=512, soft_cap=1.5, sinks=True)
BFLOAT16 = Case(37, head_dim=320, heads=(4, 1), dtype="bfloat16")


@pytest.mark.parametrize("documents", [PACKED, None], ids=["packed", "one document"])
@pytest.mark.parametrize(
    ("case", "window"), [(CAPPED, 7), (BFLOAT16, 7), (BFLOAT16, None)], ids=["512", "320, window", "320"]
)
def test_equals_float64(case, window, documents):
    case = Case(**{**vars(case), "window": window, "documents": documents})
    problem = arguments(case)
    assert_close(run(case, problem), in_float64(case, problem), case.dtype)


@given(
    documents=st.tuples(*[st.lists(st.just(1) | st.integers(1, 30), max_size=6)] * 2),
    window=st.none() | st.integers(1, 40),
    offset=st.sampled_from([0, -41, 20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_layout_equals_float64(documents, window, offset, seed):
    fitting = tuple(tuple(np.diff(np.minimum(np.cumsum([0, *row]), 37))) for row in documents)
    case = Case(**{**vars(CAPPED), "documents": fitting, "window": window, "offset": offset})
    problem = arguments(case, seed)
    assert_close(run(case, problem), in_float64(case, problem), case.dtype)


def test_tokens_of_an_image_see_each_other():
    case = Case(
        **{**vars(CAPPED), "documents": ((33,), (37,)), "spans": (((2, 19), (20, 33)), ((5, 37),)), "window": 20}
    )
    problem = arguments(case)
    assert_close(run(case, problem), in_float64(case, problem), case.dtype)


def test_what_is_not_seen_never_leaks():
    """Queries that see nothing and keys that no query sees hold NaN, also in cotangents; others must not change."""
    case = Case(**{**vars(CAPPED), "documents": PACKED, "window": 20})
    clean = arguments(case)
    blind = np.asarray(clean.first >= clean.end)
    unseen = np.asarray(~reference.visible(clean.first, clean.end, clean.k.shape[1]).any(axis=1))
    assert blind.any() and unseen.any()
    expected, got = run(case, clean), run(case, poison_unseen(clean, blind, unseen))
    for tensor in expected:
        np.testing.assert_array_equal(got[tensor], expected[tensor], err_msg=tensor)
    for tensor, silent in {"out": blind, "d_q": blind, "d_k": unseen, "d_v": unseen}.items():
        assert not np.asarray(got[tensor])[silent].any()
