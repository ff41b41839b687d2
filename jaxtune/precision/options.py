"""The options of section `precision`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import Config, Problem, option, problem, section, value_of

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class Fp16Options:
    """Dynamic loss scaling (Micikevicius et al. 2017)."""

    loss_scale: float = option(2.0**15, "initial loss scale; halved when gradients overflow", "[1, 1.7e38]")
    growth_steps: int = option(2000, "steps without overflow after which the loss scale doubles", "steps [1, inf)")


@dataclass(frozen=True)
class Fp8Options:
    """FP8 training: e4m3 weights and activations, e5m2 gradients, one scale per tensor (Micikevicius et al. 2022)."""

    scaling: Literal["delayed", "current"] = option("delayed",
        "delayed: a tensor's scale comes from its amax in earlier steps; current: from its current amax")
    amax_history: int = option(1024, "length of the amax history (delayed)", "steps [1, inf)",
        when="precision.fp8.scaling == 'delayed'")
    online_scale_steps: int = option(0, "first steps that use current scaling (delayed)", "steps [0, inf)",
        when="precision.fp8.scaling == 'delayed'")
    hadamard: bool = option(False, "Hadamard transform in blocks of 16 before rounding, which spreads outliers")


@dataclass(frozen=True)
class Nvfp4Options:
    """NVFP4 training (NVIDIA 2025, arXiv:2509.25149): e2m1 with an e4m3 scale for each block of 16."""

    stochastic_rounding: bool = option(True, "stochastic rounding of gradients")
    hadamard: bool = option(True, "random Hadamard transform of the operands of weight gradients, in blocks of 16",
        when="not lora.enabled")
    four_over_six: bool = option(True, "scale a block to 4 instead of 6 if that lowers its error")


@dataclass(frozen=True)
class PrecisionOptions:
    """Number formats of the computation."""

    recipe: Literal["bf16", "fp32", "fp16", "fp8_hybrid", "nvfp4"] = option("bf16",
        "format of matrix products and activations; fp8_hybrid and nvfp4 apply to the layers' linear layers, the rest "
        "is bf16", basic=True, also="bf16 fp16 fp8 tf32 mixed_precision")
    master_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of the master weights; bfloat16 uses stochastic rounding", when="not lora.enabled")
    gradient_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype in which the gradients of a step are accumulated")
    skip_first_layers: int = option(0, "first layers whose linear layers use the higher precision of precision.exclude",
        "layers [0, inf)", when="precision.recipe != 'fp32'")
    skip_last_layers: int = option(0, "last layers whose linear layers use the higher precision of precision.exclude",
        "layers [0, inf)", when="precision.recipe != 'fp32'")
    exclude: str | None = option(None,
        "linear layers multiplied in bf16 (fp8_hybrid, nvfp4) or float32 (bf16, fp16), by Hugging Face name", "regex",
        when="precision.recipe != 'fp32'")
    fp16: Fp16Options = section(Fp16Options(), when="precision.recipe == 'fp16'")
    fp8: Fp8Options = section(Fp8Options(), when="precision.recipe == 'fp8_hybrid'")
    nvfp4: Nvfp4Options = section(Nvfp4Options(), when="precision.recipe == 'nvfp4'")
# fmt: on


def check_precision(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `precision` with others."""
    precision = config.precision
    if precision.recipe == "fp16":
        stored = ["precision.gradient_dtype", "model.dtype"]
        stored += ["lora.dtype"] if config.lora.enabled else ["precision.master_dtype"]
        for key in stored:
            if value_of(config, key) == "bfloat16":
                better = "'float16' or 'float32'" if key == "model.dtype" else "'float32'"
                reason = (
                    "precision.recipe = 'fp16' computes in float16, more precise than bfloat16 but with less range; "
                    f"set it to {better}, or compute in bfloat16 with precision.recipe = 'bf16'"
                )
                yield problem(config, key, reason, "precision.recipe")
