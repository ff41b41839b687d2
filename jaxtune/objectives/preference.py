"""Learning from preferences: pairs of a better and a worse answer to a prompt, or answers labelled as wanted or not.

Losses, their names and their metrics are the same as in TRL, with one exception: ORPO's cross-entropy is only over the
answer, as its authors write; TRL's includes the prompt. A pair is a unit of two documents, the prompt with the chosen
answer and then the prompt with the rejected answer; only the tokens of answers are trained.

Shape letters: b rows of a micro-batch, s positions in a row, n pairs of a row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Bool, Float

from jaxtune.columns import DESIRABLE, LAST, NEXT_TOKEN, REFERENCE, SCORE_DELTA, SCORED
from jaxtune.models.score import Batch, LabelScores, Scores
from jaxtune.objectives.document_sums import sum_documents
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.objectives.options import PreferenceOptions

REFERENCE_FREE = ("simpo", "cpo", "orpo")
"""Losses that have no reference model."""
AVERAGED = ("simpo", "orpo")
"""Losses that use the mean log-probability of an answer's tokens; the others use the sum."""


class Pairs(NamedTuple):
    """The answers of pairs, (rows, pairs).

    Attributes:
        chosen: log-probability of the chosen answer in nats, minus the reference's if there is one.
        rejected: the same for the rejected answer.
        tokens: number of tokens of the chosen and of the rejected answer.
    """

    chosen: Float[Array, "b n"]
    rejected: Float[Array, "b n"]
    tokens: tuple[Float[Array, "b n"], Float[Array, "b n"]]

    @property
    def gain(self) -> Float[Array, "b n"]:
        """The margin: `chosen` minus `rejected`."""
        return self.chosen - self.rejected

    @property
    def mean_gain(self) -> Float[Array, "b n"]:
        """The margin of the means per token."""
        return self.chosen / jnp.maximum(self.tokens[0], 1) - self.rejected / jnp.maximum(self.tokens[1], 1)


def preference(options: PreferenceOptions) -> Objective:
    """Return the objective of preference.loss.

    Metrics: rewards/chosen and rewards/rejected, which are beta times the difference of an answer's log-probability
    from the reference's; rewards/margins and rewards/accuracies; logps/chosen and logps/rejected; and nll_loss, if the
    cross-entropy of chosen answers has a weight.
    """
    if options.loss == "bradley_terry":
        return Objective(_rewards, SCORED, counts="pairs")
    compares = options.reference is not None and options.loss not in REFERENCE_FREE
    columns, reference_pass = NEXT_TOKEN, compares and not options.precompute_reference
    if compares and not reference_pass:
        columns = (*columns, LAST, REFERENCE)
    if options.loss == "kto":
        return Objective(partial(_kto, options), (*columns, DESIRABLE), reference_pass, counts="answers")
    columns = (*columns, SCORE_DELTA) if options.offset_alpha else columns
    return Objective(partial(_paired, options), columns, reference_pass, counts="pairs")


def answer_weight(options: PreferenceOptions) -> float:
    """Return the weight of the chosen answers' cross-entropy: preference.sft_weight, or by default the paper's."""
    if options.sft_weight is not None:
        return options.sft_weight
    return 1.0 if options.loss in ("cpo", "orpo") else 0.0


# ---- losses of pairs ----
def _sigmoid(pairs: Pairs, o: PreferenceOptions) -> Array:
    """DPO (arXiv:2305.18290, equation 7); with label_smoothing, conservative DPO."""
    return _smooth(o.beta * pairs.gain, o)


def _smooth(margin: Array, o: PreferenceOptions) -> Array:
    return -(1 - o.label_smoothing) * log_sigmoid(margin) - o.label_smoothing * log_sigmoid(-margin)


def _robust(pairs: Pairs, o: PreferenceOptions) -> Array:
    """Robust DPO: labels are wrong with probability label_smoothing (arXiv:2403.00409, equation 12)."""
    margin, wrong = o.beta * pairs.gain, o.label_smoothing
    return (wrong * log_sigmoid(-margin) - (1 - wrong) * log_sigmoid(margin)) / (1 - 2 * wrong)


def _hinge(pairs: Pairs, o: PreferenceOptions) -> Array:
    """SLiC (arXiv:2305.10425), with normalised log-probabilities as in arXiv:2309.06657."""
    return relu(1 - o.beta * pairs.gain)


def _ipo(pairs: Pairs, o: PreferenceOptions) -> Array:
    """IPO (arXiv:2310.12036, equation 17), with mean log-probabilities, as its authors use."""
    return jnp.square(pairs.mean_gain - 1 / (2 * o.beta))


