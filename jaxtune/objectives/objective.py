"""The interface of an objective: sums of loss and weight, from scores and the columns of a batch that it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Num

from jaxtune.columns import NEXT_TOKEN, Column
from jaxtune.models.divergence import Divergence


class Sums(NamedTuple):
    """Sums over a micro-batch; the step adds up those of all micro-batches and devices, and divides once.

    weight: of the loss, such as the number of target tokens or of pairs, in any number dtype. metrics: by name, (sum,
    its own weight). directions: by the name of a parameter that no gradient reaches, what its rule takes for one.
    """

    loss: Float[Array, ""]
    weight: Num[Array, ""]
    metrics: Mapping[str, tuple[Array, Array]] = {}
    directions: Mapping[str, Array] = {}


@dataclass(frozen=True)
class Objective:
    """What is minimised: a function of scores, which never sees the decoder.

    Attributes:
        loss: (scores, micro-batch) -> sums; of a classifier the scores are `LabelScores`, else `Scores`.
        columns: of the batch, that it reads.
        reference: whether scores must also hold the log-probabilities of the base alone, without adapters.
        z_loss, label_smoothing, divergence, temperature, hits: of `models.score.score`.
        counts: name of the metric under which a step reports the weight.
    """

    loss: Callable[..., Sums]
    columns: tuple[Column, ...] = NEXT_TOKEN
    reference: bool = False
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    divergence: Divergence | None = None
    temperature: float = 1.0
    hits: bool = False
    counts: str = "target_tokens"

    def __post_init__(self):
        if self.reference and self.z_loss:
            raise ValueError("log-probabilities with a z-loss in them cannot be compared with a reference's")
