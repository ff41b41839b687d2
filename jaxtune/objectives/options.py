"""The options of sections `preference`, `distill` and `grpo`."""

from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import option

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class PreferenceOptions:
    """Preference learning, from pairs of answers or from single answers marked as desirable or not."""

    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
                  "apo_zero", "apo_down", "kto_pair", "simpo", "cpo", "orpo", "kto", "bradley_terry"] | None = option(
        None,
        "DPO (sigmoid) and related losses, by TRL's names; simpo, cpo, orpo: no reference; kto: single answers; "
        "bradley_terry: a reward model (model.head='classification'); unset: next-token loss", basic=True)
    beta: float = option(0.1,
        "strength of the penalty for moving away from the reference; for SimPO the scale of rewards, for ORPO the "
        "weight of the odds-ratio loss", "(0, inf)", when="preference.loss != 'bradley_terry'", basic=True)
    label_smoothing: float = option(0.0, "assumed share of wrong labels", "fraction [0, 0.5)",
        when="preference.loss in ('sigmoid', 'sigmoid_norm', 'robust', 'exo_pair', 'simpo', 'cpo')")
    simpo_gamma: float = option(0.5, "reward margin of SimPO", "[0, inf)", when="preference.loss == 'simpo'")
    offset_alpha: float = option(0.0,
        "the margin grows by this times the log of the difference of the answers' scores (ODPO)", "[0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    loss_weight: float = option(1.0, "weight of the pairwise loss", "(0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    sft_weight: float | None = option(None,
        "weight of the added cross-entropy on chosen answers, without their prompts (TRL's ORPO includes them); "
        "unset: 1 for cpo and orpo, else 0", "[0, inf)", when="preference.loss not in ('kto', 'bradley_terry')")
    desirable_weight: float = option(1.0, "weight of desirable answers", "[0, inf)", when="preference.loss == 'kto'")
    undesirable_weight: float = option(1.0, "weight of undesirable answers", "[0, inf)",
        when="preference.loss == 'kto'")
    reference: str | None = option("start",
        "reference model: start: the model before its first step; a folder or hub id of a similar model, or of an "
        "adapter with lora.enabled; None: reference-free",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")
    precompute_reference: bool = option(False,
        "compute the reference log-probabilities once, before the first step, and keep them in data.cache_dir: a step "
        "then needs no second forward pass and no copy of the weights",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry') and preference.reference is not None "
        "and preference.reference_update_steps is None")
    reference_update_steps: int | None = option(None,
        "steps after which the current model becomes the reference, each time; an evaluation at that point compares "
        "the model with itself", "steps [1, inf)",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")


@dataclass(frozen=True)
class DistillOptions:
    """Distillation: the student learns the teacher's next-token distribution."""

    teacher: str | None = option(None,
        "a larger model with the same tokenizer: Hugging Face folder, hub id or adapter; scores the documents once, "
        "before the first step, into data.cache_dir: 8 * top_k + 4 bytes a token",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards", basic=True)
    divergence: Literal["forward_kl", "reverse_kl", "js"] = option("forward_kl",
        "divergence of teacher p and student q: KL(p||q), KL(q||p), or between them the generalised Jensen-Shannon "
        "divergence (js) of GKD (Agarwal et al. 2024)")
    js_beta: float = option(0.5,
        "teacher's share in the mixture m = js_beta p + (1 - js_beta) q, and weight of KL(p||m) relative to KL(q||m)",
        "(0, 1)", when="distill.divergence == 'js'")
    temperature: float = option(1.0,
        "divides the logits of both models; the divergence is not multiplied by its square (nor in TRL's GKD)",
        "(0, inf)")
    top_k: int = option(64, "most likely teacher tokens that are kept; all others count as a single token",
        "tokens [1, inf)")
    weight: float = option(1.0,
        "share of the divergence in the loss; the rest is the cross-entropy of the targets; 1 leaves it out, because "
        "the teacher has seen the targets too", "fraction (0, 1]")


@dataclass(frozen=True)
class GrpoOptions:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and variants: rewards relative to the mean of each prompt."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = option("dapo",
        "grpo: mean over completions of their token mean; dr_grpo: of their token sum / rollout.max_new_tokens (Dr. "
        "GRPO, 2025); dapo: mean over all tokens of the step (DAPO, 2025), TRL's default", basic=True)
    importance: Literal["token", "sequence"] = option("token",
        "importance ratio that is clipped: token: of each token; sequence: of each completion (GSPO, 2025)")
    advantage_scale: Literal["group", "batch", "none"] = option("group",
        "divide rewards, less their group mean, by the standard deviation of the group, of all completions of the "
        "step (batch), or by nothing (none, Dr. GRPO)")
    clip_low: float = option(0.2,
        "lower clipping range: ratios below 1 - clip_low get no gradient that lowers them further", "fraction [0, 1]")
    clip_high: float | None = option(None, "upper clipping range, above 1; unset: clip_low", "[0, inf)")
    beta: float = option(0.0, "coefficient of the KL divergence from the model before its first step", "[0, inf)")
    iterations: int = option(1, "optimizer updates with the completions of a step", "updates [1, inf)")
    mask_truncated: bool = option(False, "mask truncated completions out of the loss (DAPO)")
