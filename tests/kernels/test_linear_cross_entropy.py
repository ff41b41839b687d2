"""Tiled cross-entropy against the loss with all logits in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.linear_cross_entropy import linear_cross_entropy, reference


def inputs(tokens, hidden, vocabulary, seed=0):
    rng = np.random.default_rng(seed)
    padded = -(-vocabulary // 256) * 256
    head = np.zeros((padded, hidden))
    head[:vocabulary] = rng.normal(size=(vocabulary, hidden))
    return (
        jnp.asarray(rng.normal(size=(tokens, hidden)), jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32),
        jnp.asarray(rng.normal(size=tokens), jnp.float32),
    )


@given(
    tokens=st.sampled_from([1, 50, 89]),
    vocabulary=st.sampled_from([2, 256, 300]),
    tile=st.sampled_from([None, 1, 16]),
    seed=st.integers(0, 9),
)
@settings(max_examples=8, deadline=None)
def test_loss_and_gradients_equal_the_reference(tokens, vocabulary, tile, seed):
    hidden, head, targets, weight = inputs(tokens, 16, vocabulary, seed)

    def ours(hidden, head):
        return jnp.sum(weight * linear_cross_entropy(hidden, head, targets, vocabulary=vocabulary, tile=tile))

    def expected(hidden, head):
        return jnp.sum(weight * reference.linear_cross_entropy(hidden, head, targets, vocabulary))

    got = jax.value_and_grad(ours, (0, 1))(hidden, head)
    want = jax.value_and_grad(expected, (0, 1))(hidden, head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_a_frozen_head_gives_the_same_hidden_gradient_and_none_of_its_own():
    hidden, head, targets, weight = inputs(50, 16, 200)

    def total(hidden, head, head_gradient):
        losses = linear_cross_entropy(hidden, head, targets, vocabulary=200, head_gradient=head_gradient, tile=16)
        return jnp.sum(weight * losses)

    trained = jax.grad(total, (0, 1))(hidden, head, True)
    frozen = jax.grad(total, (0, 1))(hidden, head, False)
    np.testing.assert_allclose(frozen[0], trained[0], rtol=1e-4, atol=1e-5)
    assert not frozen[1].any()


@pytest.mark.parametrize("head_gradient", [True, False])
def test_temporaries_do_not_grow_with_tokens_times_vocabulary(head_gradient):
    vocabulary, width = 32_768, 32

    def temporaries(tokens):
        def total(hidden, head, targets):
            losses = linear_cross_entropy(
                hidden, head, targets, vocabulary=vocabulary, head_gradient=head_gradient, tile=128
            )
            return losses.sum()

        shapes = [
            jax.ShapeDtypeStruct((tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        ]
        which = (0, 1) if head_gradient else 0
        return jax.jit(jax.grad(total, which)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) - temporaries(512) < 4096 * width * 4 * 8  # a few copies of the hidden states
    assert temporaries(4096) < 4096 * vocabulary * 4 / 4


def test_a_vocabulary_over_devices_gives_the_same():
    hidden, head, targets, weight = inputs(24, 16, 500)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))

    def kernel(hidden, head, targets):
        head = jax.lax.pcast(head, "data", to="varying")
        return linear_cross_entropy(hidden, head, targets, vocabulary=500, vocabulary_axis="tensor", tile=8)

    specs = (jax.P("data", None), jax.P("tensor", None), jax.P("data"))
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))

    def total(op):
        return lambda hidden, head, targets, weight: jnp.sum(weight * op(hidden, head, targets))

    expected = jax.value_and_grad(
        total(lambda hidden, head, targets: reference.linear_cross_entropy(hidden, head, targets, 500)), (0, 1)
    )(hidden, head, targets, weight)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, spec))
            for x, spec in zip((hidden, head, targets, weight), (*specs, jax.P("data")))
        ]
        got = jax.jit(jax.value_and_grad(total(sharded), (0, 1)))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
