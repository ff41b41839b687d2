"""Decision models: a document is a question about a state; the scores after its last token are its options'.

The losses are strictly proper scoring rules: their expected value is smallest for the true probabilities (Gneiting and
Raftery 2007). Shape letters: b rows of the batch, s positions in a row, r rows of the head (`columns.QUESTION_ROWS`), t
temperatures, k types of question.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxtune.columns import ASKED, HEAD_ROWS, NOT_AN_OPTION, QUESTION_ROWS
from jaxtune.models.head.score import Batch, LabelScores, ScoreOptions
from jaxtune.objectives.objective import Metrics, Objective, Sums, means
from jaxtune.objectives.options import DecisionOptions

TEMPERATURES = 2.0 ** (np.arange(-24, 25) / 8)
"""The temperatures among which an evaluation chooses, from 1/8 to 8."""

BINS = 15  # of the expected calibration error, as in Guo et al. 2017
_UNCHANGED = int(np.flatnonzero(TEMPERATURES == 1)[0])


class _Questions(NamedTuple):
    """The questions of a batch, at every position; values are meaningless where `there` is False.

    Attributes:
        there: whether the position is the last token of a question.
        option: whether a row of the head is an option of the question.
        shares: the target probability of each row; 0 if it is not an option.
    """

    there: Bool[Array, "b s"]
    option: Bool[Array, "b s r"]
    shares: Float[Array, "b s r"]


def decision(options: DecisionOptions) -> Objective:
    """Return the objective decision.loss, a mean over questions; metrics: accuracy and brier."""
    return Objective(
        partial(_sums, options.loss, False), ASKED, score=ScoreOptions(tokens=options.label_tokens), counts="questions"
    )


def evaluated_decision(options: DecisionOptions) -> Objective:
    """Return the objective of an evaluation, which also measures and fits the calibration.

    Metrics:
    - accuracy: the share of the likeliest option in the label, which is 1 or 0 if the label is hard;
    - brier: sum over options of (probability - share)^2;
    - ece: expected calibration error, the mean distance in 15 bins between the probability of the likeliest option and
      its share (Guo et al. 2017, arXiv:1706.04599);
    - temperature_TYPE: the temperature with the smallest cross-entropy for questions of a type;
    - ece_calibrated: ece at these temperatures.
    """
    return Objective(
        partial(_sums, options.loss, True),
        ASKED,
        score=ScoreOptions(tokens=options.label_tokens),
        counts="questions",
        summarise=_summarise,
    )


def _sums(loss: str | None, calibrate: bool, scores: LabelScores, batch: Batch) -> Sums:
    shares = batch["option_shares"]
    option = (shares != NOT_AN_OPTION) & batch["last"][..., None]
    questions = _Questions(batch["last"], option, jnp.where(option, shares, 0.0))
    log_prob = _log_probabilities(scores.logits, questions, 1.0)
    probabilities = jnp.where(option, jnp.exp(log_prob), 0.0)
    brier = jnp.sum(jnp.square(probabilities - questions.shares), axis=-1)
    match loss:
        case "cross_entropy":
            losses = _cross_entropy(log_prob, questions)
        case "brier":
            losses = brier
        case "rps":
            losses = _ranked_or_brier(probabilities, questions, brier)
        case _:
            raise ValueError(loss)
    count = jnp.sum(questions.there, dtype=jnp.int32)
    _, share = _likeliest(probabilities, questions)

    def total(values: Float[Array, "b s"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(questions.there, values, 0.0))

    metrics = {"accuracy": (total(share), count), "brier": (total(brier), count)}
    if calibrate:
        metrics |= _calibration(scores.logits, questions)
    return Sums(total(losses), count, metrics)


def _log_probabilities(
    logits: Float[Array, "b s r"], questions: _Questions, temperature: float | Float[Array, ""]
) -> Float[Array, "b s r"]:
    """Return the log-probability of each option; finite, but meaningless, for other rows."""
    # -inf would give NaN gradients; exp(-1e9) is exactly 0 in float32.
    masked = jnp.where(questions.option, logits / temperature, -1e9)
    return masked - jax.nn.logsumexp(masked, axis=-1, keepdims=True)


def _cross_entropy(log_prob: Float[Array, "b s r"], questions: _Questions) -> Float[Array, "b s"]:
    return -jnp.sum(jnp.where(questions.option, log_prob, 0.0) * questions.shares, axis=-1)


def _ranked_or_brier(
    probabilities: Float[Array, "b s r"], questions: _Questions, brier: Float[Array, "b s"]
) -> Float[Array, "b s"]:
    """Return the ranked probability score of scores (Epstein 1969), and the Brier score of other questions.

    It is the sum over levels of the squared difference of the cumulative probabilities, divided by the number of levels
    less one: 1 if all probability is at one end and the label at the other.
    """
    levels = slice(QUESTION_ROWS["score"].start, QUESTION_ROWS["score"].stop)
    excess = jnp.cumsum((probabilities - questions.shares)[..., levels], axis=-1)
    option = questions.option[..., levels]
    # Both sums are 1 from the last level on, up to rounding.
    ranked = jnp.sum(jnp.where(option, jnp.square(excess), 0.0), axis=-1)
    return jnp.where(option[..., 0], ranked / jnp.maximum(jnp.sum(option, axis=-1) - 1, 1), brier)


def _likeliest(
    probabilities: Float[Array, "b s r"], questions: _Questions
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return the probability of the likeliest option, and its share in the label."""
    best = jnp.argmax(probabilities, axis=-1)[..., None] == jnp.arange(HEAD_ROWS)
    return jnp.max(probabilities, axis=-1), jnp.sum(jnp.where(best, questions.shares, 0.0), axis=-1)


