"""The options of section `optim`."""

from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import option, section

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

    name: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon"] = option(
        "adamw", "optimizer; schedule_free is AdamW without a schedule (Defazio et al. 2024)", basic=True)
    state_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of moments and momentum; bfloat16 uses stochastic rounding",
        when="optim.name in ('adamw', 'lion', 'muon', 'normuon') or (optim.name == 'sgd' and optim.beta1)")
    learning_rate: float = option(2e-4, "peak learning rate", "(0, inf)", basic=True)
    ema_decay: float | None = option(None,
        "per-step decay of an exponential moving average of the trained weights, such as 0.999; the average is "
        "evaluated and exported", "(0, 1)")
    schedule: Literal[
        "linear", "cosine", "wsd", "constant", "polynomial", "inverse_sqrt", "cosine_with_restarts"
    ] = option("linear", "shape of the learning rate after warm-up", basic=True)
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
        "parameters without weight decay, by Hugging Face name; unset: norms, biases and embeddings", "regex",
        when="optim.weight_decay")
    decay_multipliers: tuple[str, ...] = option((), "weight-decay factors by Hugging Face name; the last match counts",
        "REGEX=FACTOR", when="optim.weight_decay")
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: no clipping", "[0, inf)", basic=True)
    beta1: float = option(0.9, "decay of the first moment; momentum of sgd", "[0, 1)", when="optim.name != 'adafactor'")
    beta2: float = option(0.999, "decay of the second moment", "[0, 1)", when="optim.name not in ('sgd', 'adafactor')")
    epsilon: float = option(1e-8, "added to the square root of the second moment", "(0, inf)",
        when="optim.name not in ('sgd', 'lion', 'adafactor')")
    muon: MuonOptions = section(MuonOptions(), when="optim.name == 'muon'")
    normuon: NormuonOptions = section(NormuonOptions(), when="optim.name == 'normuon'")
