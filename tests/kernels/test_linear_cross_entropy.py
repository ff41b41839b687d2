"""Tiled cross-entropy against the loss with all logits in memory, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.linear_cross_entropy import linear_cross_entropy, reference, xla

COVERS = ("pallas_kernels", "tests/kernels", "tests/conftest.py")

OPTIONS = dict(soft_cap=3.0, z_loss=1e-2, label_smoothing=0.1)


def inputs(tokens, vocabulary, width=16, seed=0, dropped=0.3):
    """hidden, head, targets, weight in numpy; dropped tokens hold NaN and targets out of range."""
    rng = np.random.default_rng(seed)
    head = np.zeros((-(-vocabulary // 256) * 256, width), np.float32)
    head[:vocabulary] = rng.normal(size=(vocabulary, width))
    hidden = rng.normal(size=(tokens, width)).astype(np.float32)
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    weight = rng.normal(size=tokens).astype(np.float32)
    weight[rng.random(tokens) < dropped] = 0
    hidden[weight == 0], targets[weight == 0] = np.nan, -100
    return hidden, head, targets, weight


def losses_and_gradients(op, hidden, head, targets, weight, cotangent):
    """Return the losses, and the gradients of hidden, head and weight for a cotangent of the losses."""
    losses, pull = jax.vjp(lambda hidden, head, weight: op(hidden, head, targets, weight), hidden, head, weight)
    return losses, *pull(cotangent)


def expected(hidden, head, targets, weight, cotangent, **options):
    with jax.enable_x64(True):
        floats = [np.asarray(x, np.float64) for x in (hidden, head, weight, cotangent)]
        op = partial(reference.linear_cross_entropy, **options)
        found = losses_and_gradients(op, floats[0], floats[1], targets, floats[2], floats[3])
        return [np.array(x) for x in found]


# A loss is a difference of logits, in nats; a gradient is a difference of a probability and 1, times values of about
# 1. So values near 0 have few correct digits in float32.
LEAST = 0.1


def assert_close(found, wanted, relative):
    """Check each array's largest error relative to its largest value."""
    for ours, true in zip(found, wanted, strict=True):
        ours = np.asarray(ours, np.float64)
        assert np.isfinite(ours).all()
        assert np.abs(ours - true).max() <= relative * max(np.abs(true).max(), LEAST)


def check(arrays, relative=1e-5, head_gradient=True, summed=False, tile=None, **options):
    weight = arrays[3]
    cotangent = np.random.default_rng(1).normal(size=() if summed else len(weight)).astype(np.float32)
    op = partial(linear_cross_entropy, head_gradient=head_gradient, summed=summed, tile=tile, **options)
    losses, d_hidden, d_head, d_weight = jax.jit(partial(losses_and_gradients, op))(*arrays, cotangent)
    wanted = expected(*arrays, np.broadcast_to(cotangent, len(weight)), **options)
    dropped = np.asarray(weight) == 0
    if summed:
        # The error of a sum is relative to its terms, of both signs.
        scale = max(np.abs(wanted[0]).sum(), 1)
        losses, wanted[0] = losses / scale, wanted[0].sum() / scale
    else:
        assert not np.asarray(losses)[dropped].any()
    assert not np.asarray(d_hidden)[dropped].any()
    assert not np.asarray(d_weight)[dropped].any()
    wanted[3][dropped] = 0  # the op has not computed the loss of a token without weight
    if head_gradient:
        assert_close((losses, d_hidden, d_head, d_weight), wanted, relative)
    else:
        assert not np.asarray(d_head).any()
        assert_close((losses, d_hidden, d_weight), (wanted[0], wanted[1], wanted[3]), relative)


@given(
    tokens=st.sampled_from([1, 37, 89]),
    vocabulary=st.sampled_from([2, 256, 300]),
    tile=st.sampled_from([None, 1, 16]),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    head_gradient=st.booleans(),
    summed=st.booleans(),
    options=st.fixed_dictionaries(
        dict(
            soft_cap=st.sampled_from([None, 3.0]),
            z_loss=st.sampled_from([0.0, 1e-2]),
            label_smoothing=st.sampled_from([0.0, 0.1]),
        )
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=8, deadline=None)
def test_loss_and_gradients_equal_the_reference(
    tokens, vocabulary, tile, dropped, head_gradient, summed, options, seed
):
    arrays = inputs(tokens, vocabulary, seed=seed, dropped=dropped)
    check(arrays, head_gradient=head_gradient, summed=summed, tile=tile, vocabulary=vocabulary, **options)


HEADS = pytest.mark.parametrize(
    ("head_gradient", "summed"), [(True, False), (True, True), (False, False)], ids=["trained", "summed", "frozen"]
)


@HEADS
@pytest.mark.parametrize("tokens", [1, 37, 513, 8519])
def test_any_number_of_tokens(tokens, head_gradient, summed):
    check(inputs(tokens, 300), head_gradient=head_gradient, summed=summed, vocabulary=300, **OPTIONS)


@HEADS
def test_bfloat16(head_gradient, summed):
    hidden, head, targets, weight = inputs(89, 300, width=64)
    arrays = (jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16), targets, weight)
    check(arrays, relative=1e-2, head_gradient=head_gradient, summed=summed, tile=16, vocabulary=300, **OPTIONS)


