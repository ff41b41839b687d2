"""Learning from preferences: pairs of a better and a worse answer to a prompt, or answers labelled as wanted or not.

Losses, their names and their metrics are the same as in TRL, with one exception: ORPO's cross-entropy is only over the
answer, as its authors write; TRL's includes the prompt. A pair is a unit of two documents, the prompt with the chosen
answer and then the prompt with the rejected answer; only the tokens of answers are trained.

Shape letters: b rows of a micro-batch, s positions in a row, n pairs of a row.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, relu, sigmoid
from jaxtyping import Array, Float

from jaxtune.columns import DESIRABLE, LAST, NEXT_TOKEN, REFERENCE, SCORE_DELTA, SCORED
from jaxtune.models.head.score import Batch, LabelScores, Scores
from jaxtune.objectives.document_sums import mean_where, sum_documents
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.objectives.preference_losses import loss_of_pairs


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
    loss = options.properties
    if loss.samples == "scored pairs":
        return Objective(_rewards, SCORED, counts="pairs")
    compares = options.reference is not None and loss.reference
    columns, reference_pass = NEXT_TOKEN, compares and not options.precompute_reference
    if compares and not reference_pass:
        columns = (*columns, LAST, REFERENCE)
    if loss.samples == "answers":
        return Objective(partial(_kto, options), (*columns, DESIRABLE), reference_pass, counts="answers")
    columns = (*columns, SCORE_DELTA) if options.offset_alpha else columns
    return Objective(partial(_sums_of_pairs, options), columns, reference_pass, counts="pairs")


def answer_weight(options: PreferenceOptions) -> float:
    """Return the weight of the chosen answers' cross-entropy: preference.sft_weight, or by default the paper's."""
    return options.properties.sft_weight if options.sft_weight is None else options.sft_weight


def _sums_of_pairs(options: PreferenceOptions, scores: Scores, batch: Batch) -> Sums:
    """Return the sums of a loss of `loss_of_pairs`."""
    trained = batch["loss_weight"] > 0
    tokens = _pairs(trained.astype(jnp.float32), batch)
    there = (tokens[0] > 0) & (tokens[1] > 0)
    logps, relative = _pairs(-scores.loss, batch), _relative_to_reference(scores, batch)
    if options.properties.averaged:
        logps, relative = (tuple(x / jnp.maximum(n, 1) for x, n in zip(pair, tokens)) for pair in (logps, relative))
    # Missing pairs of a row get -1, at which every loss and its gradient are finite: 0 * NaN would be NaN.
    chosen, rejected = (jnp.where(there, x, -1.0) for x in relative)
    if options.offset_alpha:
        # ODPO (arXiv:2402.10571, equation 9): a margin that depends on the difference of the answers' scores.
        # The column repeats a unit's value at each token, so the mean over trained tokens is this value.
        delta = _pairs(batch["score_delta"] * trained, batch)[0] / jnp.maximum(tokens[0], 1)
        offset = options.offset_alpha / options.beta * jnp.log(jnp.maximum(delta, 1e-6))
        shifted = Pairs(jnp.where(there, chosen - offset, -1.0), rejected, tokens)
    else:
        shifted = Pairs(chosen, rejected, tokens)
    losses = loss_of_pairs(shifted, options)
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
        # Times the pairs, because the step divides by the weight, the number of pairs.
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
    kl = jax.lax.stop_gradient(relu(mean_where(there, mismatched)))  # z0 of the paper
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
        # The column repeats a document's value at each token, and `last` takes it once.
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
