"""Combinations of options that cannot work, and options that could have no effect: found before anything is read."""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtune.config.keys import options
from jaxtune.config.schema import Config, Dataset


@dataclass(frozen=True)
class Problem:
    """One line of the error a user sees, and the keys it is about."""

    keys: tuple[str, ...]
    text: str


_AT_LEAST = {
    "data.seq_len": 2,
    "data.seed": 0,
    "train.max_steps": 1,
    "train.micro_batch_size": 1,
    "train.grad_accum_steps": 1,
    "train.seed": 0,
    "train.max_bad_steps": 1,
    "train.z_loss": 0,
    "optim.warmup_steps": 0,
    "optim.cooldown_steps": 0,
    "optim.start_lr": 0,
    "optim.min_lr": 0,
    "optim.weight_decay": 0,
    "optim.max_grad_norm": 0,
    "optim.muon.ns_steps": 1,
    "optim.normuon.ns_steps": 1,
    "lora.rank": 1,
    "quant.skip_first_layers": 0,
    "quant.skip_last_layers": 0,
    "precision.skip_first_layers": 0,
    "precision.skip_last_layers": 0,
    "precision.fp16.loss_scale": 1,
    "precision.fp16.growth_steps": 1,
    "precision.fp8.amax_history": 1,
    "precision.fp8.online_scale_steps": 0,
    "ckpt.save_steps": 0,
    "ckpt.keep_last": 1,
    "eval.steps": 0,
    "eval.max_batches": 1,
    "log.every": 1,
    "prof.start_step": 1,
    "prof.steps": 1,
    "export.max_shard_bytes": 1,
}
_ABOVE_ZERO = (
    "train.epochs",
    "optim.learning_rate",
    "optim.cycles",
    "optim.power",
    "optim.epsilon",
    "optim.muon.learning_rate",
    "lora.alpha",
)
_FRACTION = ("optim.warmup_ratio", "optim.final_lr_fraction")  # 1 is possible
_SHARE = (  # 0 would leave nothing
    "optim.decay_ratio",
    "optim.layerwise_lr_decay",
    "optim.layerwise_lr_decay_bound",
)
_PART = (  # 1 would leave nothing
    "data.validation_split",
    "optim.beta1",
    "optim.beta2",
    "optim.muon.momentum",
    "optim.normuon.momentum",
    "optim.normuon.beta2",
    "lora.dropout",
)

# What of beta1, beta2 and epsilon an optimizer has, where not all; muon and normuon have them for AdamW's part.
_MOMENTS = {"sgd": ("beta1",), "lion": ("beta1", "beta2"), "adafactor": ()}
_DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
# Why an optimizer's state is in a format of its own.
_OWN_STATE = {
    "adamw_8bit": "adamw_8bit keeps its moments in 8 bits",
    "adafactor": "adafactor keeps the second moment of rows and columns, which is small already",
    "schedule_free": "schedule_free trains its state itself, which bfloat16 is too coarse for",
}

# Options of a dataset that only some types read.
_READ_BY = {
    "text_field": ("text",),
    "instruction_field": ("instruction",),
    "input_field": ("instruction",),
    "output_field": ("instruction",),
    "system_field": ("instruction",),
    "prompt_format": ("instruction",),
    "prompt_format_no_input": ("instruction",),
    "system_prompt": ("instruction", "conversation"),
    "messages_field": ("conversation",),
    "tools_field": ("conversation",),
}


def check(config: Config) -> list[Problem]:
    """Every problem of a config whose types are right."""
    parts = (_ranges, _model, _data, _train, _optim, _multipliers, _precision, _lora, _quant, _mesh, _outputs)
    return [problem for part in parts for problem in part(config)]