def test_a_loss_scale_is_in_the_gradients_of_float16_before_they_are_rounded():
    """Probabilities of 1e-8 are 0 in float16, but not times the loss scale."""
    hidden, head, targets, weight = inputs(8, 256, dropped=0.0)
    hidden, head = (jnp.asarray(np.abs(x), jnp.float16) for x in (hidden, head))
    head = head.at[128:].multiply(-1)  # makes half of the vocabulary unlikely

    def gradients(summed):
        def total(hidden, head):
            return 2.0**14 * jnp.sum(linear_cross_entropy(hidden, head, targets, weight, vocabulary=256, summed=summed))

        return jax.grad(total, (0, 1))(hidden, head)

    for found, wanted in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_sum_without_a_gradient_computes_none(monkeypatch):
    monkeypatch.delattr(xla, "_logits_gradient")
    arrays = inputs(37, 300)
    total = linear_cross_entropy(*arrays, vocabulary=300, summed=True)
    np.testing.assert_allclose(total, jnp.sum(linear_cross_entropy(*arrays, vocabulary=300)), rtol=1e-5)


def test_a_logit_far_above_the_others_does_not_overflow():
    hidden, head, targets, weight = inputs(37, 300)
    check((hidden * 1e3, head, targets, weight), vocabulary=300)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_one_pass_over_the_logits_gives_the_same(soft_cap, monkeypatch):
    """The code path that a GPU takes."""
    monkeypatch.setattr(xla, "_top_and_sum", xla._top_and_sum_in_one_pass)
    hidden, head, targets, weight = inputs(37, 300)
    check((hidden * 10, head, targets, weight), vocabulary=300, soft_cap=soft_cap)


def test_without_weights_every_token_counts():
    hidden, head, targets, _ = inputs(37, 300, dropped=0.0)
    ones = np.ones(37, np.float32)
    found = linear_cross_entropy(hidden, head, targets, vocabulary=300, **OPTIONS)
    np.testing.assert_array_equal(found, linear_cross_entropy(hidden, head, targets, ones, vocabulary=300, **OPTIONS))


def test_a_target_outside_the_vocabulary_is_not_silent():
    hidden, head, targets, _ = inputs(37, 300, dropped=0.0)
    targets[[3, 5]] = -100, 300
    found = linear_cross_entropy(hidden, head, targets, vocabulary=300)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [3, 5])


def test_no_tokens():
    assert linear_cross_entropy(*inputs(0, 300), vocabulary=300).shape == (0,)
    assert linear_cross_entropy(*inputs(0, 300), vocabulary=300, summed=True) == 0


@pytest.mark.every_jax
@pytest.mark.parametrize("head_gradient", [True, False])
def test_smoothing_and_ignored_targets_equal_those_of_torch(head_gradient):
    torch = pytest.importorskip("torch")
    hidden, head, targets, weight = inputs(89, 300)
    weight = (weight != 0).astype(np.float32)
    finite = np.nan_to_num(hidden)

    def ours(hidden, head):
        op = partial(linear_cross_entropy, vocabulary=300, label_smoothing=0.1, head_gradient=head_gradient)
        return jnp.sum(op(hidden, head, targets, weight)) / jnp.sum(weight)

    value, gradients = jax.value_and_grad(ours, (0, 1))(hidden, head)
    theirs = torch.tensor(finite, dtype=torch.float64, requires_grad=True)
    their_head = torch.tensor(head, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        theirs @ their_head[:300].T, torch.tensor(targets).long(), ignore_index=-100, label_smoothing=0.1
    )
    loss.backward()
    found, wanted = [value, gradients[0]], [loss.detach().numpy(), theirs.grad.numpy()]
    if head_gradient:
        found, wanted = found + [gradients[1]], wanted + [their_head.grad.numpy()]
    assert_close(found, wanted, 1e-5)


