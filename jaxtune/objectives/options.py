"""The options of sections `preference`, `decision`, `distill`, `rollout`, `grpo` and `mtp`."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxtune.columns import HEAD_ROWS
from jaxtune.objectives.preference_losses import LOSSES, PreferenceLoss, losses_with
from jaxtune.option_field import Config, Problem, among, option, problem, value_of

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


def _when(does: Callable[[PreferenceLoss], bool]) -> str:
    return among("preference.loss", losses_with(does), losses_with(lambda loss: not does(loss)))


def _when_read(name: str) -> str:
    return _when(lambda loss: name in loss.options)


_OF_PAIRS = _when(lambda loss: loss.samples == "pairs")
_WITH_REFERENCE = _when(lambda loss: loss.reference)
_CORRECTED = (
    "rollout.correction not in (None, 'none') or "
    "(rollout.rewards and rollout.server is not None and rollout.correction is None)"
)
_EPISODES = "rollout.tools or rollout.environment is not None"
_FREE = losses_with(lambda loss: not loss.reference and loss.samples == "pairs")

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class PreferenceOptions:
    """Preference learning, from pairs of answers or from single answers marked as desirable or not."""

    loss: LossName | None = option(None,
        f"DPO (sigmoid) and related losses, by TRL's names; {', '.join(_FREE)}: no reference; kto: single answers; "
        "bradley_terry: a reward model (model.head='classification'); unset: next-token loss", basic=True,
        also="pref_loss dpo_loss loss_type rl")
    beta: float = option(0.1,
        "strength of the penalty for moving away from the reference; for SimPO the scale of rewards, for ORPO the "
        "weight of the odds-ratio loss", "(0, inf)", when=_when(lambda loss: loss.samples != "scored pairs"),
        basic=True, also="pref_beta dpo_beta rl_beta kto_beta")
    label_smoothing: float = option(0.0, "assumed share of wrong labels", "fraction [0, 0.5)",
        when=_when_read("label_smoothing"), also="dpo_label_smoothing")
    simpo_gamma: float = option(0.5, "reward margin of SimPO", "[0, inf)", when=_when_read("simpo_gamma"), also="gamma")
    offset_alpha: float = option(0.0,
        "factor of the log of the difference of the answers' scores, by which the margin must be wider (ODPO)",
        "[0, inf)", when=_when_read("offset_alpha"))
    loss_weight: float = option(1.0, "weight of the pairwise loss", "(0, inf)", when=_OF_PAIRS, also="pref_loss_ratio")
    sft_weight: float | None = option(None,
        "weight of the added cross-entropy on chosen answers, without their prompts (TRL's ORPO includes them); "
        f"unset: 1 for {' and '.join(losses_with(lambda loss: loss.sft_weight == 1))}, else 0", "[0, inf)",
        when=_OF_PAIRS, also="sft_loss_ratio pref_ftx rpo_alpha cpo_alpha")
    desirable_weight: float = option(1.0, "weight of desirable answers", "[0, inf)",
        when=_when_read("desirable_weight"), also="kto_desirable_weight kto_chosen_weight")
    undesirable_weight: float = option(1.0, "weight of undesirable answers", "[0, inf)",
        when=_when_read("undesirable_weight"), also="kto_undesirable_weight kto_rejected_weight")
    reference: str | None = option("start",
        "reference model: start: the model before its first step; a folder or hub id of a similar model, or of an "
        "adapter with lora.enabled; None: reference-free", when=_WITH_REFERENCE, also="ref_model reference_free")
    precompute_reference: bool = option(False,
        "compute the reference log-probabilities once, before the first step, and keep them in data.cache_dir: a step "
        "then needs no second forward pass and no copy of the weights",
        when=f"{_WITH_REFERENCE} and preference.reference is not None and preference.reference_update_steps is None")
    reference_update_steps: int | None = option(None,
        "steps between updates of the reference to the current model; an evaluation right after one compares the "
        "model with itself", "steps [1, inf)", when=_WITH_REFERENCE,
        also="ref_model_update_steps ref_model_sync_steps")

    @property
    def properties(self) -> PreferenceLoss:
        """The properties of the loss."""
        return LOSSES[self.loss or ""]


@dataclass(frozen=True)
class DecisionOptions:
    """Decision models: the probability of each option of a question about a state, from one forward pass."""

    loss: Literal["cross_entropy", "brier", "rps"] | None = option(None,
        "proper scoring rule of the options' probabilities; brier: sum of squared errors; rps: ranked probability "
        "score, in which near levels of a score cost less, and brier for other questions; unset: next-token loss",
        basic=True)
    label_tokens: tuple[int, ...] = option((),
        "tokens whose logits score the options: of Yes and No, of 10 levels, and of 20 choices; unset: from the "
        "tokenizer", when="model.head == 'lm'")


_NAMED = r"\s*[\w-]+=.*\S.*"  # NAME=TEACHER


def is_server(teacher: str) -> bool:
    """Whether a value of distill.teacher is the URL of a server."""
    return teacher.startswith(("http://", "https://"))


@dataclass(frozen=True)
class DistillOptions:
    """Distillation: the student learns the teacher's next-token distribution."""

    teacher: str | None = option(None,
        "a larger model with the same tokenizer: Hugging Face folder, hub id or adapter; scores the documents once, "
        "into data.cache_dir: 8 * top_k + 4 bytes a token; with own_answers also base (the student without its "
        "adapters), the URL of a vLLM, or several, NAME=TEACHER with commas between, by the data's column `teacher`",
        when="model.head == 'lm' and preference.loss is None and decision.loss is None and not rollout.rewards",
        basic=True)
    own_answers: float = option(0.0,
        "share of steps in which the student samples answers to the prompts of the data (section rollout), and the "
        "teacher, whose weights stay on the devices, scores these: on-policy distillation, lambda of GKD",
        "fraction [0, 1]", basic=True, also="lmbda")
    divergence: Literal["forward_kl", "reverse_kl", "js"] = option("forward_kl",
        "divergence of teacher p and student q: forward_kl: KL(p||q); reverse_kl: KL(q||p); js: generalised "
        "Jensen-Shannon, between the two (GKD, Agarwal et al. 2024)")
    js_beta: float = option(0.5,
        "teacher's share in the mixture m = js_beta p + (1 - js_beta) q, and weight of KL(p||m) relative to KL(q||m)",
        "(0, 1)", when="distill.divergence == 'js'")
    temperature: float = option(1.0,
        "temperature of both models; as in TRL's GKD, the divergence is not multiplied by its square",
        "(0, inf)")
    top_k: int = option(64, "most likely teacher tokens that are kept; all others count as a single token",
        "tokens [1, inf)")
    weight: float = option(1.0,
        "share of the divergence in the loss; the rest is the cross-entropy of the targets; 1: only the divergence, "
        "because the teacher has seen the targets too", "fraction (0, 1]")

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by name; a single one has the name ''."""
        parts = [part.strip() for part in (self.teacher or "").split(",")]
        if all(re.fullmatch(_NAMED, part) for part in parts):
            return dict(part.split("=", 1) for part in parts)
        return {} if self.teacher is None else {"": self.teacher}


@dataclass(frozen=True)
class RolloutOptions:
    """Training on the model's own completions: Python reward functions score them, or a teacher does."""

    rewards: tuple[str, ...] = option((),
        "reward functions, FILE.py:NAME or MODULE:NAME (the files are run), called as in TRL: f(prompts, completions, "
        "**columns) -> a number each; unset: train on the answers in the data", basic=True)
    reward_weights: tuple[str, ...] = option((), "weights of reward functions; 1 if not named", "NAME=NUMBER",
        when="rollout.rewards")
    tools: tuple[str, ...] = option((),
        "Python functions that the model may call, FILE.py:NAME or MODULE:NAME, as TRL's tools: with type hints, and a "
        "docstring that describes the arguments", when="rollout.rewards")
    environment: str | None = option(None,
        "FILE.py:NAME or MODULE:NAME of a class, or of what TRL takes as environment_factory: reset(**row), tools as "
        "methods, and get_reward(), or step(answer) -> (observation, reward, end); or of an environment of verifiers",
        when="rollout.rewards")
    max_turns: int | None = option(None,
        "most answers of the model in an episode; unset: as many as fit into max_new_tokens", "answers [1, inf)",
        when=_EPISODES)
    call_seconds: float = option(60.0, "time limit for a call of a tool or of an environment's method",
        "seconds (0, inf)", when=_EPISODES)
    group_size: int = option(8, "completions per prompt, which are compared with each other", "completions [2, inf)",
        when="rollout.rewards", basic=True)
    max_new_tokens: int = option(256, "most tokens in a completion, with those that tools and environments write",
        "tokens [1, inf)", basic=True)
    temperature: float = option(1.0, "sampling temperature; with rewards it also divides the logits of the loss",
        "(0, inf)")
    top_p: float = option(1.0, "sample only from the most likely tokens with this total probability", "(0, 1]")
    top_k: int | None = option(None, "sample only from this many most likely tokens", "tokens [1, inf)")
    min_p: float = option(0.0, "sample only tokens with at least this share of the top token's probability", "[0, 1)")
    repetition_penalty: float = option(1.0, "above 1, tokens that already occurred become less likely", "(0, inf)")
    stop: tuple[str, ...] = option((), "texts that end a completion, in addition to the end of a turn or text")
    spare_prompts: int = option(0,
        "further prompts of a step, which replace those whose completions all have the same reward, so that they teach "
        "nothing (DAPO's dynamic sampling); a step passes over those that it does not need", "prompts [0, inf)",
        when="rollout.rewards")
    completions_at_once: int | None = option(None,
        "completions that the devices generate together, which sets the size of the KV cache; `plan` counts it, "
        "memory.check does not; unset: all completions of a step", "completions [1, inf)",
        when="rollout.server is None")
    replay_routing: bool = option(False,
        "mixtures of experts: the update sends each token to the experts that it went to when the completion was "
        "sampled (R3, 2025); their weights are the router's own", when="rollout.rewards")
    server: str | None = option(None,
        "URL of an OpenAI-compatible server, such as vLLM, which receives the adapter, or all weights, and generates "
        "completions; several with commas between them; unset: the devices of the run generate them", basic=True)
    server_seconds: int = option(600, "time limit for a response of the server", "seconds [1, inf)",
        when="rollout.server is not None or distill.own_answers")
    ahead: int = option(0,
        "steps whose completions the server makes while the devices train earlier ones; so they are sampled from "
        "weights that are this many steps old, which rollout.correction corrects", "steps [0, inf)",
        when="rollout.server is not None and rollout.rewards")
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = option(
        None,
        "correction for completions whose probabilities differ between the engine that sampled them and the model: "
        "their ratio weights the loss of each token or completion (sequence), truncated to [correction_min, "
        "correction_max] (TIS), or 0 outside of it (mask: MIS; token_mask: IcePop); unset: sequence_mask with "
        "rollout.server, as in TRL, else none", when="rollout.rewards", also="vllm_importance_sampling_mode")
    correction_max: float | None = option(3.0, "largest ratio of the correction; None: no limit", "(0, inf)",
        when=_CORRECTED, also="vllm_importance_sampling_clip_max vllm_importance_sampling_cap")
    correction_min: float | None = option(None, "smallest ratio of the correction; None: no limit", "(0, inf)",
        when=_CORRECTED, also="vllm_importance_sampling_clip_min")

    @property
    def corrects(self) -> str:
        """The correction that applies; none: no correction."""
        return self.correction or ("sequence_mask" if self.rewards and self.server is not None else "none")


