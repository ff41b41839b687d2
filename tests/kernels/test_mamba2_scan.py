"""Mamba-2 by chunks against the recurrence in float64: forward, every gradient, packed documents, decoding."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.delta_cases import assert_close
from kernels.mamba2_cases import Arguments, Case, arguments, in_float64, outputs_and_gradients

from pallas_kernels.mamba2_scan import mamba2_scan, triton, xla

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

BACKENDS = {"xla": xla.mamba2_scan, "triton": partial(triton.mamba2_scan, interpret=True)}
every_backend = pytest.mark.parametrize("backend", BACKENDS)

# Boundaries within chunks of 64, at and around their edges, several in one chunk, documents of length 1.
PACKED = ((40, 24, 1, 62, 2, 21), (1, 1, 1, 126, 20, 1))
# Cases of one shape and dtype compile once.
GRID = {
    "one document": Case(),
    "packed": Case(PACKED),
    "packed, one group, bfloat16": Case(PACKED, groups=1, dtype="bfloat16"),
    "packed, forgotten at once": Case(PACKED, step=10.0),
}


@pytest.mark.every_jax
@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
@every_backend
def test_equals_the_recurrence_in_float64(backend, case):
    problem = arguments(case)
    assert_close(outputs_and_gradients(BACKENDS[backend], problem), in_float64(problem), case.tolerance)


def test_programs_of_whole_chunks_equal_float64(monkeypatch):
    """As on Hopper; and the two heads of a group in different programs."""
    monkeypatch.setattr(triton, "HEADS", 1)
    problem = arguments(Case(PACKED))
    op = partial(triton.mamba2_scan, tokens=64, interpret=True)
    assert_close(outputs_and_gradients(op, problem), in_float64(problem))


@every_backend
@given(documents=st.tuples(*[st.lists(st.just(1) | st.integers(1, 140), max_size=12)] * 2), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_any_documents_equal_float64(backend, documents, seed):
    """The total length is always the same, so that this compiles once."""
    length = 150
    fitting = tuple(tuple(np.diff(np.minimum(np.cumsum([0, *row, length]), length))) for row in documents)
    problem = arguments(Case(tuple(tuple(n for n in row if n) for row in fitting)), seed)
    assert_close(outputs_and_gradients(BACKENDS[backend], problem), in_float64(problem))


@every_backend
def test_nothing_passes_the_start_of_a_document(backend):
    """Exactly: other numbers before a start change nothing after it, and no gradient comes from there."""
    here, other = arguments(Case(PACKED)), arguments(Case(PACKED), seed=1)
    start = np.array([[sum(row[:3])] for row in PACKED])
    after = np.arange(here.starts.shape[1]) >= start
    by_token = ("x", "step", "write", "read")
    silent = here._replace(d_out=_where(after, here.d_out, 0))
    others = {name: _where(after, getattr(silent, name), getattr(other, name)) for name in by_token}
    changed = silent._replace(state=other.state, **others)
    got, expected = (outputs_and_gradients(BACKENDS[backend], problem) for problem in (changed, silent))
    np.testing.assert_array_equal(got["last"], expected["last"])
    np.testing.assert_array_equal(_where(after, got["out"], 0), _where(after, expected["out"], 0))
    assert not got["d_state"].any()
    for name in by_token:
        np.testing.assert_array_equal(got[f"d_{name}"], expected[f"d_{name}"], err_msg=name)
        assert not _where(after, 0, got[f"d_{name}"]).any(), name
    # Without this start they would: the tokens before it have gradients.
    ignored = changed._replace(starts=changed.starts.at[np.arange(2)[:, None], start].set(False))
    assert _where(after, 0, outputs_and_gradients(BACKENDS[backend], ignored)["d_x"]).any()


def _where(tokens: np.ndarray, x: Any, y: Any) -> jax.Array:
    """x at these tokens (b, s), y at the others."""
    return jnp.where(tokens.reshape(*tokens.shape, *(1,) * (max(np.ndim(x), np.ndim(y)) - 2)), x, y)


def test_tokens_one_by_one_continue_from_chunks():
    """As in decoding; a document starts among these tokens."""
    whole = arguments(replace(Case(PACKED), documents=((147, 3), (150,))))
    op = jax.jit(mamba2_scan)
    out, last = op(*whole[:8])
    _, state = op(*whole.of_tokens(slice(0, 140))[:7], whole.state)
    for position in range(140, 150):
        of_token, state = op(*whole.of_tokens(slice(position, position + 1))[:7], state)
        np.testing.assert_allclose(of_token[:, 0], out[:, position], atol=1e-4)
    np.testing.assert_allclose(state, last, atol=1e-4)


def test_what_does_not_fit_together_is_refused():
    given = dict(zip(Arguments._fields, arguments(Case())))
    arrays = {name: given[name] for name in Arguments._fields[:7]}
    wrong = {
        "write .* and read .* differ in shape": {"read": given["read"][..., :8]},
        "3 heads are not a multiple of 2 groups": {"x": given["x"][:, :, :3]},
        "they must be equal": {"x": given["x"].astype(jnp.bfloat16)},
        r"step \(2, 150, 2\) is not \(2, 150, 4\)": {"step": given["step"][..., :2]},
        r"skip \(2,\) is not \(4,\)": {"skip": given["skip"][:2]},
        "it must be bool": {"starts": given["starts"].astype(jnp.int32)},
        r"initial_state .* is not \(2, 4, 32, 64\)": {"initial_state": given["state"][:1]},
    }
    for message, arguments_ in wrong.items():
        with pytest.raises(ValueError, match=message):
            mamba2_scan(**{**arrays, **arguments_})