def _sigmoid_norm(pairs: Pairs, o: PreferenceOptions) -> Array:
    """DPO with mean log-probabilities."""
    return _smooth(o.beta * pairs.mean_gain, o)


def _exo_pair(pairs: Pairs, o: PreferenceOptions) -> Array:
    """EXO (arXiv:2402.00856, equation 16)."""
    margin, wrong = o.beta * pairs.gain, o.label_smoothing
    of_chosen = sigmoid(margin) * (log_sigmoid(margin) - jnp.log1p(-wrong))
    return of_chosen + sigmoid(-margin) * (log_sigmoid(-margin) - jnp.log(wrong))


def _nca_pair(pairs: Pairs, o: PreferenceOptions) -> Array:
    """NCA (arXiv:2402.05369)."""
    chosen, rejected = o.beta * pairs.chosen, o.beta * pairs.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _bco_pair(pairs: Pairs, o: PreferenceOptions) -> Array:
    """BCO (arXiv:2404.04656) without its running mean of rewards, as in TRL."""
    return -log_sigmoid(o.beta * pairs.chosen) - log_sigmoid(-o.beta * pairs.rejected)


def _sppo_hard(pairs: Pairs, o: PreferenceOptions) -> Array:
    """SPPO (arXiv:2405.00675, equation 4.7), with a win probability of 1 for the chosen answer."""
    return jnp.square(pairs.chosen - 0.5 / o.beta) + jnp.square(pairs.rejected + 0.5 / o.beta)


def _apo_zero(pairs: Pairs, o: PreferenceOptions) -> Array:
    """APO-zero (arXiv:2408.06266, equation 7): chosen answers are better than the model's."""
    return 1 - sigmoid(o.beta * pairs.chosen) + sigmoid(o.beta * pairs.rejected)


def _apo_down(pairs: Pairs, o: PreferenceOptions) -> Array:
    """APO-down (arXiv:2408.06266, equation 8): the model's answers are better than the chosen ones."""
    return sigmoid(o.beta * pairs.chosen) + 1 - sigmoid(o.beta * pairs.gain)


def _kto_pair(pairs: Pairs, o: PreferenceOptions) -> Array:
    """KTO for pairs: each answer against the mean of the answers of the other kind in the micro-batch."""
    there = pairs.tokens[0] > 0
    chosen, rejected = (jax.lax.stop_gradient(relu(_mean(x, there))) for x in (pairs.chosen, pairs.rejected))
    losses = 1 - sigmoid(o.beta * (pairs.chosen - rejected)), 1 - sigmoid(o.beta * (chosen - pairs.rejected))
    return (losses[0] + losses[1]) / 2


def _simpo(pairs: Pairs, o: PreferenceOptions) -> Array:
    """SimPO (arXiv:2405.14734, equation 6)."""
    return _smooth(o.beta * pairs.gain - o.simpo_gamma, o)


def _orpo(pairs: Pairs, o: PreferenceOptions) -> Array:
    """The odds ratio of ORPO (arXiv:2403.07691, equation 7); the other term is the chosen answers' cross-entropy."""

    def log_odds(x: Array) -> Array:
        x = jnp.minimum(x, -1e-6)  # the odds of an answer with probability 1 are infinite
        return x - jnp.log(-jnp.expm1(x))

    return -o.beta * log_sigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))


LOSSES: dict[str, Callable[[Pairs, PreferenceOptions], Array]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "kto_pair": _kto_pair,
    "simpo": _simpo,
    "cpo": _sigmoid,
    "orpo": _orpo,
}


