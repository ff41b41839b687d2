"""The options of section `quant`: block sizes of each format, and the formats of an export."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtune.option_field import Config, Problem, option, problem, value_of

ANY_SIZE = "a number of elements, 2 or more"

# The values of quant.block_size by quant.format: elements of a block, or what has one scale.
BLOCK_SIZES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("nf4", "fp4"), (64, 128, 256, 512)),
    "fp8": (64, 128, 256, "channel", "tensor"),
    "nvfp4": (16,),
    "mxfp4": (32,),
    **dict.fromkeys(("int8", "int4", "weight_only_mix"), ("channel", ANY_SIZE)),
}

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class QuantOptions:
    """Frozen 4- or 8-bit base weights under LoRA (QLoRA, Dettmers et al. 2023), except the embedding and the head."""

    format: Literal["nf4", "fp4", "fp8", "nvfp4", "mxfp4", "int8", "int4", "weight_only_mix"] | None = option(None,
        "format of the linear layers' weights; unset: model.dtype, or the format of a quantized checkpoint", basic=True,
        also="load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type")
    block_size: Literal["channel", "tensor"] | int | None = option(None,
        "weights per scale: nf4, fp4: 64 (unset), 128, 256 or 512; fp8: squares of 64, 128 (unset) or 256, 'channel' "
        "(a row) or 'tensor'; int8, int4: 'channel' (unset) or a number; nvfp4: 16; mxfp4: 32")
    double_quant: bool = option(True, "nf4, fp4: quantize the scales too, to 8 bits",
        when="quant.format in ('nf4', 'fp4')", also="bnb_4bit_use_double_quant double_quantization")
    four_over_six: bool = option(True, "nvfp4: scale a block to 4 instead of 6 if that lowers its error",
        when="quant.format == 'nvfp4'")
    skip_first_layers: int = option(0, "first layers that are not quantized", "layers [0, inf)")
    skip_last_layers: int = option(0, "last layers that are not quantized", "layers [0, inf)")
    exclude: str | None = option(None, "linear layers that are not quantized, by Hugging Face name", "regex")
    noise: float = option(0.0,
        "standard deviation of noise added each step to the norms before quantized layers, for exploration, such as "
        "0.01 (AQN of QeRL, 2025); it falls with the learning rate", "[0, inf)")


@dataclass(frozen=True)
class ServeOptions:
    """Quantization-aware training: the model is trained as it will be served, with quantized linear layers.

    The forward pass multiplies by the quantized weights, adapters merged first; gradients pass straight through the
    rounding. An export with --quantize has the codes of the last step.
    """

    format: Literal["nf4", "fp8", "nvfp4", "mxfp4", "int4", "int8"] | None = option(None,
        "the format in which the model will be exported and served (--quantize)", basic=True,
        also="qat quantization_aware_training quantizer")
    block_size: Literal[32, 64, 128] = option(128, "int4: weights of a row that share a scale",
        when="serve.format == 'int4'")
    activations: Literal["fp8"] | None = option(None,
        "fp8: round the inputs of the quantized layers too, with a scale for each token and each 128 features, as "
        "servers do with this layout", when="serve.format == 'fp8'")
    start_step: int = option(0,
        "first steps that multiply by the unquantized weights; evaluation is always of the quantized model",
        "steps [0, inf)")
    distill: bool = option(False,
        "learn from the unquantized model that the run starts from, as by distill.teacher, instead of from the targets",
        when="distill.teacher is None and model.head == 'lm' and preference.loss is None and decision.loss is None and "
        "not rollout.rewards")
# fmt: on


# By the name of their quant.format: in the blocks that most such files have, and nf4 with float32 scales.
SCHEMES = {
    "nf4": QuantOptions(format="nf4", block_size=64, double_quant=False),
    "fp8": QuantOptions(format="fp8", block_size=128),
    "nvfp4": QuantOptions(format="nvfp4", block_size=16),
    "mxfp4": QuantOptions(format="mxfp4", block_size=32),
    "int4": QuantOptions(format="int4", block_size=128),
    "int8": QuantOptions(format="int8", block_size="channel"),
}


def served_as(serve: ServeOptions, kind: str | None = None) -> QuantOptions:
    """Return the options of the format in which a model is trained to be served, or of an export in format `kind`.

    An export in the format of training has its blocks.
    """
    kind = kind or serve.format
    assert kind is not None
    return replace(SCHEMES[kind], block_size=serve.block_size) if kind == serve.format == "int4" else SCHEMES[kind]


def check_serve(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `serve` with others."""
    if config.serve.format is None:
        return
    refused = {
        "precision.recipe": config.precision.recipe in ("fp8_hybrid", "nvfp4"),
        # Only the gradient of a low-rank product needs no gradient of the whole weight.
        "lora.kind": config.lora.kind != "lora",
        "lora.use_dora": config.lora.use_dora,
        "lora.dropout": config.lora.dropout > 0,
        "lora.merge_interval": bool(config.lora.merge_interval),
        "memory.offload_master": config.memory.offload_master,
        "memory.offload_quants": config.memory.offload_quants,
        "memory.offload_gradients": config.memory.offload_gradients,
        "mesh.stage": config.mesh.stage != 1,
        # transformers loads JevForDecision in full precision.
        "model.head": config.decision.loss is not None and config.model.head == "classification",
        "rollout.server": config.rollout.server is not None,  # it has the adapter, but not the quantized weights
    }
    for key, is_so in refused.items():
        if is_so:
            reason = f"not available with {key} = {value_of(config, key)!r} yet; leave out one of the two"
            yield problem(config, "serve.format", reason, key)
    if config.serve.distill and config.model.from_scratch:
        reason = "a model of random weights teaches nothing; train it first, and quantize the result"
        yield problem(config, "serve.distill", reason, "model.from_scratch")
    if config.serve.distill and config.ckpt.start is not None:
        reason = "the teacher would be model.path, not the checkpoint; start from its export (model.path)"
        yield problem(config, "serve.distill", reason, "ckpt.start")
    if config.serve.distill and config.data.special_tokens:
        reason = "the unquantized model does not have these tokens; train with them first, and quantize the result"
        yield problem(config, "serve.distill", reason, "data.special_tokens")
    if config.serve.start_step and config.samples:
        reason = "not available when the model samples answers to train on, which it does quantized; leave it out"
        yield problem(config, "serve.start_step", reason, config.samples)


def check_quant(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `quant` with others."""
    quant = config.quant
    if quant.format is None:
        return
    if not config.lora.enabled:
        reason = "quantized weights are frozen; train adapters on them with lora.enabled = True"
        yield problem(config, "quant.format", reason, "lora.enabled")
    sizes, size = BLOCK_SIZES[quant.format], quant.block_size
    if size is not None and size not in sizes and not (ANY_SIZE in sizes and isinstance(size, int) and size > 1):
        reason = f"quant.format = {quant.format!r} supports {' or '.join(map(str, sizes))}"
        yield problem(config, "quant.block_size", reason, "quant.format")
