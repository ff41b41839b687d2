"""Packed attention against a float64 reference, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention import Mask, flash_attention, xla
from pallas_kernels.flash_attention.reference import dense_attention, visible


def rows(rng, batch, sequence, heads, kv_heads, dim, dtype=np.float32):
    q = rng.normal(size=(batch, sequence, heads, dim))
    k = rng.normal(size=(batch, sequence, kv_heads, dim))
    v = rng.normal(size=(batch, sequence, kv_heads, dim))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def starts(lengths: list[int], sequence: int) -> np.ndarray:
    """key_start of a row with documents of these lengths, then padding."""
    start = np.concatenate([np.full(n, s) for n, s in zip(lengths, np.cumsum([0, *lengths]))] or [[]])[:sequence]
    return np.concatenate([start, np.arange(len(start), sequence)]).astype(np.int32)


def reference(q, k, v, key_start, mask):
    index = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    seen = visible(index, jnp.arange(k.shape[1]), key_start, mask)
    return dense_attention(q, k, v, seen, q.shape[-1] ** -0.5)


@given(
    sequence=st.sampled_from([1, 37, 300, 600]),  # few shapes, as each is compiled
    lengths=st.lists(st.integers(1, 300), max_size=6),
    window=st.sampled_from([None, 1, 50]),
    heads=st.sampled_from([(1, 1), (6, 2)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_output_and_gradients_equal_the_reference(sequence, lengths, window, heads, seed):
    rng = np.random.default_rng(seed)
    q, k, v = rows(rng, 2, sequence, *heads, 16)
    key_start = jnp.asarray(np.stack([starts(lengths, sequence), starts([], sequence) * 0]))
    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    mask = Mask(window=window)

    def total(op):
        return lambda q, k, v: jnp.sum(op(q, k, v, key_start, mask).astype(weight.dtype) * weight)

    with jax.default_matmul_precision("highest"):
        out, grads = jax.jit(jax.value_and_grad(total(flash_attention), (0, 1, 2)))(q, k, v)
        expected, expected_grads = jax.jit(jax.value_and_grad(total(reference), (0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    largest = max(float(jnp.abs(expected_grad).max()) for expected_grad in expected_grads)
    for grad, expected_grad in zip(grads, expected_grads):
        assert float(jnp.abs(grad - expected_grad).max()) <= 1e-5 * largest


@pytest.mark.parametrize("batched", [False, True])
def test_both_shapes_of_the_loop_agree(batched, monkeypatch):
    """A CPU loops over heads, other platforms batch them: the same numbers."""
    q, k, v = rows(np.random.default_rng(0), 2, 300, 4, 2, 8)
    key_start = jnp.asarray(np.stack([starts([100, 150], 300)] * 2))
    expected = reference(q, k, v, key_start, Mask(window=64))
    if batched:
        choose = jax.lax.platform_dependent
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *a, cpu, default: choose(*a, default=default))
    out = flash_attention(q, k, v, key_start, Mask(window=64))
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_bfloat16_is_within_its_rounding():
    q, k, v = rows(np.random.default_rng(0), 1, 256, 2, 1, 32, jnp.bfloat16)
    key_start = jnp.zeros((1, 256), jnp.int32)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    np.testing.assert_allclose(
        flash_attention(q, k, v, key_start).astype(jnp.float32), reference(*wide, key_start, Mask()), atol=2e-2
    )


def test_no_block_is_sequence_by_sequence():
    shape = jax.ShapeDtypeStruct((2, 2048, 2, 16), jnp.float32)
    start = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    grad = jax.grad(lambda q, k, v, s: flash_attention(q, k, v, s).sum(), (0, 1, 2))
    text = jax.jit(grad).lower(shape, shape, shape, start).compile().as_text()
    assert "2048,2048" not in text


def test_a_window_skips_the_blocks_it_hides():
    blocks = list(xla._blocks(4096, Mask(window=300)))
    assert blocks[0] == (slice(0, 256), slice(0, 256))
    assert all(keys.stop - keys.start <= 256 + 299 for _, keys in blocks)


def test_heads_that_do_not_group_are_refused():
    q, k, v = rows(np.random.default_rng(0), 1, 8, 3, 2, 8)
    with pytest.raises(ValueError, match="3 query heads"):
        flash_attention(q, k, v, jnp.zeros((1, 8), jnp.int32))