# ---- sums of a micro-batch ----
def _paired(options: PreferenceOptions, scores: Scores, batch: Batch) -> Sums:
    """Return the sums of a loss of `LOSSES`."""
    trained = batch["loss_weight"] > 0
    tokens = _pairs(trained.astype(jnp.float32), batch)
    there = (tokens[0] > 0) & (tokens[1] > 0)
    logps, relative = _pairs(-scores.loss, batch), _relative_to_reference(scores, batch)
    if options.loss in AVERAGED:
        logps, relative = (tuple(x / jnp.maximum(n, 1) for x, n in zip(pair, tokens)) for pair in (logps, relative))
    # Missing pairs of a row get -1, at which every loss and its gradient are finite: 0 * NaN would be NaN.
    chosen, rejected = (jnp.where(there, x, -1.0) for x in relative)
    if options.offset_alpha:
        # ODPO (arXiv:2402.10571, equation 9): a margin that depends on the difference of the answers' scores.
        delta = _pairs(batch["score_delta"] * trained, batch)[0] / jnp.maximum(tokens[0], 1)
        offset = options.offset_alpha / options.beta * jnp.log(jnp.maximum(delta, 1e-6))
        shifted = Pairs(jnp.where(there, chosen - offset, -1.0), rejected, tokens)
    else:
        shifted = Pairs(chosen, rejected, tokens)
    losses = LOSSES[options.loss or ""](shifted, options)
    pairs = jnp.sum(there, dtype=jnp.int32)
    loss = options.loss_weight * jnp.sum(jnp.where(there, losses, 0.0))

    def mean_of(values: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(there, values, 0.0)), pairs

    metrics = {
        "rewards/chosen": mean_of(options.beta * chosen),
        "rewards/rejected": mean_of(options.beta * rejected),
        "rewards/margins": mean_of(options.beta * (chosen - rejected)),
        "rewards/accuracies": mean_of(chosen > rejected),
        "logps/chosen": mean_of(logps[0]),
        "logps/rejected": mean_of(logps[1]),
    }
    if weight := answer_weight(options):
        # The mean over the tokens of all chosen answers in the micro-batch, as in TRL.
        nll = jnp.sum(_pairs(scores.loss, batch)[0]) / jnp.maximum(jnp.sum(tokens[0]), 1)
        loss, metrics["nll_loss"] = loss + weight * nll * pairs, (nll * pairs, pairs)
    return Sums(loss, pairs, metrics)


def _kto(options: PreferenceOptions, scores: Scores, batch: Batch) -> Sums:
    """Return the sums of KTO (arXiv:2402.01306, equation 8).

    A unit has the prompt with its answer, and the same prompt with an answer to another prompt. The log-ratio to the
    reference of these mismatched answers, averaged over the micro-batch, estimates the KL from the reference.
    """
    trained = batch["loss_weight"] > 0
    tokens = _pairs(trained.astype(jnp.float32), batch)
    there = tokens[0] > 0
    relative, mismatched = _relative_to_reference(scores, batch)
    wanted = _pairs(batch["desirable"] * trained, batch)[0] > 0
    kl = jax.lax.stop_gradient(relu(_mean(mismatched, there)))
    losses = jnp.where(
        wanted,
        options.desirable_weight * (1 - sigmoid(options.beta * (relative - kl))),
        options.undesirable_weight * (1 - sigmoid(options.beta * (kl - relative))),
    )
    answers, logps = jnp.sum(there, dtype=jnp.int32), _pairs(-scores.loss, batch)[0]

    def mean_of(values: Array, some: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(some, values, 0.0)), jnp.sum(some, dtype=jnp.int32)

    metrics = {"kl": (kl * answers, answers)}
    for name, some in (("chosen", wanted & there), ("rejected", ~wanted & there)):
        metrics[f"rewards/{name}"] = mean_of(options.beta * relative, some)
        metrics[f"logps/{name}"] = mean_of(logps, some)
    return Sums(jnp.sum(jnp.where(there, losses, 0.0)), answers, metrics)


def _rewards(scores: LabelScores, batch: Batch) -> Sums:
    """Return the sums of -log sigmoid(reward of chosen - reward of rejected) (Bradley-Terry; arXiv:2203.02155, eq. 1).

    Metrics: accuracy, margin, mean_reward.
    """
    last = batch["last"].astype(jnp.float32)
    chosen, rejected = _pairs(scores.logits[..., 0] * last, batch)
    there = _pairs(last, batch)[1] > 0
    pairs = jnp.sum(there, dtype=jnp.int32)

    def mean_of(values: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(there, values, 0.0)), pairs

    metrics = {
        "accuracy": mean_of(chosen > rejected),
        "margin": mean_of(chosen - rejected),
        "mean_reward": mean_of((chosen + rejected) / 2),
    }
    return Sums(mean_of(-log_sigmoid(chosen - rejected))[0], pairs, metrics)


def _relative_to_reference(scores: Scores, batch: Batch) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Return the log-probabilities of both answers, minus the reference's if there is one."""
    logps = _pairs(-scores.loss, batch)
    if REFERENCE.name in batch:
        reference = _pairs(batch[REFERENCE.name] * batch["last"], batch)
    elif scores.reference is not None:
        reference = _pairs(scores.reference * batch["loss_weight"], batch)
    else:
        return logps
    return logps[0] - reference[0], logps[1] - reference[1]


def _pairs(values: Float[Array, "b s"], batch: Batch) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Return the sums over the first and the second document of each unit."""
    count = max(1, values.shape[1] // 4)  # pairs of a row at most: a document has at least two tokens
    sums = sum_documents(values, batch["segment_ids"], 2 * count)
    return sums[:, ::2], sums[:, 1::2]


def _mean(values: Array, there: Bool[Array, "b n"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(there, values, 0.0)) / jnp.maximum(jnp.sum(there), 1)