def _ranges(config: Config) -> Iterator[Problem]:
    for key, least in _AT_LEAST.items():
        value = _value(config, key)
        if value is not None and value < least:
            yield _problem(config, key, f"must be at least {least}")
    for key in _ABOVE_ZERO:
        value = _value(config, key)
        if value is not None and value <= 0:
            yield _problem(config, key, "must be above 0")
    for key in _FRACTION:
        if not 0 <= _value(config, key) <= 1:
            yield _problem(config, key, "must be from 0 to 1")
    for key in _SHARE:
        if not 0 < _value(config, key) <= 1:
            yield _problem(config, key, "must be above 0 and at most 1")
    for key in _PART:
        if not 0 <= _value(config, key) < 1:
            yield _problem(config, key, "must be at least 0 and below 1")


def _model(config: Config) -> Iterator[Problem]:
    if not config.model.path:
        yield _problem(config, "model.path", "must name a Hugging Face folder or hub id")


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if not data.datasets:
        yield _problem(config, "data.datasets", "no training data; add an entry: jaxtune.config.dataset(path=...)")
    for name in ("datasets", "eval_datasets"):
        for i, entry in enumerate(getattr(data, name)):
            yield from _dataset(entry, f"data.{name}[{i}]")
    if data.eval_datasets and data.validation_split > 0:
        reason = "data.eval_datasets is the validation data already; use one of the two"
        yield _problem(config, "data.validation_split", reason, "data.eval_datasets")
    if not data.eval_datasets and data.validation_split == 0:
        reason = "no validation data; set data.validation_split or data.eval_datasets"
        for key in ("eval.steps", "eval.max_batches"):
            yield from _without_effect(config, key, reason, "data.validation_split", "data.eval_datasets")


def _dataset(entry: Dataset, key: str) -> Iterator[Problem]:
    if not entry.path:
        yield Problem((f"{key}.path",), f"{key}.path = {entry.path!r}: must name a file, folder, or hub id")
    if entry.samples is not None and entry.samples < 1:
        yield Problem((f"{key}.samples",), f"{key}.samples = {entry.samples}: must be at least 1")
    if entry.prompt_format_no_input is not None and entry.prompt_format is None:
        keys = (f"{key}.prompt_format_no_input", f"{key}.prompt_format")
        yield Problem(keys, f"{keys[0]} has no effect without prompt_format")
    defaults = Dataset()
    for name, types in _READ_BY.items():
        if entry.type not in ("auto", *types) and getattr(entry, name) != getattr(defaults, name):
            text = f"{key}.{name} has no effect: type {entry.type!r} does not read it, {' and '.join(types)} does"
            yield Problem((f"{key}.{name}", f"{key}.type"), text)


def _train(config: Config) -> Iterator[Problem]:
    name = config.train.run_name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\\" in name):
        yield _problem(config, "train.run_name", "must be the name of a folder; train.output_dir says where it is")
    if config.train.max_steps is not None:
        reason = "train.max_steps decides; take it out with --config.train.max_steps=None"
        yield from _without_effect(config, "train.epochs", reason, "train.max_steps")
    if config.train.freeze is not None:
        yield from _regex(config, "train.freeze")


def _optim(config: Config) -> Iterator[Problem]:
    yield from _schedule(config)
    optim = config.optim
    name = f"optim.name = {optim.name!r}"
    for section in ("muon", "normuon"):
        if optim.name != section:
            yield from _section_without_effect(config, f"optim.{section}", name, "optim.name")
    for moment in ("beta1", "beta2", "epsilon"):
        if moment not in _MOMENTS.get(optim.name, (moment,)):
            yield from _without_effect(config, f"optim.{moment}", f"{optim.name} has none", "optim.name")
    if optim.name in ("muon", "normuon") and config.lora.enabled:
        reason = f"adapters are matrices, which {optim.name} trains; it is AdamW's, for the rest"
        for moment in ("beta1", "beta2", "epsilon"):
            yield from _without_effect(config, f"optim.{moment}", reason, "optim.name", "lora.enabled")
    if optim.name in _OWN_STATE:
        reason = f"{_OWN_STATE[optim.name]}; leave it out, or choose another optim.name"
        yield from _without_effect(config, "optim.state_dtype", reason, "optim.name")
    if optim.name == "sgd" and optim.beta1 == 0:
        reason = "sgd without momentum (optim.beta1 is 0) has no state"
        yield from _without_effect(config, "optim.state_dtype", reason, "optim.name", "optim.beta1")
    if optim.name == "schedule_free":
        if optim.schedule != "constant":
            reason = (
                "schedule_free takes the place of a schedule; set optim.schedule = 'constant', with or without warm-up"
            )
            yield _problem(config, "optim.schedule", reason, "optim.name")
        if optim.beta1 == 0:
            reason = "schedule_free takes gradients this far from the last point to the average; must be above 0"
            yield _problem(config, "optim.beta1", reason, "optim.name")


