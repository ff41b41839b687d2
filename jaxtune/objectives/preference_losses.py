"""The losses of preference.loss, with TRL's names: a row of `LOSSES` and, for pairs, a formula of `loss_of_pairs`.

The options are made from `LOSSES`, so this file is imported without jax.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclass(frozen=True)
class PreferenceLoss:
    """The properties of a loss.

    Attributes:
        options: the options that it reads and other losses do not.
        reference: whether it compares with a reference model.
        averaged: whether it uses the mean log-probability of an answer's tokens; otherwise the sum.
        sft_weight: weight of the chosen answers' cross-entropy, unless preference.sft_weight is set.
        samples: pairs of answers, single answers, or pairs that a reward model scores.
    """

    options: tuple[str, ...] = ()
    reference: bool = True
    averaged: bool = False
    sft_weight: float = 0.0
    samples: Literal["pairs", "answers", "scored pairs"] = "pairs"


# ODPO's offset is of losses that depend on `Pairs.gain` only.
LOSSES = {
    "sigmoid": PreferenceLoss(("label_smoothing", "offset_alpha")),
    "sigmoid_norm": PreferenceLoss(("label_smoothing",)),
    "hinge": PreferenceLoss(("offset_alpha",)),
    "ipo": PreferenceLoss(),
    "robust": PreferenceLoss(("label_smoothing", "offset_alpha")),
    "exo_pair": PreferenceLoss(("label_smoothing", "offset_alpha")),
    "nca_pair": PreferenceLoss(),
    "bco_pair": PreferenceLoss(),
    "sppo_hard": PreferenceLoss(),
    "apo_zero": PreferenceLoss(),
    "apo_down": PreferenceLoss(),
    "kto_pair": PreferenceLoss(),
    "simpo": PreferenceLoss(("label_smoothing", "simpo_gamma", "offset_alpha"), reference=False, averaged=True),
    "cpo": PreferenceLoss(("label_smoothing", "offset_alpha"), reference=False, sft_weight=1.0),
    "orpo": PreferenceLoss(reference=False, averaged=True, sft_weight=1.0),
    "kto": PreferenceLoss(("desirable_weight", "undesirable_weight"), samples="answers"),
    "bradley_terry": PreferenceLoss(reference=False, samples="scored pairs"),
}


def losses_with(has: Callable[[PreferenceLoss], bool]) -> tuple[str, ...]:
    """Return the names of the losses with a property."""
    return tuple(name for name, loss in LOSSES.items() if has(loss))


def loss_of_pairs(pairs: Any, o: Any) -> "Array":
    """Return the loss of each pair, (rows, pairs).

    pairs: `preference.Pairs`. o: `options.PreferenceOptions`, which is made from `LOSSES` and so not imported here.
    """
    import jax
    import jax.numpy as jnp
    from jax.nn import log_sigmoid, relu, sigmoid

    from jaxtune.objectives.document_sums import mean_where

    def smooth(margin: "Array") -> "Array":
        return -(1 - wrong) * log_sigmoid(margin) - wrong * log_sigmoid(-margin)

    def log_odds(x: "Array") -> "Array":
        x = jnp.minimum(x, -1e-6)  # the odds of an answer with probability 1 are infinite
        return x - jnp.log(-jnp.expm1(x))

    beta, wrong = o.beta, o.label_smoothing
    match o.loss:
        case "sigmoid" | "cpo":
            # DPO (arXiv:2305.18290, equation 7); with label_smoothing, conservative DPO.
            return smooth(beta * pairs.gain)
        case "sigmoid_norm":
            # DPO with mean log-probabilities.
            return smooth(beta * pairs.mean_gain)
        case "hinge":
            # SLiC (arXiv:2305.10425), with normalised log-probabilities as in arXiv:2309.06657.
            return relu(1 - beta * pairs.gain)
        case "ipo":
            # IPO (arXiv:2310.12036, equation 17), with mean log-probabilities, as its authors use.
            return jnp.square(pairs.mean_gain - 1 / (2 * beta))
        case "robust":
            # Robust DPO: labels are wrong with probability label_smoothing (arXiv:2403.00409, equation 12).
            margin = beta * pairs.gain
            return (wrong * log_sigmoid(-margin) - (1 - wrong) * log_sigmoid(margin)) / (1 - 2 * wrong)
        case "exo_pair":
            # EXO (arXiv:2402.00856, equation 16).
            margin = beta * pairs.gain
            of_chosen = sigmoid(margin) * (log_sigmoid(margin) - jnp.log1p(-wrong))
            return of_chosen + sigmoid(-margin) * (log_sigmoid(-margin) - jnp.log(wrong))
        case "nca_pair":
            # NCA (arXiv:2402.05369).
            chosen, rejected = beta * pairs.chosen, beta * pairs.rejected
            return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)
        case "bco_pair":
            # BCO (arXiv:2404.04656) without its running mean of rewards, as in TRL.
            return -log_sigmoid(beta * pairs.chosen) - log_sigmoid(-beta * pairs.rejected)
        case "sppo_hard":
            # SPPO (arXiv:2405.00675, equation 4.7), with a win probability of 1 for the chosen answer.
            return jnp.square(pairs.chosen - 0.5 / beta) + jnp.square(pairs.rejected + 0.5 / beta)
        case "apo_zero":
            # APO-zero (arXiv:2408.06266, equation 7): chosen answers are better than the model's.
            return 1 - sigmoid(beta * pairs.chosen) + sigmoid(beta * pairs.rejected)
        case "apo_down":
            # APO-down (arXiv:2408.06266, equation 8): the model's answers are better than the chosen ones.
            return sigmoid(beta * pairs.chosen) + 1 - sigmoid(beta * pairs.gain)
        case "kto_pair":
            # KTO for pairs: each answer against the mean of the answers of the other kind in the micro-batch.
            there = pairs.tokens[0] > 0
            chosen, rejected = (
                jax.lax.stop_gradient(relu(mean_where(there, x))) for x in (pairs.chosen, pairs.rejected)
            )
            losses = 1 - sigmoid(beta * (pairs.chosen - rejected)), 1 - sigmoid(beta * (chosen - pairs.rejected))
            return (losses[0] + losses[1]) / 2
        case "simpo":
            # SimPO (arXiv:2405.14734, equation 6).
            return smooth(beta * pairs.gain - o.simpo_gamma)
        case "orpo":
            # The odds ratio of ORPO (arXiv:2403.07691, equation 7); the other term is the cross-entropy of sft_weight.
            return -beta * log_sigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))
    raise AssertionError(f"LOSSES has a loss of pairs without a formula: {o.loss}")