@HEADS
@pytest.mark.parametrize(("tokens", "kept", "tiles"), [(100, 100, 7), (100, 33, 3), (100, 16, 1), (100, 0, 0)])
def test_dropped_tokens_cost_no_logits(tokens, kept, tiles, head_gradient, summed, monkeypatch):
    """Counts the head products that run, tile by tile."""
    ran = []
    logits = xla._logits

    def counted(hidden, head):
        jax.debug.callback(lambda: ran.append(len(hidden)))
        return logits(hidden, head)

    monkeypatch.setattr(xla, "_logits", counted)
    hidden, head, targets, _ = inputs(tokens, 300, dropped=0.0)
    weight = np.zeros(tokens, np.float32)
    weight[np.random.default_rng(0).permutation(tokens)[:kept]] = 1

    def total(hidden, head):
        op = partial(linear_cross_entropy, vocabulary=300, tile=16, head_gradient=head_gradient, summed=summed)
        return jnp.sum(op(hidden, head, targets, weight))

    jax.block_until_ready(jax.jit(jax.grad(total, (0, 1)))(hidden, head))
    jax.effects_barrier()
    # The backward pass of a trained head recomputes the logits, unless only the sum of the losses has a gradient.
    assert ran == [16] * tiles * (2 if head_gradient and not summed else 1)


@HEADS
def test_temporaries_do_not_grow_with_tokens_times_vocabulary(head_gradient, summed):
    vocabulary, width = 32_768, 32

    def temporaries(tokens):
        def total(hidden, head, targets, weight):
            op = partial(
                linear_cross_entropy, vocabulary=vocabulary, head_gradient=head_gradient, summed=summed, tile=128
            )
            return jnp.sum(op(hidden, head, targets, weight, **OPTIONS))

        shapes = [
            jax.ShapeDtypeStruct((tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ]
        which = (0, 1) if head_gradient else 0
        return jax.jit(jax.grad(total, which)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(1024), temporaries(8192)
    assert many - few < 8192 * width * 4 * 4  # copies of the hidden states
    assert many < 128 * vocabulary * 4 * 4 + vocabulary * width * 4 * 2 + 8192 * width * 4 * 4


@pytest.mark.parametrize("head_gradient", [True, False])
@pytest.mark.parametrize(("platform", "fewest", "most_bytes"), [("cpu", 512, 2**26), ("gpu", 1024, 2**30)])
def test_a_tile_has_tokens_enough_and_is_bounded(platform, fewest, most_bytes, head_gradient):
    for vocabulary, width in [(256, 64), (32_000, 4096), (151_936, 1024), (151_936, 4096), (262_144, 5376)]:
        head = jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16)
        tokens = xla.tokens_at_once(head, head_gradient, platform)
        assert tokens >= fewest
        allowed = max(most_bytes, fewest * vocabulary * 4, head.size * 4 if head_gradient else 0)
        assert tokens * vocabulary * 4 <= allowed


SPECS = (jax.P("data", None), jax.P("tensor", None), jax.P("data"), jax.P("data"))


def placed(mesh, arrays, specs=SPECS):
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


@HEADS
@pytest.mark.parametrize(
    ("kept_by_first", "axes"), [(0, "tensor"), (5, "tensor"), (12, "tensor"), (5, ("expert", "tensor"))]
)
def test_a_vocabulary_over_devices_gives_the_same(kept_by_first, axes, head_gradient, summed):
    """The two halves of the data drop different tokens, and so run different numbers of tiles."""
    hidden, head, targets, weight = inputs(48, 500, dropped=0.0)
    weight[kept_by_first:24] = 0
    hidden[weight == 0], targets[weight == 0] = np.nan, -100
    mesh = jax.make_mesh((2, 4) if axes == "tensor" else (2, 2, 2), ("data", *jax.tree.leaves(axes)))
    specs = (SPECS[0], jax.P(axes, None), *SPECS[2:])
    op = partial(linear_cross_entropy, vocabulary=500, head_gradient=head_gradient, summed=summed, **OPTIONS)

    def kernel(*arrays):
        return jnp.atleast_1d(op(*arrays, vocabulary_axis=axes, tile=8))

    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))
    cotangent = np.random.default_rng(1).normal(size=2 if summed else 48).astype(np.float32)
    with jax.set_mesh(mesh):
        cotangent_placed = jax.device_put(cotangent, jax.NamedSharding(mesh, jax.P("data")))
        found = jax.jit(partial(losses_and_gradients, sharded))(
            *placed(mesh, (hidden, head, targets, weight), specs), cotangent_placed
        )
    each = np.repeat(cotangent, 48 // len(cotangent))  # a sum's gradient is the one of each of its losses
    wanted = expected(hidden, head, targets, weight, each, vocabulary=500, **OPTIONS)
    if summed:
        wanted[0] = wanted[0].reshape(2, 24).sum(1)
    wanted[3][weight == 0] = 0
    if not head_gradient:
        wanted[2] = np.zeros_like(wanted[2])
    assert_close(found, wanted, 1e-5)


def test_tokens_that_differ_over_the_vocabularys_axis_are_refused():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    kernel = partial(linear_cross_entropy, vocabulary=500, vocabulary_axis="data")
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=SPECS, out_specs=jax.P("data"))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="same on all devices .* 'data'"):
        jax.jit(sharded)(*placed(mesh, inputs(48, 500)))