@dataclass(frozen=True)
class GrpoOptions:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and variants: rewards relative to the mean of each prompt."""

    loss: Literal["grpo", "dr_grpo", "dapo", "cispo", "sapo"] = option("dapo",
        "grpo: mean over completions of their token mean; dr_grpo: of their token sum / rollout.max_new_tokens (Dr. "
        "GRPO, 2025); dapo: mean over all tokens of the step (DAPO, 2025), TRL's default; cispo: as dapo, but the "
        "clipped ratio is a weight without gradient (MiniMax-M1, 2025); sapo: as grpo, with a sigmoid of the ratio in "
        "place of clipping (Qwen, 2025)", basic=True)
    importance: Literal["token", "sequence", "product"] = option("token",
        "importance ratio that is clipped: token: of each token; sequence: of each completion, as the geometric mean "
        "of its tokens (GSPO, 2025); product: of each completion, as the product of its tokens (RLOO, 2024)")
    advantage_scale: Literal["group", "batch", "none", "rloo", "gdpo"] = option("group",
        "divisor of advantages (rewards minus their group's mean): the standard deviation of the group, or of all "
        "completions of the step (batch); none: no divisor (Dr. GRPO); rloo: no divisor, and the mean of the other "
        "completions of the group; gdpo: each reward function is scaled by group, then their weighted sum by step")
    clip_low: float = option(0.2,
        "lower clipping range: ratios below 1 - clip_low get no gradient that lowers them further", "fraction [0, 1]",
        when=among("grpo.loss", ("grpo", "dr_grpo", "dapo"), ("cispo", "sapo")))
    clip_high: float | None = option(None,
        "upper clipping range, above 1 + clip_high; for cispo it is about 4; unset: clip_low", "[0, inf)",
        when=among("grpo.loss", ("grpo", "dr_grpo", "dapo", "cispo"), ("sapo",)))
    clip_largest: float | None = option(None,
        "largest ratio of all, which bounds the loss of negative advantages too (two-sided clipping, INTELLECT-2, "
        "2025), such as 4; unset: no limit", "(1, inf)",
        when=among("grpo.loss", ("grpo", "dr_grpo", "dapo"), ("cispo", "sapo")), also="delta")
    off_policy_kl: float | None = option(None,
        "leave out completions with a negative advantage whose mean log-probability has fallen by more than this since "
        "they were sampled (DeepSeek-V3.2, 2025), such as 0.5; unset: none", "nats (0, inf)",
        when=f"grpo.iterations > 1 or {_CORRECTED}", also="off_policy_mask_threshold")
    sapo_positive: float = option(1.0, "steepness of SAPO's sigmoid for advantages above 0", "(0, inf)",
        when="grpo.loss == 'sapo'", also="sapo_temperature_pos")
    sapo_negative: float = option(1.05, "steepness of SAPO's sigmoid for other advantages", "(0, inf)",
        when="grpo.loss == 'sapo'", also="sapo_temperature_neg")
    beta: float = option(0.0, "coefficient of the KL divergence from the model before its first step", "[0, inf)")
    kl: Literal["k1", "k2", "k3"] = option("k3",
        "estimator of this divergence of each token, of the log-ratio r of the reference to the model (Schulman, "
        "2020): k1: -r; k2: r^2 / 2; k3: exp(r) - 1 - r", when="grpo.beta")
    kl_ratio: bool = option(False,
        "multiply the divergence by the importance ratio, so that its gradient is the one of the reverse KL "
        "(DeepSeek-V3.2, 2025), TRL's default", when="grpo.beta", also="use_bias_correction_kl")
    iterations: int = option(1, "optimizer updates with the completions of a step", "updates [1, inf)")
    mask_truncated: bool = option(False, "mask truncated completions out of the loss (DAPO)")
    entropy_share: float = option(1.0,
        "share of a step's sampled tokens that are trained: the ones with the largest entropy of the distribution that "
        "they were sampled from (Wang et al., 2025), such as 0.2; the others keep only the KL divergence",
        "fraction (0, 1]", when="rollout.server is None", also="top_entropy_quantile")


@dataclass(frozen=True)
class MtpOptions:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): modules after the body that predict further tokens."""

    weight: float = option(0.0,
        "weight of the loss of the model's multi-token-prediction modules, a mean over modules, next to the next-token "
        "loss; DeepSeek-V3 took 0.3, then 0.1; 0: modules are not trained, and copied into exports", "[0, inf)",
        also="mtp_loss_scaling_factor mtp_loss_coef mtp_num_layers")
    only: bool = option(False,
        "freeze the body, with embedding and head, and train only the modules, without the next-token loss: for a "
        "higher acceptance in speculative decoding")
