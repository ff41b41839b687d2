"""Dropout is a function of seed, step, row, layer and site."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.layers.attention_dropout import Bits, attend_dropping
from jaxtune.models.structure.mixers import Heads
from jaxtune.parallel.random import Noise, dropout, make_step_noise, neftune
from pallas_kernels.flash_attention import MaskSpec, flash_attention


def test_dropout_depends_on_the_row_not_on_its_place(one_device):
    x = jax.device_put(jnp.ones((4, 8, 16)), jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None)))
    rows = jnp.array([5, 9, 2, 7])
    key = jax.random.key(0)
    dropped = dropout(x, 0.5, Noise(key, rows))
    again = dropout(x, 0.5, Noise(key, rows[::-1]))
    np.testing.assert_array_equal(dropped, again[::-1])
    assert 0.3 < float((dropped == 0).mean()) < 0.7
    assert set(np.unique(dropped)) == {0.0, 2.0}


def test_the_share_that_is_kept_is_not_rounded_to_bfloat16(one_device):
    """1 - 0.1 would be 0.8984, and activations 0.17% larger in training than in evaluation."""
    layout = jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None))
    x = jax.device_put(np.random.default_rng(0).normal(size=(2, 8, 64)).astype(jnp.bfloat16), layout)
    dropped = dropout(x, 0.1, Noise(jax.random.key(0), jnp.arange(2)))
    expected = (x.astype(jnp.float32) / 0.9).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dropped, jnp.where(dropped == 0, 0, expected))
    assert 0.05 < float((dropped == 0).mean()) < 0.2


def test_noise_on_embeddings_is_that_of_neftune(one_device):
    """Uniform up to alpha / sqrt(positions * width), and a function of the row's number, also in dealt rows."""
    x = jax.device_put(jnp.zeros((2, 8, 16)), jax.NamedSharding(one_device, jax.P(("data", "fsdp"), "sequence", None)))
    key, most = jax.random.key(0), 5 / np.sqrt(8 * 16)
    noisy = neftune(x, 5.0, Noise(key, jnp.array([5, 9])))
    assert 0.9 * most < np.abs(noisy).max() <= most and abs(float(noisy.mean())) < 0.1 * most
    assert abs(float(noisy.std()) - most / np.sqrt(3)) < 0.1 * most
    dealt = jnp.array([[7, 6, 5, 4, 3, 2, 1, 0]] * 2)
    np.testing.assert_array_equal(neftune(x, 5.0, Noise(key, jnp.array([9, 5]), dealt)), noisy[::-1, ::-1])


def test_rates_rise_over_the_steps_of_warmup_and_bits_are_those_of_the_step():
    sources = [make_step_noise(3, jnp.int32(step), 4) for step in (0, 2, 4, 9)]
    rates = [float(Noise(source.key, jnp.arange(2), share=source.share).rate(0.4)) for source in sources]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.4])
    assert len({tuple(jax.random.key_data(source.key).tolist()) for source in sources}) == 4
    assert Noise(make_step_noise(3, jnp.int32(0)).key, jnp.arange(2)).rate(0.4) == 0.4


HEADS, TOKENS, WIDTH = 4, 12, 16
START = jnp.tile(jnp.repeat(jnp.array([0, 7]), jnp.array([7, 5])), (2, 1))  # documents of 7 and 5 tokens
MASK = MaskSpec(key_start=START)


def draw(kv_heads: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw queries, keys and values of two equal rows."""
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (
        jnp.tile(jax.random.normal(key, (1, TOKENS, heads, WIDTH)), (2, 1, 1, 1))
        for key, heads in zip(keys, (HEADS, kv_heads, kv_heads))
    )
    return q, k, v


def attend_with(q, k, v, rate, rows=(5, 9), mask=MASK, index=None, sinks=None, **mixer):
    bits = Bits(jax.random.key(0), jnp.array(rows), jnp.arange(HEADS), jnp.float32(rate))
    index = jnp.tile(jnp.arange(TOKENS), (2, 1)) if index is None else index
    return attend_dropping(q, k, v, mask, Heads(HEADS, k.shape[2], WIDTH, None, **mixer), sinks, bits, index)


@pytest.mark.parametrize("mixer", [{}, {"soft_cap": 0.5, "scale": 0.3}, {"sinks": jnp.linspace(-1.0, 1.0, HEADS)}])
def test_attention_that_drops_nothing_is_attention(mixer):
    sinks, mixer = mixer.get("sinks"), {name: value for name, value in mixer.items() if name != "sinks"}
    expected = flash_attention(*draw(), MASK, mixer.get("scale"), soft_cap=mixer.get("soft_cap"), sinks=sinks)
    np.testing.assert_allclose(attend_with(*draw(), 0.0, sinks=sinks, **mixer), expected, atol=1e-6)


def test_probabilities_are_dropped_by_row_head_query_and_key():
    q, k, _ = draw(HEADS)
    v = jnp.broadcast_to(jnp.eye(TOKENS, WIDTH)[None, :, None], (2, TOKENS, HEADS, WIDTH))  # shows each probability
    whole, dropped = (np.asarray(attend_with(q, k, v, rate)) for rate in (0.0, 0.5))
    is_kept = dropped > 0
    np.testing.assert_allclose(dropped[is_kept], 2 * whole[is_kept], rtol=1e-6)
    assert 0.4 < is_kept[whole > 0].mean() < 0.6 and not is_kept[whole == 0].any()
    assert (is_kept[0] != is_kept[1]).any() and (is_kept[:, :, 0] != is_kept[:, :, 1]).any()
    np.testing.assert_array_equal(attend_with(q, k, v, 0.5, rows=(9, 5)), dropped[::-1])
    # Queries that are dealt to devices in another order get the same bits.
    order = np.array([3, 2, 1, 0, 11, 10, 9, 8, 4, 5, 6, 7])
    mask = MaskSpec(key_start=START[:, order], query_offset=jnp.tile(order - np.arange(TOKENS), (2, 1)))
    dealt = attend_with(q[:, order], k, v, 0.5, mask=mask, index=jnp.tile(order, (2, 1)))
    np.testing.assert_allclose(dealt, dropped[:, order], rtol=1e-6)


def test_the_backward_pass_of_dropped_attention_draws_the_same_bits():
    q, k, _ = draw(HEADS)
    v = jnp.broadcast_to(jnp.eye(TOKENS, WIDTH)[None, :, None], (2, TOKENS, HEADS, WIDTH))
    output, transposed = jax.vjp(partial(attend_with, q, k, rate=0.5), v)
    (gradient,) = transposed(jnp.ones_like(output))
    np.testing.assert_allclose(gradient[..., 0], output[..., :TOKENS].sum(1).swapaxes(1, 2), rtol=1e-5)
