"""The recurrence of Mamba-2 by chunks against a loop over tokens: values, gradients, documents, decoding."""

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.models.layers.mamba2 import run_chunks, run_token
from pallas_kernels.gated_delta_rule.chunks import CHUNK

ROWS, LENGTH, HEADS, GROUPS, WIDTH, STATE = 2, 150, 4, 2, 3, 5  # two whole chunks and a part of one


class Arguments(NamedTuple):
    x: Any
    step: Any
    log_decay: Any
    write: Any
    read: Any
    starts: Any
    state: Any


def arguments(seed: int, scale: float, starts: np.ndarray) -> Arguments:
    """Draw arguments; `scale`: size of the steps, so of the decays."""
    rng = np.random.default_rng(seed)
    step = rng.exponential(scale, (ROWS, LENGTH, HEADS))
    drawn = Arguments(
        x=rng.normal(size=(ROWS, LENGTH, HEADS, WIDTH)),
        step=step,
        log_decay=-step * np.arange(1, HEADS + 1),
        write=rng.normal(size=(ROWS, LENGTH, GROUPS, STATE)),
        read=rng.normal(size=(ROWS, LENGTH, GROUPS, STATE)),
        starts=starts,
        state=rng.normal(size=(ROWS, HEADS, WIDTH, STATE)),
    )
    return Arguments(*(jnp.asarray(one, None if one is starts else jnp.float32) for one in drawn))


def loop(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the recurrence as the docstring of `run_chunks` defines it, token by token."""

    def token(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, step, log_decay, write, read, start = inputs
        write, read = (jnp.repeat(one, HEADS // GROUPS, axis=1) for one in (write, read))
        state = state * jnp.where(start[:, None], 0, jnp.exp(log_decay))[..., None, None]
        state += (step[..., None] * x)[..., None] * write[:, :, None]
        return state, jnp.einsum("bhpn,bhn->bhp", state, read, precision="highest")

    *of_tokens, state = arguments
    state, out = jax.lax.scan(token, state, tuple(jnp.moveaxis(one, 1, 0) for one in of_tokens))
    return jnp.moveaxis(out, 0, 1), state


def with_gradients(function):
    """Return a compiled function to the results, and to the gradients of a weighted sum of them."""

    @jax.jit
    def both(given: Arguments):
        def of_floats(*floats):
            return function(*floats[:-1], given.starts, floats[-1])

        results, pull = jax.vjp(of_floats, *given[:-2], given.state)
        return results, pull(jax.tree.map(lambda one: jnp.cos(jnp.arange(one.size)).reshape(one.shape), results))

    return both


CHUNKED, LOOP = with_gradients(run_chunks), with_gradients(loop)
TOKEN = jax.jit(run_token)
CASES = {
    "seed": st.integers(0, 99),
    "scale": st.sampled_from([1e-3, 0.1, 3.0]),
    "ends": st.sets(st.integers(0, LENGTH - 1), max_size=12),
}


def starts_at(ends: set[int]) -> np.ndarray:
    """Return starts of documents at the given positions of the first row; the second row is one document."""
    starts = np.zeros((ROWS, LENGTH), bool)
    starts[0, sorted(ends)] = True
    return starts


def assert_close(found, expected, scale: float) -> None:
    # A decay is the exponential of a difference of sums over a chunk, which have rounding errors of their own size.
    tolerance = 2e-5 + CHUNK * HEADS * scale * 2**-24
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


@given(**CASES)
@settings(max_examples=15, deadline=None)
def test_chunks_equal_a_loop_over_tokens(seed, scale, ends):
    given_ = arguments(seed, scale, starts_at(ends))
    assert_close(CHUNKED(given_), LOOP(given_), scale)


@given(**CASES)
@settings(max_examples=10, deadline=None)
def test_a_document_in_a_row_equals_the_document_alone(seed, scale, ends):
    """Tokens outside it are padding: their steps are 0."""
    packed = arguments(seed, scale, starts_at(ends | {0}))
    out = CHUNKED(packed)[0][0][0]
    bounds = [*sorted(ends | {0}), LENGTH]
    for first, last in list(pairwise(bounds))[:3]:
        inside = ((np.arange(LENGTH) >= first) & (np.arange(LENGTH) < last))[None, :, None]
        alone = packed._replace(
            step=packed.step * inside,
            log_decay=packed.log_decay * inside,
            starts=jnp.zeros_like(packed.starts),
            state=jnp.zeros_like(packed.state),
        )
        expected = CHUNKED(alone)[0][0][0]
        assert_close(out, np.where(inside[0, ..., None], expected, out), scale)


def test_tokens_one_by_one_continue_from_chunks():
    given_ = arguments(0, 0.1, starts_at({20, 147}))
    whole, last = CHUNKED(given_)[0]
    _, state = jax.jit(run_chunks)(*(one[:, :140] for one in given_[:-1]), given_.state)
    for position in range(140, LENGTH):
        out, state = TOKEN(*(one[:, position : position + 1] for one in given_[:-1]), state)
        assert_close(out[:, 0], whole[:, position], 0.1)
    assert_close(state, last, 0.1)