def _schedule(config: Config) -> Iterator[Problem]:
    optim = config.optim
    schedule = f"optim.schedule = {optim.schedule!r}"
    if optim.warmup_steps and optim.warmup_ratio:
        reason = "optim.warmup_steps says the same in steps; use one of the two"
        yield _problem(config, "optim.warmup_ratio", reason, "optim.warmup_steps")
    if not optim.warmup_steps and not optim.warmup_ratio:
        reason = "warm-up starts from it, and there is none; set optim.warmup_steps or optim.warmup_ratio"
        yield from _without_effect(config, "optim.start_lr", reason, "optim.warmup_steps", "optim.warmup_ratio")
    for key in ("optim.start_lr", "optim.min_lr"):
        if (_value(config, key) or 0) > optim.learning_rate:
            reason = f"must be at most the peak, optim.learning_rate = {optim.learning_rate!r}"
            yield _problem(config, key, reason, "optim.learning_rate")
    if optim.min_lr is not None and optim.final_lr_fraction:
        reason = "optim.final_lr_fraction says the same as a part of the peak; use one of the two"
        yield _problem(config, "optim.min_lr", reason, "optim.final_lr_fraction")
    if optim.schedule not in _DECAYING:
        reason = f"{schedule} has no decay from warm-up on, only {_quoted(_DECAYING)} have"
        yield from _without_effect(config, "optim.decay_ratio", reason, "optim.schedule")
    elif 0 < optim.decay_ratio < 1 and optim.warmup_ratio >= optim.decay_ratio:
        reason = f"nothing is left after warm-up; must be above optim.warmup_ratio = {optim.warmup_ratio!r}"
        yield _problem(config, "optim.decay_ratio", reason, "optim.warmup_ratio")
    if optim.schedule == "linear" or (optim.schedule == "polynomial" and optim.power == 1):
        reason = f"{schedule} goes straight to the final rate from warm-up on; leave it out"
        yield from _without_effect(config, "optim.cooldown_steps", reason, "optim.schedule")
    elif optim.cooldown_steps and optim.decay_ratio < 1:
        reason = "optim.decay_ratio says that the final rate is reached before the end; use one of the two"
        yield _problem(config, "optim.cooldown_steps", reason, "optim.decay_ratio")
    if optim.schedule == "wsd" and optim.cooldown_steps == 0:
        yield _problem(config, "optim.cooldown_steps", "'wsd' (warm-up, stable, decay) needs steps to decay")
    if optim.schedule == "constant" and optim.cooldown_steps == 0:
        reason = f"{schedule} stays at the peak without optim.cooldown_steps"
        for key in ("optim.final_lr_fraction", "optim.min_lr"):
            yield from _without_effect(config, key, reason, "optim.cooldown_steps", "optim.schedule")
    if optim.schedule not in ("cosine", "cosine_with_restarts"):
        reason = f"{schedule}; only 'cosine' and 'cosine_with_restarts' have cycles"
        yield from _without_effect(config, "optim.cycles", reason, "optim.schedule")
    if optim.schedule == "cosine_with_restarts" and optim.cycles is not None and optim.cycles % 1:
        reason = "restarts are counted in whole numbers; optim.schedule = 'cosine' can have parts of a wave"
        yield _problem(config, "optim.cycles", reason, "optim.schedule")
    if optim.schedule != "polynomial":
        yield from _without_effect(
            config, "optim.power", f"{schedule}; only 'polynomial' has a power", "optim.schedule"
        )


