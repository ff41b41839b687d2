"""train.label_smoothing, train.z_loss (PaLM's, arXiv:2204.02311) and temperatures, on trained tokens.

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
from scipy.special import log_softmax
from tiny import VOCABULARY

from jaxtune.errors import UserError
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import ScoreOptions, Scores, score, score_total
from jaxtune.objectives.cross_entropy import cross_entropy, dynamic_fine_tuning
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import by_token, gathered_entry

Z_LOSS, POSITIONS, TRAINED, WIDTH, PADDED = 1e-2, 16, 8, 8, 512
SMOOTHING = 0.1
OBJECTIVE = cross_entropy(Z_LOSS, SMOOTHING)


def only_a_head(head: jax.Array, logit_cap: float | None = None) -> Any:
    """Return a stand-in for a decoder that has only a head [V, D]."""
    spec = SimpleNamespace(vocabulary=VOCABULARY, logit_cap=logit_cap, family="made here")
    return SimpleNamespace(head_weight=head, spec=spec)


def sums(
    hidden: jax.Array, head: jax.Array, batch: dict, objective: Objective = OBJECTIVE, cap: float | None = None
) -> Sums:
    """Return an objective's sums for hidden states [B, S, D] and a head [V, D]."""
    call = ForwardOptions(jnp.dtype("float32"))
    scores = score_total(only_a_head(head, cap), batch, call, (hidden, {}), objective.score, head_gradient=True)
    return objective.loss(scores, batch)


def make(mesh, width: int = WIDTH):
    """Return (hidden states, head, batch whose second half has no weight)."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(1, POSITIONS, width)).astype(np.float32)
    head = random.normal(size=(PADDED, width)).astype(np.float32)
    batch = make_batch(tokens(1, POSITIONS), mesh)
    weight = (np.arange(POSITIONS)[None] < TRAINED).astype(np.float32)

    def place(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    batch |= {"loss_weight": place(weight, by_token())}
    return place(hidden, by_token(None)), place(head, jax.P(gathered_entry("vocabulary"), None)), batch


@pytest.mark.parametrize("cap", [None, 5.0])
def test_loss_and_gradients_are_those_of_the_definition(cap, one_device):
    hidden, head, batch = make(one_device)

    @jax.jit
    @jax.value_and_grad
    def ours(parts):
        with jax.default_matmul_precision("highest"):
            return sums(*parts, batch, cap=cap).loss

    targets = np.asarray(batch["targets"])[0, :TRAINED]

    def defined(parts):
        logits = jnp.matmul(parts[0][0, :TRAINED], parts[1][:VOCABULARY].T, precision="highest")
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        smooth = (1 - SMOOTHING) * logits[np.arange(TRAINED), targets] + SMOOTHING * logits.mean(-1)
        return jnp.sum(normalizer - smooth + Z_LOSS * normalizer**2)

    loss, gradients = ours((hidden, head))
    jax.set_mesh(None)
    expected, expected_gradients = jax.value_and_grad(defined)((np.asarray(hidden), np.asarray(head)))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for gradient, expected in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient, expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_a_trained_head_costs_three_products(one_device):
    """Logits, and the gradients of hidden states and head; the backward pass does not compute the logits again."""
    hidden, head, batch = make(one_device)
    program = jax.make_jaxpr(jax.grad(lambda *parts: sums(*parts, batch).loss, (0, 1)))(hidden, head)
    assert str(program).count("dot_general") == 3


def test_an_objective_of_a_total_can_read_nothing_of_a_token(one_device):
    hidden, head, batch = make(one_device)
    careless = dataclasses.replace(OBJECTIVE, loss=lambda scores, batch: Sums(jnp.sum(scores.log_prob), jnp.array(1)))
    with pytest.raises(AttributeError, match="log_prob"):
        sums(hidden, head, batch, careless)
    with pytest.raises(ValueError, match="total cannot be used with"):
        Objective(OBJECTIVE.loss, score=ScoreOptions(total=True, temperature=0.5))


def test_tokens_without_weight_pay_none(one_device):
    hidden, head, batch = make(one_device)
    total = jax.jit(lambda batch: sums(hidden, head, batch)[:2])
    assert total(batch)[0] > 0 and total(batch)[1] == TRAINED
    assert total(batch | {"loss_weight": 0 * batch["loss_weight"]}) == (0.0, 0)


def test_a_temperature_divides_the_logits(one_device):
    hidden, head, batch = make(one_device)
    call, options = ForwardOptions(jnp.dtype("float32")), ScoreOptions(temperature=0.6)
    with jax.default_matmul_precision("highest"):
        log_prob = score(only_a_head(head), batch, call, (hidden, {}), options).log_prob[0, :TRAINED]
    logits = np.asarray(hidden, np.float64)[0, :TRAINED] @ np.asarray(head, np.float64)[:VOCABULARY].T / 0.6
    of_targets = logits[np.arange(TRAINED), np.asarray(batch["targets"])[0, :TRAINED]]
    np.testing.assert_allclose(log_prob, of_targets - np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    with pytest.raises(UserError, match="logits of a made here are capped"):
        score(only_a_head(head, 30.0), batch, call, (hidden, {}), options)


def test_a_temperature_is_not_rounded_to_bfloat16(one_device):
    """0.9 would become 0.8984, and all logits 0.17% larger than in the engine that samples."""
    hidden, head, batch = make(one_device, width=256)
    hidden, head = (x.astype(jnp.bfloat16) for x in (hidden, head))
    call, options = ForwardOptions(jnp.dtype("bfloat16")), ScoreOptions(temperature=0.9)
    log_prob = np.asarray(score(only_a_head(head), batch, call, (hidden, {}), options).log_prob[0, :TRAINED])
    logits = np.asarray(hidden, np.float64)[0, :TRAINED] @ np.asarray(head, np.float64)[:VOCABULARY].T
    targets = np.asarray(batch["targets"])[0, :TRAINED]

    def error(temperature: float) -> float:
        expected = log_softmax(logits / temperature, -1)[np.arange(TRAINED), targets]
        return float(np.abs(log_prob - expected).mean())

    assert error(0.9) < 0.5 * error(float(jnp.bfloat16(0.9)))


def test_dynamic_fine_tuning_is_the_loss_of_trl():
    """As its SFTTrainer.compute_loss: the cross-entropy of a token times its probability, which has no gradient."""
    torch = pytest.importorskip("torch", reason="the reference is written in torch (Python 3.11 here)")
    values, weight = -np.random.default_rng(0).exponential(size=(2, 5)), np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    log_probs = torch.tensor(values * weight, requires_grad=True)
    expected = (-log_probs * log_probs.exp().detach()).sum() / weight.sum()
    expected.backward()

    def loss(log_prob):
        scores = Scores(log_prob, -log_prob * weight, {})
        sums = dynamic_fine_tuning().loss(scores, {"loss_weight": jnp.asarray(weight, jnp.float32)})
        return sums.loss / sums.weight

    found, gradient = jax.value_and_grad(loss)(jnp.asarray(values * weight, jnp.float32))
    assert abs(float(found) - expected.item()) <= 1e-6
    np.testing.assert_allclose(gradient * weight, log_probs.grad.numpy() * weight, atol=1e-6)
