"""Stochastic rounding: unbiased, with bits that look random along every axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.stochastic_rounding import random_bits, to_bfloat16

STEPS, ROWS, COLUMNS = 16, 256, 1024


@pytest.fixture(scope="module")
def uniform():
    """(steps, rows, columns): the deciding bits, scaled to 0..1, with keys like those in a training run."""
    row, column = jnp.arange(ROWS, dtype=jnp.uint32)[:, None], jnp.arange(COLUMNS, dtype=jnp.uint32)[None, :]
    keys = jax.vmap(lambda step: jax.random.bits(jax.random.fold_in(jax.random.key(0), step), (2,), jnp.uint32))
    bits = jax.vmap(lambda key: random_bits(key, row, column))(keys(jnp.arange(STEPS)))
    return np.asarray(bits >> 16) / 2.0**16


def test_bits_are_those_of_the_published_finaliser():
    """fmix32 of MurmurHash3, in Python's integers."""

    def fmix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    assert fmix32(1) == 0x514E28B7
    words, expected = (7, 2**32 - 1, 3, 123456), 0
    for word in words:
        expected = fmix32(expected ^ word)
    key, indices = jnp.asarray(words[:2], jnp.uint32), jnp.asarray(words[2:], jnp.uint32)
    assert int(random_bits(key, *indices)) == expected


def test_bits_are_uniform(uniform):
    """Each of 256 parts of the range is equally frequent: chi-square, over all steps and for single steps."""
    for sample in (uniform, *uniform):
        counts, _ = np.histogram(sample, 256, (0, 1))
        expected = sample.size / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) <= 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["successive steps", "successive rows", "neighbours in a row"])
@pytest.mark.parametrize("distance", [1, 2, 8])
def test_bits_are_uncorrelated(uniform, axis, distance):
    """Correlations are within five standard errors of 0, also of squares, which would show nonlinear dependence."""
    centred = uniform - 0.5
    size = centred.shape[axis]
    ahead, behind = (np.take(centred, range(*ends), axis) for ends in ((distance, size), (0, size - distance)))
    for power in (1, 2):
        one, other = (x**power - (x**power).mean() for x in (ahead, behind))
        correlation = (one * other).mean() / (one.std() * other.std())
        assert abs(correlation) <= 5 / np.sqrt(one.size)


def test_a_sum_of_many_roundings_is_right(uniform):
    """A weight moves by a thousandth of the distance to the next bfloat16: for each column, row and step."""
    x = jnp.float32(1.0) + jnp.float32(2.0**-7) * 0.1
    bits = jnp.asarray(uniform * 2**32, jnp.uint32)
    up = np.asarray(to_bfloat16(jnp.broadcast_to(x, bits.shape), bits), np.float64) > 1
    share = float((x - 1) * 2**7)
    for axes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        mean = up.mean(axes)
        error = np.sqrt(share * (1 - share) * mean.size / up.size)
        assert np.abs(mean - share).max() <= 6 * error


def test_every_low_half_is_carried_by_as_many_bits_as_it_is_far():
    """All 2^16 bit patterns: a value at n / 2^16 of the way to the next number is rounded up by n of them."""
    bits = jnp.arange(2**16, dtype=jnp.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        x = jax.lax.bitcast_convert_type(jnp.uint32(0x3F80 << 16 | low), jnp.float32)
        up = np.asarray(to_bfloat16(jnp.broadcast_to(x, bits.shape), bits), np.float32) > 1
        assert up.sum() == low
