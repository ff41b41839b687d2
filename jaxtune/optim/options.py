"""The options of section `optim`, and the properties of each optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtune.option_field import Config, Problem, among, option, problem, section, value_of


@dataclass(frozen=True)
class OptimizerRecord:
    """The properties of an optimizer.

    Attributes:
        rule: FILE.FUNCTION in this folder, which returns its rule.
        arguments: the options that the function is called with, in order.
        for_matrices: whether it is only for matrices in the layers, and all else has AdamW; its function also takes the
            dtype of matrix products.
        per_matrix: whether it updates one matrix after another, also in a stack of experts.
        narrow_state: whether it can keep its state in bfloat16, by optim.state_dtype.
        normalised: whether an update moves each weight by about the learning rate, however large its gradient is.
    """

    rule: str
    arguments: tuple[str, ...] = ()
    for_matrices: bool = False
    per_matrix: bool = False
    narrow_state: bool = False
    normalised: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The options that it reads, AdamW's included if it trains a part of the model."""
        return (*self.arguments, *(_ADAM if self.for_matrices else ()))


_ADAM = ("beta1", "beta2", "epsilon")
_MUON = tuple(f"muon.{name}" for name in ("momentum", "nesterov", "ns_steps", "adjust_lr"))
_NORMUON = tuple(f"normuon.{name}" for name in ("momentum", "beta2", "ns_steps", "cautious_wd"))
OPTIMIZERS = {
    "adamw": OptimizerRecord("rules.adamw", _ADAM, narrow_state=True, normalised=True),
    "adamw_8bit": OptimizerRecord("adamw_8bit.adamw_8bit", _ADAM, normalised=True),
    "sgd": OptimizerRecord("rules.sgd", ("beta1",)),
    "adafactor": OptimizerRecord("rules.adafactor", per_matrix=True, normalised=True),
    "lion": OptimizerRecord("rules.lion", ("beta1", "beta2"), narrow_state=True, normalised=True),
    "schedule_free": OptimizerRecord("rules.schedule_free", _ADAM, normalised=True),
    "muon": OptimizerRecord("muon.muon", _MUON, for_matrices=True, narrow_state=True),
    "normuon": OptimizerRecord("muon.normuon", _NORMUON, for_matrices=True, narrow_state=True),
}

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


def _names(has: Callable[[OptimizerRecord], bool]) -> tuple[str, ...]:
    return tuple(name for name, optimizer in OPTIMIZERS.items() if has(optimizer))


def _when_read(name: str) -> str:
    # In reverse order, as users have seen them.
    others = sorted(_names(lambda one: name not in one.reads), reverse=True)
    return among("optim.name", _names(lambda one: name in one.reads), tuple(others))


# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class MuonOptions:
    """Muon (Jordan et al. 2024): momentum of matrices, orthogonalised; AdamW for embeddings, norms, biases and head."""

    learning_rate: float | None = option(None,
        "peak learning rate of the matrices; start_lr and min_lr scale in proportion; unset: optim.learning_rate",
        "(0, inf)")
    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    nesterov: bool = option(True, "use Nesterov momentum")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    adjust_lr: Literal["original", "match_rms_adamw"] = option("original",
        "learning-rate factor of a matrix: original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 * "
        "sqrt(max(rows, columns))")