# fmt: on


def check_preference(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `preference` with others."""
    options, model = config.preference, config.model
    if options.loss is None:
        return
    if options.precompute_reference and config.data.streaming:
        reason = "scores all answers before the first step, which data.streaming cannot provide"
        yield problem(config, "preference.precompute_reference", reason, "data.streaming")
    of_model = options.properties.samples == "scored pairs"
    if of_model and not (model.head == "classification" and model.num_labels == 1):
        reason = "a reward model outputs one number: set model.head = 'classification' and model.num_labels = 1"
        yield problem(config, "preference.loss", reason, "model.head", "model.num_labels")
    if not of_model and model.head != "lm":
        yield problem(config, "preference.loss", "trains on tokens: set model.head = 'lm'", "model.head")
    if config.data.truncation not in ("auto", "delete"):
        yield problem(config, "data.truncation", "paired answers cannot be cut: choose 'delete'", "preference.loss")
    if options.reference is not None and options.properties.reference:
        of_adapters = ("lora.dropout",) if config.lora.enabled else ()
        for key in (*of_adapters, "train.hidden_dropout", "train.attention_dropout"):
            if value_of(config, key):
                reason = f"has no effect: preference.loss = {options.loss!r} compares with a reference without dropout"
                yield problem(config, key, reason, "preference.loss", moot=True)
    if options.loss == "exo_pair" and not options.label_smoothing:  # its loss has log(label_smoothing)
        yield problem(
            config, "preference.label_smoothing", "exo_pair needs a value above 0, for example 0.001", "preference.loss"
        )
    for key, entry in config.entries() if options.offset_alpha else ():
        if entry.chosen_score_field is None or entry.rejected_score_field is None:
            reason = "preference.offset_alpha needs the scores of both answers: name their columns"
            keys = f"{key}.chosen_score_field", "preference.offset_alpha"
            yield Problem(keys, f"{keys[0]}: {reason}")


def check_decision(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `decision` with others."""
    options, model = config.decision, config.model
    if options.loss is None:
        return
    if config.preference.loss is not None:
        reason = "questions have no chosen and rejected answer; set only one of the two"
        yield problem(config, "decision.loss", reason, "preference.loss")
    if model.head == "classification" and model.num_labels not in (None, HEAD_ROWS):
        reason = f"the head of a decision model has {HEAD_ROWS} rows; leave it out"
        yield problem(config, "model.num_labels", reason, "decision.loss")
    if options.label_tokens and len(options.label_tokens) != HEAD_ROWS:
        reason = f"names {len(options.label_tokens)} tokens; the options of all types have {HEAD_ROWS}"
        yield problem(config, "decision.label_tokens", reason)
    # Two options with the same token would have the same logit.
    elif options.label_tokens and (min(options.label_tokens) < 0 or len({*options.label_tokens}) < HEAD_ROWS):
        reason = "each label has a token of its own, a number from 0 on"
        yield problem(config, "decision.label_tokens", reason)
    for name in (*_unread(config.chat), *(("response_prefix",) if config.chat.response_prefix else ())):
        reason = "has no effect: a question ends where the answer would begin, and none of its tokens is trained"
        yield problem(config, f"chat.{name}", reason, "decision.loss", moot=True)
    if config.data.truncation not in ("auto", "delete"):
        reason = "the answer is read after the last token of a question, which cannot be cut: choose 'delete'"
        yield problem(config, "data.truncation", reason, "decision.loss")


def check_distill(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `distill` with others."""
    options = config.distill
    parts = (options.teacher or "").split(",")
    names = [part.partition("=")[0].strip() for part in parts]
    if len(parts) > 1 and (len(set(names)) < len(names) or not all(re.fullmatch(_NAMED, part) for part in parts)):
        reason = "several teachers are NAME=TEACHER with commas between, each with a name of its own"
        yield problem(config, "distill.teacher", reason)
    if options.own_answers and options.weight < 1:
        reason = "the cross-entropy of answers that the student sampled itself teaches it nothing; leave it at 1"
        yield problem(config, "distill.weight", reason, "distill.own_answers")
    if any(map(is_server, options.teachers.values())):
        if not options.own_answers:
            reason = "a server scores the answers of each step: set distill.own_answers"
            yield problem(config, "distill.teacher", reason, "distill.own_answers")
        if options.temperature != 1:
            reason = "a teacher on a server has probabilities of temperature 1 only"
            yield problem(config, "distill.temperature", reason, "distill.teacher")
    if "base" in options.teachers.values():
        yield from _check_base(config)
    if "" not in options.teachers and options.teachers and not options.own_answers:
        reason = "several teachers score the answers of each step: set distill.own_answers, or name one teacher"
        yield problem(config, "distill.teacher", reason, "distill.own_answers")
    for key, entry in config.entries():
        name = f"{key}.teacher_prompt_field"
        if entry.teacher_prompt_field is not None and options.own_answers < 1:
            reason = "has no effect: the teacher sees another prompt only with distill.own_answers = 1"
            yield Problem((name, "distill.own_answers"), f"{name}: {reason}", moot=True)
        elif entry.teacher_prompt_field is not None and config.mesh.context > 1:
            reason = "not available with mesh.context, which deals the positions of a row to devices"
            yield problem(config, name, reason, "mesh.context")
    if config.teachers and config.data.streaming and not options.own_answers:
        reason = "the teacher scores all documents before the first step, which data.streaming cannot provide"
        key = "serve.distill" if config.serve.distill else "distill.teacher"
        yield problem(config, key, reason, "data.streaming")


def _check_base(config: Config) -> Iterator[Problem]:
    """Yield contradictions of distill.teacher='base' with others."""
    if not (config.distill.own_answers and config.lora.enabled):
        reason = "is the student without its adapters: set lora.enabled and distill.own_answers"
        yield problem(config, "distill.teacher", reason, "lora.enabled", "distill.own_answers")
    for key, plain in (("lora.bias", "none"), ("lora.modules_to_save", ())):
        if config.lora.enabled and value_of(config, key) != plain:
            reason = "trains weights of the base, which is the teacher; leave it out"
            yield problem(config, key, reason, "distill.teacher")


def check_mtp(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `mtp` with others."""
    if not config.mtp.weight:
        return
    reasons = {
        "model.head": "a classifier predicts no tokens",
        "preference.loss": "a preference loss reads whole answers; train modules in a run of next-token loss",
        "decision.loss": "a decision model predicts no further tokens",
        "rollout.rewards": "modules are not trained on sampled completions; train them with mtp.only afterwards",
        "distill.teacher": "a teacher's scores are of the next token only; train modules with mtp.only afterwards",
        "serve.distill": "a teacher's scores are of the next token only; train modules with mtp.only afterwards",
        "mesh.stage": "a pipeline does not run modules after its stages; use mesh.fsdp",
    }
    defaults = {
        "model.head": "lm",
        "preference.loss": None,
        "decision.loss": None,
        "rollout.rewards": (),
        "distill.teacher": None,
        "serve.distill": False,
    }
    for key, reason in reasons.items():
        if value_of(config, key) != defaults.get(key, 1):  # mesh.stage is 1
            yield problem(config, "mtp.weight", f"cannot be combined with {key}: {reason}", key)
    of_body, of_loss = "mtp.only trains nothing of the body", "mtp.only has no next-token loss"
    without = {
        "lora.modules_to_save": ((), of_body),
        "lora.bias": ("none", of_body),
        "train.freeze": (None, of_body),
        "train.z_loss": (0.0, of_loss),
        "train.loss": ("cross_entropy", of_loss),
        "train.label_smoothing": (0.0, of_loss),
    }
    for key, (default, reason) in without.items() if config.mtp.only else ():
        if value_of(config, key) != default:
            yield problem(config, key, f"{reason}; leave it out", "mtp.only")


def check_rollout(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `rollout` with others."""
    options, by = config.rollout, config.samples
    if not by:
        return
    mixed = 0 < config.distill.own_answers < 1  # some steps train on the answers in the data
    if config.sample_type is not None:
        others = (key for key in ("preference.loss", "decision.loss") if value_of(config, key) is not None)
        yield problem(config, by, "trains only on tokens that the model generates", next(others, "model.head"))
    for name in _unread(config.data):
        reason = f"has no effect: with {by} the data is prompts, which are not packed or cut"
        yield problem(config, f"data.{name}", reason, by, moot=True)
    for key, entry in config.entries():
        if mixed and entry.prompt_field is not None:
            reason = "in steps on the answers in the data, the prompt is that of the answer's sample: leave it out"
            yield problem(config, f"{key}.prompt_field", reason, "distill.own_answers")
        if entry.type != "auto":
            reason = f"with {by} samples are prompts: set 'auto'"
            yield problem(config, f"{key}.type", reason, by)
        for name in _unread(entry) if not mixed else ():
            reason = f"has no effect: with {by} a sample is a prompt, in the column prompt_field"
            yield Problem((f"{key}.{name}", by), f"{key}.{name}: {reason}", moot=True)
    for name in _unread(config.chat) if not mixed else ():
        reason = f"has no effect: {by} trains on the model's completions"
        yield problem(config, f"chat.{name}", reason, by, moot=True)
    if "" in options.stop:
        yield problem(config, "rollout.stop", "an empty text would end every completion immediately")
    if options.max_new_tokens >= config.data.seq_len:
        reason = f"leaves no room for prompts in data.seq_len = {config.data.seq_len}"
        yield problem(config, "rollout.max_new_tokens", reason, "data.seq_len")
    if options.ahead and options.corrects == "none":
        reason = "samples from older weights, which must be corrected: leave rollout.correction out, or choose another"
        yield problem(config, "rollout.ahead", reason, "rollout.correction")
    low, high = options.correction_min, options.correction_max
    if options.corrects != "none" and low is not None and high is not None and low >= high:
        yield problem(config, "rollout.correction_min", f"must be below rollout.correction_max = {high:g}")
    if options.corrects.endswith("truncate") and low is None and high is None:
        reason = "truncates nothing without rollout.correction_min and rollout.correction_max"
        yield problem(config, "rollout.correction", reason)
    if config.mesh.stage != 1:
        yield problem(config, by, "not available with mesh.stage: use mesh.fsdp", "mesh.stage")


def _unread(section: Any) -> list[str]:
    """Return the options of a section that are set but that rollouts do not read."""
    unread = [field for field in dataclasses.fields(section) if not field.metadata.get("of_prompts", True)]
    return [field.name for field in unread if getattr(section, field.name) != field.default]
