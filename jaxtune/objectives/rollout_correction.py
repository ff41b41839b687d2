"""Correction of rollouts whose engine computes other probabilities than the trained model, as in TRL.

An inference server computes with other kernels, and often in another precision. Its completions are samples of its own
distribution, so that the gradient is biased. The ratio of the two probabilities weights the loss: truncated importance
sampling (TIS, https://fengyao.notion.site/off-policy-rl), masked importance sampling, or IcePop (token_mask).

Shape letters: b rows, s positions of a row. A document of a row is one prompt and its completion.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.objectives.document_sums import sum_own_document
from jaxtune.objectives.options import RolloutOptions

LARGEST_LOG_RATIO = 20.0  # nats; far larger ratios overflow, and 0 * inf is NaN, in a loss or in its gradient


class EngineDifference(NamedTuple):
    """The difference between the log-probabilities of tokens by the trained model and by the engine, in nats.

    Attributes:
        mean, largest: of its absolute value.
        kl: the estimate k1 of KL(engine || model): the mean of engine less model.
        smallest_ratio, mean_ratio, largest_ratio: the weights of `correction_weights`.
    """

    mean: Float[Array, ""]
    largest: Float[Array, ""]
    kl: Float[Array, ""]
    smallest_ratio: Float[Array, ""]
    mean_ratio: Float[Array, ""]
    largest_ratio: Float[Array, ""]


def correction_weights(
    options: RolloutOptions,
    model: Float[Array, "*b s"],
    engine: Float[Array, "*b s"],
    mask: Float[Array, "*b s"],
    segment_ids: Int[Array, "*b s"],
) -> Float[Array, "*b s"]:
    """Return the weight of each token's loss from its log-probabilities by the model and by the engine.

    The ratio is 1 if the engine's log-probability is NaN, and at positions outside the mask. With a mode of sequences,
    a document has one ratio, the product over its tokens.
    """
    of_sequence = options.corrects.startswith("sequence")
    log_ratio = _difference(model, engine, mask)
    log_ratio = sum_own_document(log_ratio, segment_ids) if of_sequence else log_ratio  # the log of the product
    ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_LOG_RATIO))
    low = 0.0 if options.correction_min is None else options.correction_min
    high = jnp.inf if options.correction_max is None else options.correction_max
    if options.corrects.endswith("truncate"):
        ratio = jnp.clip(ratio, low, high)  # TIS: min(ratio, high)
    else:
        ratio = jnp.where((ratio < low) | (ratio > high), 0, ratio)
    return ratio


def engine_difference(
    options: RolloutOptions,
    model: Float[Array, "*b s"],
    engine: Float[Array, "*b s"],
    mask: Float[Array, "*b s"],
    segment_ids: Int[Array, "*b s"],
) -> EngineDifference:
    """Return how much the engine's log-probabilities differ from the model's, over the tokens that both know."""
    known = (mask > 0) & ~jnp.isnan(engine)
    count = jnp.maximum(jnp.sum(known), 1)
    difference = _difference(model, engine, mask)
    weights = correction_weights(options, model, engine, mask, segment_ids)
    return EngineDifference(
        jnp.sum(jnp.abs(difference)) / count,
        jnp.max(jnp.abs(difference)),
        -jnp.sum(difference) / count,
        jnp.min(weights, where=mask > 0, initial=jnp.inf),
        jnp.sum(weights * mask) / jnp.maximum(jnp.sum(mask), 1),
        jnp.max(weights, where=mask > 0, initial=0.0),
    )


def _difference(
    model: Float[Array, "*b s"], engine: Float[Array, "*b s"], mask: Float[Array, "*b s"]
) -> Float[Array, "*b s"]:
    return jnp.where((mask > 0) & ~jnp.isnan(engine), model - engine, 0)