@dataclass(frozen=True)
class NormuonOptions:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): Muon whose rows are normalised by their second moment."""

    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    beta2: float = option(0.95, "decay of the per-row second moment", "[0, 1)")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    cautious_wd: bool = option(True,
        "apply weight decay only where update and weight have the same sign (arXiv:2510.12402)")


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and learning-rate schedule."""

    name: OptimizerName = option("adamw",
        "optimizer; schedule_free is AdamW without a schedule (Defazio et al. 2024)", basic=True,
        also="optimizer optimizer_name")
    state_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of moments and momentum; bfloat16 uses stochastic rounding",
        when=f"optim.name in {_names(lambda one: one.narrow_state)} or (optim.name == 'sgd' and optim.beta1)")
    learning_rate: float = option(2e-4, "peak learning rate", "(0, inf)", basic=True, also="lr")
    ema_decay: float | None = option(None,
        "per-step decay of an exponential moving average of the trained weights, such as 0.999; the average is "
        "evaluated and exported", "(0, 1)", also="ema_beta")
    schedule: Literal[
        "linear", "cosine", "wsd", "constant", "polynomial", "inverse_sqrt", "cosine_with_restarts"
    ] = option("linear", "shape of the learning rate after warm-up", basic=True,
        also="lr_scheduler lr_scheduler_type scheduler")
    start_lr: float = option(0.0,
        "learning rate of the first step, from which warm-up rises; at 0 that step changes nothing, as in "
        "transformers", "[0, inf)", when="optim.warmup_steps or optim.warmup_ratio")
    warmup_steps: int = option(0, "linear warm-up in steps; for a fraction of all steps use optim.warmup_ratio",
        "steps [0, inf)", basic=True)
    warmup_ratio: float = option(0.0, "linear warm-up as a fraction of all steps; not with warmup_steps",
        "fraction [0, 1]", when="not optim.warmup_steps", basic=True)
    decay_ratio: float = option(1.0, "fraction of all steps after which the final learning rate is reached and kept",
        "fraction (0, 1]", when="optim.schedule in ('linear', 'cosine', 'cosine_with_restarts', 'polynomial')")
    cooldown_steps: int = option(0,
        "last steps, over which the learning rate falls linearly from its current to its final value", "steps [0, inf)")
    final_lr_fraction: float = option(0.0, "final learning rate as a fraction of the peak", "fraction [0, 1]",
        when="optim.min_lr is None and (optim.schedule != 'constant' or optim.cooldown_steps)")
    min_lr: float | None = option(None, "final learning rate; not with final_lr_fraction", "[0, inf)",
        when="optim.schedule != 'constant' or optim.cooldown_steps")
    cycles: float | None = option(None,
        "cosine: waves (unset: 0.5, one descent); cosine_with_restarts: restarts (unset: 1)", "cycles (0, inf)",
        when="optim.schedule in ('cosine', 'cosine_with_restarts')")
    power: float = option(1.0, "exponent of the polynomial schedule", "(0, inf)", when="optim.schedule == 'polynomial'")
    lr_multipliers: tuple[str, ...] = option((), "learning-rate factors by Hugging Face name; the last match counts",
        "REGEX=FACTOR")
    layerwise_lr_decay: float = option(1.0,
        "learning-rate factor for each layer further from the head (Clark et al. 2020)", "(0, 1]")
    layerwise_lr_decay_bound: float = option(1.0,
        "learning-rate factor at the embedding, rising linearly to 1 at the head (ERNIEKit)", "(0, 1]",
        when="optim.layerwise_lr_decay == 1")
    weight_decay: float = option(0.0, "decoupled weight decay", "[0, inf)", basic=True)
    no_decay: str | None = option(None,
        "parameters without weight decay, by Hugging Face name; unset: norms, biases and embeddings; '': none", "regex",
        when="optim.weight_decay")
    decay_multipliers: tuple[str, ...] = option((), "weight-decay factors by Hugging Face name; the last match counts",
        "REGEX=FACTOR", when="optim.weight_decay")
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: no clipping", "[0, inf)", basic=True,
        also="gradient_clipping grad_clip clip_grad_norm")
    beta1: float = option(0.9, "decay of the first moment; momentum of sgd", "[0, 1)", when=_when_read("beta1"),
        also="adam_beta1")
    beta2: float = option(0.999, "decay of the second moment", "[0, 1)", when=_when_read("beta2"), also="adam_beta2")
    epsilon: float = option(1e-8, "added to the square root of the second moment", "(0, inf)",
        when=_when_read("epsilon"), also="adam_epsilon eps")
    muon: MuonOptions = section(MuonOptions(), when="optim.name == 'muon'")
    normuon: NormuonOptions = section(NormuonOptions(), when="optim.name == 'normuon'")

    @property
    def properties(self) -> OptimizerRecord:
        """The properties of the optimizer."""
        return OPTIMIZERS[self.name]
# fmt: on


def check_optim(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `optim` with others."""
    optim, lora = config.optim, config.lora
    only_matrices = lora.enabled and not lora.use_dora and lora.bias == "none" and not lora.modules_to_save
    if optim.properties.for_matrices and only_matrices and config.model.head == "lm":
        reason = f"has no effect: only AdamW reads it, and {optim.name} trains all adapters, which are matrices"
        for moment in _ADAM:
            if getattr(optim, moment) != getattr(type(optim)(), moment):
                yield problem(config, f"optim.{moment}", reason, "optim.name", "lora.enabled", moot=True)
    if optim.name == "schedule_free" and optim.schedule != "constant":
        reason = "schedule_free replaces a schedule; set optim.schedule = 'constant', with or without warm-up"
        yield problem(config, "optim.schedule", reason, "optim.name")
    if optim.name == "schedule_free" and optim.beta1 == 0:
        reason = "schedule_free interpolates with it between the last iterate and the average; must be above 0"
        yield problem(config, "optim.beta1", reason, "optim.name")
    for key in ("optim.start_lr", "optim.min_lr"):
        if (value_of(config, key) or 0) > optim.learning_rate:
            reason = f"must be at most the peak, optim.learning_rate = {optim.learning_rate!r}"
            yield problem(config, key, reason, "optim.learning_rate")
    if 0 < optim.decay_ratio < 1 and optim.warmup_ratio >= optim.decay_ratio:
        reason = f"no decay is left after warm-up; must be above optim.warmup_ratio = {optim.warmup_ratio!r}"
        yield problem(config, "optim.decay_ratio", reason, "optim.warmup_ratio")
    if optim.cooldown_steps and optim.decay_ratio < 1:
        reason = "optim.decay_ratio already reaches the final rate before the end; use only one of the two"
        yield problem(config, "optim.cooldown_steps", reason, "optim.decay_ratio")
    if optim.schedule == "wsd" and optim.cooldown_steps == 0:
        yield problem(config, "optim.cooldown_steps", "'wsd' (warm-up, stable, decay) needs steps to decay")
    if optim.schedule == "cosine_with_restarts" and optim.cycles is not None and optim.cycles % 1:
        reason = "restarts must be a whole number; optim.schedule = 'cosine' allows fractions of a wave"
        yield problem(config, "optim.cycles", reason, "optim.schedule")
