"""How far the log-probabilities of the engine that samples are from the model's own."""

import logging
from functools import partial
from typing import Any

import jax

from jaxtune.columns import LOSS_WEIGHT, OLD_LOG_PROB, SAMPLED_LOG_PROB, SEGMENT_IDS
from jaxtune.models.head.score import Batch
from jaxtune.objectives.options import RolloutOptions
from jaxtune.objectives.rollout_correction import EngineDifference, engine_difference
from jaxtune.parallel import multihost

log = logging.getLogger("jaxtune")


def _difference_of_batch(options: RolloutOptions, batch: Batch) -> EngineDifference:
    """Return the difference over all micro-batches of a batch."""
    columns = (OLD_LOG_PROB, SAMPLED_LOG_PROB, LOSS_WEIGHT, SEGMENT_IDS)
    return engine_difference(options, *(batch[column.name] for column in columns))


class EngineComparison:
    """Compares the log-probabilities of completions by the model and by the engine that sampled them."""

    LARGE = 0.1  # nats, the mean of a step; a tiny model in bfloat16 and vLLM differed by 0.002

    def __init__(self, options: RolloutOptions):
        self._options, self._warned = options, False
        self._difference = jax.jit(partial(_difference_of_batch, options))

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return metrics of a step, by TRL's names; warn once if the difference is large."""
        found = self._difference(batch)
        much = found.mean > self.LARGE or not 0.5 < found.mean_ratio < 2
        if much and not self._warned and multihost.is_main():
            self._warned = True
            advice = (
                "; the server must serve this model, in a similar precision. With another rollout.temperature than 1, "
                "start vLLM with --logprobs-mode=processed_logprobs, and leave rollout.top_p and its like out"
            )
            log.warning(
                "rollout.correction: the log-probabilities of the engine that samples differ from the model's by %.3f "
                "nats on average, and the mean weight of a token is %.3g, although it should be near 1%s",
                found.mean,
                found.mean_ratio,
                "" if self._options.server is None else advice,
            )
        return {
            "sampling/sampling_logp_difference/mean": found.mean,
            "sampling/sampling_logp_difference/max": found.largest,
            "sampling/kl": found.kl,
            "sampling/importance_sampling_ratio/min": found.smallest_ratio,
            "sampling/importance_sampling_ratio/mean": found.mean_ratio,
            "sampling/importance_sampling_ratio/max": found.largest_ratio,
        }