def _multipliers(config: Config) -> Iterator[Problem]:
    for key in ("optim.lr_multipliers", "optim.decay_multipliers"):
        for entry in _value(config, key):
            pattern, equals, factor = entry.rpartition("=")
            if not equals or not pattern or not _is_factor(factor):
                reason = f"{entry!r} is not 'REGEX=FACTOR' with a factor of 0 or more, such as 'embed_tokens=0.1'"
                yield _problem(config, key, reason)
            else:
                yield from _regex(config, key, pattern)
    if config.optim.layerwise_lr_decay < 1 and config.optim.layerwise_lr_decay_bound < 1:
        reason = "optim.layerwise_lr_decay says the same as a factor for each layer; use one of the two"
        yield _problem(config, "optim.layerwise_lr_decay_bound", reason, "optim.layerwise_lr_decay")
    if config.optim.weight_decay == 0:
        for key in ("optim.no_decay", "optim.decay_multipliers"):
            yield from _without_effect(config, key, "optim.weight_decay is 0", "optim.weight_decay")
    if config.optim.no_decay is not None:
        yield from _regex(config, "optim.no_decay")


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _precision(config: Config) -> Iterator[Problem]:
    precision = config.precision
    recipe = f"precision.recipe = {precision.recipe!r}"
    for section, needed in (("fp16", "fp16"), ("fp8", "fp8_hybrid"), ("nvfp4", "nvfp4")):
        if precision.recipe != needed:
            reason = f"{recipe}; only {needed!r} reads it"
            yield from _section_without_effect(config, f"precision.{section}", reason, "precision.recipe")
    if precision.fp8.scaling == "current":
        reason = "precision.fp8.scaling = 'current' looks at no earlier step; only 'delayed' does"
        for key in ("precision.fp8.amax_history", "precision.fp8.online_scale_steps"):
            yield from _without_effect(config, key, reason, "precision.fp8.scaling")
    if precision.recipe == "fp32":
        reason = f"{recipe} computes everything in float32"
        for key in ("precision.skip_first_layers", "precision.skip_last_layers", "precision.exclude"):
            yield from _without_effect(config, key, reason, "precision.recipe")
    if precision.exclude is not None:
        yield from _regex(config, "precision.exclude")
    if precision.recipe == "nvfp4" and config.lora.enabled:
        reason = "it is of gradients of weights, and under adapters these have none"
        yield from _without_effect(config, "precision.nvfp4.hadamard", reason, "lora.enabled")
    if precision.fp16.loss_scale > 2.0**127:
        yield _problem(config, "precision.fp16.loss_scale", "must be at most 2**127, float32 ends there")
    if precision.recipe == "fp16":
        stored = ["precision.gradient_dtype", "model.dtype"]
        stored += ["lora.dtype"] if config.lora.enabled else ["precision.master_dtype"]
        for key in stored:
            if _value(config, key) == "bfloat16":
                better = "'float16' or 'float32'" if key == "model.dtype" else "'float32'"
                reason = (
                    "precision.recipe = 'fp16' computes in float16, which is finer than bfloat16 and has less range; "
                    f"set it to {better}, or compute in bfloat16 with precision.recipe = 'bf16'"
                )
                yield _problem(config, key, reason, "precision.recipe")


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.lora
    if not lora.enabled:
        yield from _section_without_effect(config, "lora", "lora.enabled is False", "lora.enabled")
        return
    if config.model.from_scratch:
        reason = (
            "adapters on random weights learn nothing; train the whole model (lora.enabled = False) or load weights"
        )
        yield _problem(config, "model.from_scratch", reason, "lora.enabled")
    if config.train.freeze is not None:
        reason = "lora.enabled freezes the model already; lora.target_modules chooses what gets an adapter"
        yield _problem(config, "train.freeze", reason, "lora.enabled")
    reason = "adapters have lora.dtype and nothing else is trained"
    yield from _without_effect(config, "precision.master_dtype", reason, "lora.enabled")
    if not lora.target_modules:
        yield _problem(config, "lora.target_modules", "must name at least one module, or be 'all-linear'")
    elif isinstance(lora.target_modules, str):
        yield from _regex(config, "lora.target_modules")


