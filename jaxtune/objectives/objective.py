"""The interface of an objective: sums of loss and weight, from scores and the columns of a batch that it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Num

from jaxtune.columns import NEXT_TOKEN, Column
from jaxtune.models.head.score import ScoreOptions


class Sums(NamedTuple):
    """Sums over a micro-batch. The step adds them up over all micro-batches and devices, and divides once.

    Attributes:
        loss: sum of the losses.
        weight: divisor of the loss, such as the number of target tokens or of pairs, in any number dtype.
        metrics: (sum, divisor) of each metric, by name; in an evaluation also arrays, which `summarise` reads.
        directions: directions for parameters that no gradient reaches, by parameter name; their rule gets these in
            place of a gradient.
    """

    loss: Float[Array, ""]
    weight: Num[Array, ""]
    metrics: Mapping[str, tuple[Array, Array]] = {}
    directions: Mapping[str, Array] = {}


Metrics = Mapping[str, tuple[Array, Array]]
"""(sum, divisor) of each metric, by name."""


def means(metrics: Metrics) -> dict[str, float]:
    """Return the mean of each metric that has a weight."""
    return {name: float(value / max(weight, 1)) for name, (value, weight) in metrics.items() if weight}


@dataclass(frozen=True)
class Objective:
    """A training or evaluation objective: a function of scores, which does not see the decoder.

    Attributes:
        loss: (scores, micro-batch) -> sums; the scores are `LabelScores` for a classifier or if `score` has tokens,
            `TotalScores` if `score` has total, else `Scores`.
        columns: columns of the batch that it reads.
        reference: whether scores must also have the log-probabilities of the base model without adapters.
        score: options of the scores.
        counts: name of the metric under which a step reports the weight.
        summarise: the sums of all metrics of an evaluation -> the metrics that it reports.
    """

    loss: Callable[..., Sums]
    columns: tuple[Column, ...] = NEXT_TOKEN
    reference: bool = False
    score: ScoreOptions = ScoreOptions()
    counts: str = "target_tokens"
    summarise: Callable[[Metrics], dict[str, float]] = means

    def __post_init__(self):
        if self.reference and self.score.z_loss:
            raise ValueError("z_loss cannot be used with a reference: log_prob would include the penalty")
        needs_tokens = self.reference or self.score.divergence is not None or self.score.temperature != 1
        if self.score.total and needs_tokens:
            raise ValueError("total cannot be used with a reference, a divergence or a temperature: it is only a sum")