def _calibration(logits: Float[Array, "b s r"], questions: _Questions) -> Metrics:
    """Return sums at each temperature, by type of question: cross-entropies, and the excess of confidence in bins."""
    of_kind = jnp.stack([questions.option[..., rows.start] for rows in QUESTION_ROWS.values()], axis=-1)
    of_kind = of_kind.astype(jnp.float32)

    def at(temperature: Float[Array, ""]) -> tuple[Float[Array, "k"], Float[Array, "k bins"]]:
        log_prob = _log_probabilities(logits, questions, temperature)
        confidence, share = _likeliest(jnp.where(questions.option, jnp.exp(log_prob), 0.0), questions)
        bins = jnp.minimum((confidence * BINS).astype(jnp.int32), BINS - 1)
        # (b, s, k, bins): each question counts for its own type and bin.
        excess = ((confidence - share)[..., None] * jax.nn.one_hot(bins, BINS))[..., None, :] * of_kind[..., None]
        return jnp.sum(_cross_entropy(log_prob, questions)[..., None] * of_kind, (0, 1)), jnp.sum(excess, (0, 1))

    # One temperature after the other: one array for all would be large.
    nll, excess = jax.lax.map(at, jnp.asarray(TEMPERATURES, jnp.float32))
    counts = jnp.sum(of_kind, (0, 1))
    return {"nll": (nll, counts), "excess": (excess, counts)}


def _summarise(metrics: Metrics) -> dict[str, float]:
    """Return the metrics of `evaluated_decision` from the sums of an evaluation."""
    (nll, counts), (excess, _) = metrics["nll"], metrics["excess"]
    best = np.argmin(nll, axis=0)  # nll is (t, k)
    questions = max(counts.sum(), 1)
    by_kind = np.arange(len(QUESTION_ROWS))
    calibrated = excess[best, by_kind].sum(0)  # (bins,), each type at its own temperature
    # Temperatures of types that do not occur are left out.
    temperatures = {
        f"temperature_{kind}": float(TEMPERATURES[best[number]])
        for number, kind in enumerate(QUESTION_ROWS)
        if counts[number]
    }
    return {
        **means({name: value for name, value in metrics.items() if name not in ("nll", "excess")}),
        "ece": float(np.abs(excess[_UNCHANGED].sum(0)).sum() / questions),
        "ece_calibrated": float(np.abs(calibrated).sum() / questions),
        **temperatures,
    }