def _quant(config: Config) -> Iterator[Problem]:
    quant = config.quant
    if quant.format is None:
        yield from _section_without_effect(config, "quant", "quant.format is not set", "quant.format")
        return
    if not config.lora.enabled:
        reason = "quantized weights are frozen; train adapters on them with lora.enabled = True"
        yield _problem(config, "quant.format", reason, "lora.enabled")
    from jaxtune.quant import ANY_SIZE, format_module  # jax only for a config that asks for it

    format = format_module(quant.format)
    sizes, size = format.BLOCK_SIZES, quant.block_size
    if size is not None and size not in sizes and not (ANY_SIZE in sizes and isinstance(size, int) and size > 1):
        reason = f"quant.format = {quant.format!r} can have {' or '.join(map(str, sizes))}"
        yield _problem(config, "quant.block_size", reason, "quant.format")
    for name in ("double_quant", "four_over_six"):
        if name not in format.OPTIONS:
            yield from _without_effect(config, f"quant.{name}", f"{quant.format} does not read it", "quant.format")
    if quant.exclude is not None:
        yield from _regex(config, "quant.exclude")


def _mesh(config: Config) -> Iterator[Problem]:
    axes = {field.name: getattr(config.mesh, field.name) for field in dataclasses.fields(config.mesh)}
    for axis, size in axes.items():
        if axis in ("stage", "expert", "sequence"):
            if size != 1:
                yield _problem(config, f"mesh.{axis}", "not available yet, must be 1; data, fsdp and tensor work")
        elif size < 1 and size != -1:
            yield _problem(config, f"mesh.{axis}", "must be at least 1, or -1 for what is left")
    rest = [f"mesh.{axis}" for axis, size in axes.items() if size == -1 and axis in ("data", "fsdp", "tensor")]
    if len(rest) > 1:
        yield Problem(tuple(rest), f"{' and '.join(rest)} are -1: only one axis can take what is left")


def _outputs(config: Config) -> Iterator[Problem]:
    if isinstance(config.ckpt.resume, int) and config.ckpt.resume < 0:
        yield _problem(config, "ckpt.resume", "must be 'auto', 'never', or a step")
    if not config.log.wandb.enabled:
        yield from _section_without_effect(config, "log.wandb", "log.wandb.enabled is False", "log.wandb.enabled")
    if not config.prof.enabled:
        yield from _section_without_effect(config, "prof", "prof.enabled is False", "prof.enabled")


def _section_without_effect(config: Config, section: str, reason: str, *others: str) -> Iterator[Problem]:
    """Options of a section that nothing reads, changed nevertheless."""
    for field in dataclasses.fields(_value(config, section)):
        yield from _without_effect(config, f"{section}.{field.name}", reason, *others)


def _without_effect(config: Config, key: str, reason: str, *others: str) -> Iterator[Problem]:
    """The problem of an option that was changed from its default and could not take effect."""
    if _value(config, key) != options()[key].default:
        yield _problem(config, key, f"has no effect: {reason}", *others)


def _regex(config: Config, key: str, pattern: str | None = None) -> Iterator[Problem]:
    try:
        re.compile(_value(config, key) if pattern is None else pattern)
    except re.error as error:
        yield _problem(config, key, f"no regular expression: {error}")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names[:-1])) + f" and {names[-1]!r}"


def _value(config: Config, key: str) -> Any:
    return operator.attrgetter(key)(config)


def _problem(config: Config, key: str, reason: str, *others: str) -> Problem:
    return Problem((key, *others), f"{key} = {_value(config, key)!r}: {reason}")
