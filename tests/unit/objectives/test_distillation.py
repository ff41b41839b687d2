"""The divergence from a teacher's likeliest tokens and its loss, against the definition in float64.

B batch (rows), S sequence, V vocabulary (with padding), D hidden.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from tiny import VOCABULARY

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.divergence import likeliest
from jaxtune.models.head.score import score
from jaxtune.objectives.distillation import distillation
from jaxtune.objectives.options import DistillOptions
from jaxtune.parallel.layout import by_token, gathered_entry
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

POSITIONS, TRAINED, WIDTH, PADDED, CAP = 16, 9, 8, 512, 5.0
OPTIONS = {
    "forward": DistillOptions(divergence="forward_kl", top_k=6, weight=0.7),
    "reverse, hot": DistillOptions(divergence="reverse_kl", top_k=6, weight=0.7, temperature=2.5),
    "js": DistillOptions(divergence="js", js_beta=0.3, top_k=6, weight=0.7),
    "every token": DistillOptions(divergence="reverse_kl", top_k=VOCABULARY),
    "one": DistillOptions(divergence="js", top_k=1, temperature=0.5),
}


def a_head(weight: jax.Array, cap: float | None = None) -> Any:
    """Return a stand-in for a decoder that has only a head [V, D]."""
    return SimpleNamespace(head_weight=weight, spec=SimpleNamespace(vocabulary=VOCABULARY, logit_cap=cap))


def draw(seed: int, rows: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Draw hidden states [B, S, D] and a head [V, D]."""
    random = np.random.default_rng(seed)
    shapes = (rows, POSITIONS, WIDTH), (PADDED, WIDTH)
    hidden, head = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return hidden, head


def log_softmax(hidden, head, temperature: float, cap: float | None):
    """Compute log-probabilities by definition, in the dtype of the inputs."""
    logits = hidden @ head[:VOCABULARY].T
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    logits = logits / temperature
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def define(options: DistillOptions, student, teacher, targets, weight, cap=None) -> dict[str, float]:
    """Compute the sums of the loss and its parts in float64."""
    (student_hidden, student_head), (teacher_hidden, teacher_head) = (
        [x.astype(np.float64) for x in pair] for pair in (student, teacher)
    )
    p = np.exp(log_softmax(teacher_hidden, teacher_head, options.temperature, cap))
    q = np.exp(log_softmax(student_hidden, student_head, options.temperature, cap))
    best = np.argsort(-p, axis=-1)[..., : options.top_k]

    def outcomes(all):
        of_best = np.take_along_axis(all, best, -1)
        return np.concatenate([of_best, np.maximum(1 - of_best.sum(-1, keepdims=True), 0)], -1)

    def kl(a, b):
        return np.where(a > 1e-12, a * np.log(np.maximum(a, 1e-300) / np.maximum(b, 1e-300)), 0).sum(-1)

    p, q = outcomes(p), outcomes(q)
    beta = options.js_beta
    mixture = beta * p + (1 - beta) * q
    divergence = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "js": beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
    }[options.divergence]
    plain = log_softmax(student_hidden, student_head, 1.0, cap)
    cross_entropy = -np.take_along_axis(plain, targets[..., None], -1)[..., 0]
    divergence, cross_entropy = (divergence * weight).sum(), (cross_entropy * weight).sum()
    loss = options.weight * divergence + (1 - options.weight) * cross_entropy
    return {"loss": loss, "divergence": divergence, "cross_entropy": cross_entropy}


def compute(options: DistillOptions, student, teacher, mesh, cap=None, rows=1):
    """Return (sums, gradients of hidden states and head, batch); the teacher is scored on the same mesh."""

    def place(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    batch = make_batch(tokens(rows, POSITIONS), mesh)
    weight = np.where(np.arange(POSITIONS) < TRAINED, 1 + np.arange(POSITIONS) % 2, 0).astype(np.float32)
    batch |= {"loss_weight": place(np.broadcast_to(weight, (rows, POSITIONS)), by_token())}
    specs = by_token(None), jax.P(gathered_entry("vocabulary"), None)
    (hidden, head), (of_teacher, teacher_head) = (
        [place(x, spec) for x, spec in zip(pair, specs)] for pair in (student, teacher)
    )
    objective, call = distillation(options), ForwardOptions(jnp.dtype("float32"))

    @jax.jit
    def run(parts, batch):
        with jax.default_matmul_precision("highest"):
            columns = likeliest(
                a_head(teacher_head, cap), of_teacher, call.dtype, options.top_k, VOCABULARY, options.temperature
            )
            batch = batch | dict(zip(("teacher_tokens", "teacher_log_probs"), columns))

            def loss(parts):
                hidden, head = parts
                scores = score(a_head(head, cap), batch, call, (hidden, {}), objective.score, head_gradient=True)
                sums = objective.loss(scores, batch)
                return sums.loss, sums

            return jax.value_and_grad(loss, has_aux=True)(parts)

    (_, sums), gradients = run((hidden, head), batch)
    return sums, [np.asarray(g) for g in gradients], {name: np.asarray(x) for name, x in batch.items()}


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_are_those_of_the_definition(one_device, options, cap):
    student, teacher = draw(0), draw(1)
    sums, gradients, batch = compute(options, student, teacher, one_device, cap)
    how = dict(targets=batch["targets"], weight=batch["loss_weight"], cap=cap)
    wanted = define(options, student, teacher, **how)
    assert sums.weight == TRAINED
    assert np.isclose(sums.loss, wanted["loss"], rtol=1e-5)
    for name in ("divergence", "cross_entropy"):
        total, count = sums.metrics[name]
        assert np.isclose(total, wanted[name], rtol=1e-5) and count == TRAINED
    random = np.random.default_rng(2)
    directions = [random.normal(size=x.shape) for x in student]
    ends = [
        define(options, [x + s * 1e-5 * d for x, d in zip(student, directions)], teacher, **how)["loss"]
        for s in (1, -1)
    ]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions))
    steepest = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
    assert abs(slope - (ends[0] - ends[1]) / 2e-5) <= 1e-5 * steepest
    assert not gradients[0][:, TRAINED:].any() and not gradients[1][VOCABULARY:].any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(one_device, options):
    options = dataclasses.replace(options, weight=1.0)
    sums, gradients, _ = compute(options, draw(0), draw(0), one_device)
    assert abs(sums.loss) <= 1e-5 and all(np.abs(g).max() <= 1e-5 for g in gradients)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_certain_teachers_and_students_have_finite_losses_and_gradients(one_device, options):
    """Logits differ by thousands: outcomes have the probability 0 in the student or in the teacher."""
    student, teacher = ([x * 50 for x in draw(seed)] for seed in (0, 1))
    sums, gradients, _ = compute(options, student, teacher, one_device)
    assert np.isfinite(sums.loss) and sums.loss > 1 and all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_sharded_vocabulary_changes_nothing(one_device, options):
    """Both heads are sharded, so that a teacher's likeliest tokens are on several devices."""
    student, teacher = draw(0, rows=2), draw(1, rows=2)
    one, one_gradients, _ = compute(options, student, teacher, one_device, rows=2)
    mesh = make_mesh(MeshOptions(fsdp=2, tensor=4), jax.devices())
    many, gradients, _ = compute(options, student, teacher, mesh, rows=2)
    assert np.isclose(many.loss, one.loss, rtol=1e-6)
    for ours, theirs in zip(gradients, one_gradients):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
