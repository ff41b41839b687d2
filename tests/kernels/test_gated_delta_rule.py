"""The gated delta rule by chunks against the recurrence in float64: forward, every gradient, packed documents."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernels.delta_cases import (
    Arguments,
    Case,
    arguments,
    assert_close,
    in_float64,
    of_everything,
    outputs_and_gradients,
)

from pallas_kernels.chunks import CHUNK
from pallas_kernels.gated_delta_rule import gated_delta_rule, triton, xla

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

BACKENDS = {"xla": xla.gated_delta_rule, "triton": partial(triton.gated_delta_rule, interpret=True)}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# Boundaries within chunks of 64, at and around their edges, several in one chunk, documents of length 1.
PACKED = ((40, 24, 1, 62, 2, 21), (1, 1, 1, 126, 20, 1))
GRID = {
    "one document": Case(),
    "packed": Case(PACKED),
    "packed, three value heads a key head, unlike sizes": Case(PACKED, heads=(1, 3), sizes=(32, 64)),
    "packed, as many key heads, bfloat16": Case(PACKED, heads=(2, 2), sizes=(64, 32), dtype="bfloat16"),
    "packed, forgotten at once": Case(PACKED, decay=10.0),
    # Powers of the inverted matrix reach 1e17 here.
    "the same key again, nothing forgotten": Case(decay=0.0, beta=1.0, alike=True),
}


@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
@every_backend
def test_equals_the_recurrence_in_float64(backend, case):
    problem = arguments(case)
    assert_close(outputs_and_gradients(BACKENDS[backend], problem), in_float64(problem), case.tolerance)


@every_backend
@given(documents=st.tuples(*[st.lists(st.just(1) | st.integers(1, 140), max_size=12)] * 2), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_documents_equal_float64(backend, documents, seed):
    """The total length is always the same, so that this compiles once."""
    length = 150
    fitting = tuple(tuple(np.diff(np.minimum(np.cumsum([0, *row, length]), length))) for row in documents)
    problem = arguments(Case(tuple(tuple(n for n in row if n) for row in fitting)), seed)
    assert_close(outputs_and_gradients(BACKENDS[backend], problem), in_float64(problem))


@pytest.mark.every_jax
@every_backend
def test_packed_documents_equal_the_documents_alone(backend):
    """All documents have one length, because each length is compiled; the float64 recurrence covers other lengths."""
    lengths = (75, 75)
    packed = arguments(Case((lengths, lengths)))
    packed = packed._replace(d_state=jnp.zeros_like(packed.d_state), starts=packed.starts.at[:, 0].set(True))
    together = outputs_and_gradients(BACKENDS[backend], packed)
    assert not together["d_state"].any()
    first = 0
    for length in lengths:
        tokens = slice(first, first + length)
        alone = outputs_and_gradients(BACKENDS[backend], packed.of_tokens(tokens))
        if tokens.stop == sum(lengths):
            assert_close({"last": together["last"]}, {"last": alone["last"]})
        by_token = alone.keys() - {"last", "d_state"}
        assert_close({name: together[name][:, tokens] for name in by_token}, {name: alone[name] for name in by_token})
        first += length


@every_backend
def test_nothing_passes_the_start_of_a_document(backend):
    """Exactly: other numbers before a start change nothing after it, and no gradient comes from there."""
    case = Case(PACKED)
    here, other = arguments(case), arguments(replace(case, decay=1.0), seed=1)
    run = partial(outputs_and_gradients, BACKENDS[backend])
    names = ("q", "k", "v", "log_decay", "beta")
    for place in (1, 3, 5):
        start = np.array([[sum(row[:place])] for row in PACKED])
        after = np.arange(here.starts.shape[1]) >= start
        silent = here._replace(d_out=_where(after, here.d_out, 0))
        others = {name: _where(after, getattr(silent, name), getattr(other, name)) for name in names}
        changed = silent._replace(state=other.state, **others)
        got, expected = run(changed), run(silent)
        np.testing.assert_array_equal(got["last"], expected["last"])
        np.testing.assert_array_equal(_where(after, got["out"], 0), _where(after, expected["out"], 0))
        assert not got["d_state"].any()
        for name in names:
            np.testing.assert_array_equal(got[f"d_{name}"], expected[f"d_{name}"], err_msg=name)
            assert not _where(after, 0, got[f"d_{name}"]).any(), name
        # Without this start they would: the tokens before it have gradients.
        ignored = changed._replace(starts=changed.starts.at[np.arange(2)[:, None], start].set(False))
        assert _where(after, 0, run(ignored)["d_v"]).any()


def _where(tokens: np.ndarray, x: Any, y: Any) -> jax.Array:
    """x at these tokens (b, s), y at the others."""
    return jnp.where(tokens.reshape(*tokens.shape, *(1,) * (max(np.ndim(x), np.ndim(y)) - 2)), x, y)


@every_backend
def test_the_last_state_continues(backend):
    whole = arguments(Case(PACKED))
    run = partial(outputs_and_gradients, BACKENDS[backend])
    expected = run(whole)
    half = whole.v.shape[1] // 2
    before, after = whole.of_tokens(slice(0, half)), whole.of_tokens(slice(half, None))
    begun = run(before._replace(state=whole.state))
    rest = run(after._replace(state=begun["last"], d_state=whole.d_state))
    begun = run(before._replace(state=whole.state, d_state=rest["d_state"]))
    by_token = expected.keys() - {"last", "d_state"}
    joined = {name: jnp.concatenate([begun[name], rest[name]], axis=1) for name in by_token}
    assert_close({**joined, "last": rest["last"], "d_state": begun["d_state"]}, expected)


@every_backend
def test_no_state_is_kept_for_a_token(backend):
    """Neither the forward nor the backward pass has an array with a state for each token."""
    problem = arguments(Case())
    program = jax.make_jaxpr(partial(of_everything, BACKENDS[backend]))(problem)
    largest = max(int(np.prod(shape)) for shape in _shapes(program.jaxpr))
    states = problem.state.size * -(-problem.v.shape[1] // CHUNK)
    assert states <= largest < problem.v.shape[1] * problem.state.size / 4


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _shapes(inner)


def test_inside_a_shard_map():
    """Batch and heads are sharded: results and gradients equal one device's."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    problem = arguments(Case(PACKED, heads=(2, 4)))
    tokens, heads = P("data", None, "tensor"), P("data", "tensor")
    specs = (tokens,) * 5 + (P("data"),)

    @partial(jax.jit, static_argnums=0)
    def gradients(op, *arrays):
        def loss(*arrays):
            out, last = op(*arrays)
            return jnp.sum(out * problem.d_out) + jnp.sum(last * problem.d_state)

        return jax.grad(loss, argnums=range(5))(*arrays)

    arrays = problem[: len(specs)]
    expected = gradients(gated_delta_rule, *arrays)
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(gated_delta_rule, in_specs=specs, out_specs=(tokens, heads))
        given = (jax.device_put(x, spec) for x, spec in zip(arrays, specs))
        got = gradients(lambda *arrays: _replicated(*sharded(*arrays)), *given)
    for ours, true in zip(got, expected):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-6 * np.abs(true).max())


def _replicated(*arrays):
    return tuple(jax.reshard(x, P()) for x in arrays)


def test_what_does_not_fit_together_is_refused():
    given = dict(zip(Arguments._fields, arguments(Case(heads=(2, 4)))))
    arrays = {name: given[name] for name in ("q", "k", "v", "log_decay", "beta", "starts")}
    wrong = {
        r"q .* and k .* differ in shape": {"k": given["k"][..., :8]},
        "3 value heads are not a multiple of 2 key heads": {"v": given["v"][:, :, :3]},
        "they must be equal": {"v": given["v"].astype(jnp.bfloat16)},
        r"beta \(2, 150, 2\) is not \(2, 150, 4\)": {"beta": given["beta"][..., :2]},
        "it must be bool": {"starts": given["starts"].astype(jnp.int32)},
        r"initial_state .* is not \(2, 4, 32, 32\)": {"initial_state": given["state"][:1]},
    }
    for message, arguments_ in wrong.items():
        with pytest.raises(ValueError, match=message):
            gated_delta_rule(**{**arrays, **arguments_})
