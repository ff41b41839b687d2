"""Find options that contradict each other, before any file is read. Rules for a single option are in `rules`."""

import dataclasses
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

from jaxtune.config.option_rules import Problem, find_broken_rules
from jaxtune.config.schema import MESSAGE_SELECTIONS, TEXT_WEIGHTINGS, ChatOptions, Config
from jaxtune.quant.options import ANY_SIZE, BLOCK_SIZES

PER_MATRIX_OPTIMIZERS = (
    "adafactor",
    "muon",
    "normuon",
)  # optimizers that process a stack of experts one matrix at a time


def check(config: Config) -> list[Problem]:
    """Return every problem of a config whose types are correct."""
    parts = (
        find_broken_rules,
        _data,
        _task,
        _classification,
        _preference,
        _distill,
        _rollout,
        _chat,
        _train,
        _ckpt,
        _attention,
        _optim,
        _precision,
        _lora,
        _quant,
        _mesh,
        _memory,
    )
    return [problem for part in parts for problem in part(config)]


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if not config.model.path:
        yield _problem(config, "model.path", "must name a Hugging Face folder or hub id")
    if not data.datasets:
        yield _problem(config, "data.datasets", "no training data; add an entry: jaxtune.config.dataset(path=...)")
    for name in ("datasets", "eval_datasets"):
        for i, entry in enumerate(getattr(data, name)):
            if not entry.path:
                key = f"data.{name}[{i}].path"
                yield Problem((key,), f"{key} = {entry.path!r}: must name a file, folder, or hub id")
            key = f"data.{name}[{i}]"
            if entry.path == "dummy" and entry.samples is None:
                text = f"{key}.samples: path='dummy' is endless; set the number of samples"
                yield Problem((f"{key}.samples", f"{key}.path"), text)
            if entry.name is not None and (name == "datasets" or config.rollout.rewards):
                reason = "only entries of data.eval_datasets are evaluated separately"
                if config.rollout.rewards:
                    reason = "completions are rewarded together (rollout.rewards)"
                yield Problem((f"{key}.name",), f"{key}.name: has no effect: {reason}", moot=True)
            elif entry.name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", entry.name):
                text = f"{key}.name = {entry.name!r}: is part of a metric's name: use letters, digits and _.-"
                yield Problem((f"{key}.name",), text)
            if entry.shards is not None and (entry.shard_idx is None or entry.shard_idx >= entry.shards):
                reason = f"must be one of the parts, 0 to {entry.shards - 1}"
                yield Problem((f"{key}.shard_idx", f"{key}.shards"), f"{key}.shard_idx = {entry.shard_idx}: {reason}")
        weighted = [entry.weight is not None for entry in getattr(data, name)]
        if any(weighted):
            key = f"data.{name}[{weighted.index(True)}].weight"
            if data.mixing == "concat":
                reason = "has no effect: data.mixing = 'concat' takes all of each dataset"
                yield Problem((key, "data.mixing"), f"{key}: {reason}", moot=True)
            elif data.mixing_temperature is not None:
                yield Problem((key, "data.mixing_temperature"), f"{key}: not with data.mixing_temperature")
            elif not all(weighted):
                key = f"data.{name}[{weighted.index(False)}].weight"
                yield Problem((key,), f"{key} = None: other datasets have a weight; give one to each, or to none")
    if data.streaming and data.validation_split and not data.eval_datasets:
        reason = "has no effect: a stream has no held-out part; set data.eval_datasets"
        yield _problem(config, "data.validation_split", reason, "data.streaming", moot=True)
    if data.streaming and config.train.max_steps is None:
        yield _problem(config, "train.max_steps", "data.streaming is endless; set the number of steps")
    if data.validation_split >= 1 and data.validation_split % 1:
        yield _problem(config, "data.validation_split", "must be a whole number of documents, or a fraction below 1")
    if data.packing and data.packing_method == "first_fit_decreasing" and (not data.shuffle or data.shuffle_each):
        key, value = ("data.shuffle_each", True) if data.shuffle else ("data.shuffle", False)
        reason = f"sorts documents by length, but {key} = {value} keeps their order; choose 'sequential'"
        yield _problem(config, "data.packing_method", reason, key)


def _task(config: Config) -> Iterator[Problem]:
    """Yield problems of entries whose type belongs to another task."""
    # The sample type follows from preference.loss or model.head; None means that 'auto' may choose.
    wanted = config.sample_type
    of_classifier = {
        None: "labels need model.head = 'classification'",
        "classification": "model.head = 'classification' needs type='classification', with a label in target_column",
    }
    for name in ("datasets", "eval_datasets"):
        for i, entry in enumerate(getattr(config.data, name)):
            key = f"data.{name}[{i}].type"
            if wanted in ("preference", "unpaired_preference"):
                if entry.type not in ("auto", wanted):
                    reason = f"preference.loss = {config.preference.loss!r} needs type {wanted!r}"
                    yield Problem((key, "preference.loss"), f"{key} = {entry.type!r}: {reason}")
            elif entry.type in ("preference", "unpaired_preference"):
                reason = "needs preference.loss, for example 'sigmoid' (DPO) or 'kto'"
                yield Problem((key, "preference.loss"), f"{key} = {entry.type!r}: {reason}")
            elif (entry.type == "classification") != (wanted == "classification"):
                yield Problem((key, "model.head"), f"{key} = {entry.type!r}: {of_classifier[wanted]}")


def _preference(config: Config) -> Iterator[Problem]:
    options, model = config.preference, config.model
    if options.loss is None:
        return
    if options.precompute_reference and config.data.streaming:
        reason = "scores all answers before the first step, which data.streaming cannot provide"
        yield _problem(config, "preference.precompute_reference", reason, "data.streaming")
    if options.loss == "bradley_terry" and not (model.head == "classification" and model.num_labels == 1):
        reason = "a reward model outputs one number: set model.head = 'classification' and model.num_labels = 1"
        yield _problem(config, "preference.loss", reason, "model.head", "model.num_labels")
    if options.loss != "bradley_terry" and model.head != "lm":
        yield _problem(config, "preference.loss", "trains on tokens: set model.head = 'lm'", "model.head")
    if config.data.truncation not in ("auto", "delete"):
        yield _problem(config, "data.truncation", "paired answers cannot be cut: choose 'delete'", "preference.loss")
    if options.reference is not None and options.loss not in ("simpo", "cpo", "orpo", "bradley_terry"):
        of_adapters = ("lora.dropout",) if config.lora.enabled else ()
        for key in (*of_adapters, "train.hidden_dropout", "train.attention_dropout"):
            if _value(config, key):
                reason = f"has no effect: preference.loss = {options.loss!r} compares with a reference without dropout"
                yield _problem(config, key, reason, "preference.loss", moot=True)
    if options.loss == "exo_pair" and not options.label_smoothing:
        yield _problem(
            config, "preference.label_smoothing", "exo_pair needs a value above 0, for example 0.001", "preference.loss"
        )
    for name in ("datasets", "eval_datasets") if options.offset_alpha else ():
        for i, entry in enumerate(getattr(config.data, name)):
            if entry.chosen_score_field is None or entry.rejected_score_field is None:
                key = f"data.{name}[{i}].chosen_score_field"
                reason = "preference.offset_alpha needs the scores of both answers: name their columns"
                yield Problem((key, "preference.offset_alpha"), f"{key}: {reason}")


def _distill(config: Config) -> Iterator[Problem]:
    if config.distill.teacher is not None and config.data.streaming:
        reason = "scores all documents before the first step, which data.streaming cannot provide"
        yield _problem(config, "distill.teacher", reason, "data.streaming")


# Options of data for packing documents into rows, which rollouts do not do: each prompt is a row of its own.
_OF_DOCUMENTS = (
    *("mixing", "packing", "packing_method", "group_by_length", "truncation", "cache_only", "num_proc", "num_workers"),
    *("samples_per_epoch", "shuffle_each", "streaming", "prefetch"),
)
# Options of a dataset entry, and of chat, for answers, which rollouts do not read.
_OF_ANSWERS = (
    *("max_tokens", "weight", "text_field", "text_pair_field", "target_column", "instruction_field", "output_field"),
    *("prompt_format", "prompt_format_no_input", "messages_field", "chosen_field", "rejected_field"),
    *("chosen_score_field", "rejected_score_field", "desirable_field"),
)
_OF_TRAINED_MESSAGES = ("roles", "loss_scale", "pattern_weights", "train_on_eos")


def _rollout(config: Config) -> Iterator[Problem]:
    options = config.rollout
    if not options.rewards:
        return
    if config.preference.loss is not None or config.model.head != "lm":
        other = "preference.loss" if config.preference.loss is not None else "model.head"
        yield _problem(config, "rollout.rewards", "trains only on tokens that the model generates", other)
    for name in _OF_DOCUMENTS:
        if getattr(config.data, name) != getattr(type(config.data)(), name):
            reason = "has no effect: with rollout.rewards the data is prompts, which are not packed or cut"
            yield _problem(config, f"data.{name}", reason, "rollout.rewards", moot=True)
    for name in ("datasets", "eval_datasets"):
        for i, entry in enumerate(getattr(config.data, name)):
            if entry.type != "auto":
                key = f"data.{name}[{i}].type"
                reason = "with rollout.rewards samples are prompts: set 'auto'"
                yield Problem((key, "rollout.rewards"), f"{key} = {entry.type!r}: {reason}")
            for field in _OF_ANSWERS:
                if getattr(entry, field) != getattr(type(entry)(), field):
                    key = f"data.{name}[{i}].{field}"
                    reason = "has no effect: with rollout.rewards a sample is a prompt, in the column prompt_field"
                    yield Problem((key, "rollout.rewards"), f"{key}: {reason}", moot=True)
    for field in _OF_TRAINED_MESSAGES:
        if getattr(config.chat, field) != getattr(type(config.chat)(), field):
            reason = "has no effect: rollout.rewards trains on the model's completions"
            yield _problem(config, f"chat.{field}", reason, "rollout.rewards", moot=True)
    if "" in options.stop:
        yield _problem(config, "rollout.stop", "an empty text would end every completion immediately")
    if options.max_new_tokens >= config.data.seq_len:
        reason = f"leaves no room for prompts in data.seq_len = {config.data.seq_len}"
        yield _problem(config, "rollout.max_new_tokens", reason, "data.seq_len")
    if config.mesh.stage != 1:
        yield _problem(config, "rollout.rewards", "not available with mesh.stage: use mesh.fsdp", "mesh.stage")
    if options.server is not None and not config.lora.enabled:
        reason = "a server receives adapters, not full weights: set lora.enabled, or leave it out"
        yield _problem(config, "rollout.server", reason, "lora.enabled")


def _classification(config: Config) -> Iterator[Problem]:
    model, classifier = config.model, config.sample_type == "classification"
    if classifier and config.data.truncation == "split":
        reason = "the label of a document may not hold for its parts; choose 'left', 'right' or 'delete'"
        yield _problem(config, "data.truncation", reason, "model.head")
    if classifier and config.data.streaming and not model.id2label and model.num_labels != 1:
        yield _problem(config, "model.id2label", "data.streaming reads no labels before training; name them here")
    if model.id2label and model.num_labels not in (None, len(model.id2label)):
        reason = f"model.id2label names {len(model.id2label)} labels; set only one of the two"
        yield _problem(config, "model.num_labels", reason, "model.id2label")
    if len(set(model.id2label)) < len(model.id2label):
        yield _problem(config, "model.id2label", "names a label twice")


def _chat(config: Config) -> Iterator[Problem]:
    first, *more = config.chat.loss_scale.split("+")
    if first not in (*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS) or not set(more) <= set(TEXT_WEIGHTINGS):
        words = ", ".join((*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS))
        reason = f"must be one of {words}, or a sum such as last_round+hermes"
        yield _problem(config, "chat.loss_scale", reason)
    if not config.chat.roles:
        yield _problem(config, "chat.roles", "is empty, so nothing would be trained")
    entries = (*config.data.datasets, *config.data.eval_datasets)
    of_generation = ("template", "response_prefix")
    rendered = ("auto", "conversation", "instruction", "preference", "unpaired_preference")
    if not any(entry.type in rendered and not entry.prompt_format for entry in entries):
        for field in dataclasses.fields(ChatOptions):
            if getattr(config.chat, field.name) != field.default and field.name not in of_generation:
                reason = "has no effect: no entry of data.datasets uses a chat template"
                yield _problem(config, f"chat.{field.name}", reason, "data.datasets", moot=True)


def _train(config: Config) -> Iterator[Problem]:
    name = config.train.run_name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\\" in name):
        yield _problem(config, "train.run_name", "must be a folder name; set its location with train.output_dir")


def _ckpt(config: Config) -> Iterator[Problem]:
    ckpt = config.ckpt
    if ckpt.start is not None and ckpt.resume == "never":
        yield _problem(config, "ckpt.start", "continues another run, but ckpt.resume is 'never'", "ckpt.resume")
    if config.guard.action is not None and config.rollout.rewards:
        reason = "the loss of rollouts has no baseline for spikes; use train.max_bad_steps"
        yield _problem(config, "guard.action", reason, "rollout.rewards")
    if config.guard.action == "roll_back":
        if not ckpt.save_optimizer:
            yield _problem(
                config, "ckpt.save_optimizer", "roll_back needs the optimizer state in checkpoints", "guard.action"
            )
        if not (ckpt.save_steps or ckpt.save_epochs):
            yield _problem(
                config, "ckpt.save_steps", "roll_back needs checkpoints; set it or ckpt.save_epochs", "guard.action"
            )
    if ckpt.dir is not None and os.path.abspath(ckpt.dir) == os.path.abspath(config.train.output_dir):
        reason = "is train.output_dir, the folder of runs; leave it out, or choose a separate folder"
        yield _problem(config, "ckpt.dir", reason, "train.output_dir")
    evaluates = config.eval.steps or config.eval.epochs is not None or config.eval.at_end or config.eval.at_start
    for key in ("ckpt.keep_best", "eval.patience", "eval.target"):
        if _value(config, key) and not evaluates:
            yield _problem(config, key, "there is no evaluation: set eval.steps, eval.epochs or eval.at_end")


def _attention(config: Config) -> Iterator[Problem]:
    if config.attention.backend == "fa3" and config.train.deterministic:
        reason = (
            "its backward pass sums in no fixed order, so runs are not bit-identical; set "
            "attention.backend = 'auto' or 'triton', which are deterministic, or train.deterministic = False"
        )
        yield _problem(config, "attention.backend", reason, "train.deterministic")
    if config.train.attention_dropout and config.attention.backend not in ("auto", "xla"):
        reason = "no kernel supports it; set attention.backend = 'xla', or use train.hidden_dropout"
        yield _problem(config, "train.attention_dropout", reason, "attention.backend")


def _optim(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.name in ("muon", "normuon") and config.lora.enabled and config.model.head == "lm":
        reason = f"has no effect: only AdamW reads it, and {optim.name} trains all adapters, which are matrices"
        for moment in ("beta1", "beta2", "epsilon"):
            if getattr(optim, moment) != getattr(type(optim)(), moment):
                yield _problem(config, f"optim.{moment}", reason, "optim.name", "lora.enabled", moot=True)
    if optim.name == "schedule_free" and optim.schedule != "constant":
        reason = "schedule_free replaces a schedule; set optim.schedule = 'constant', with or without warm-up"
        yield _problem(config, "optim.schedule", reason, "optim.name")
    if optim.name == "schedule_free" and optim.beta1 == 0:
        reason = "schedule_free interpolates with it between the last iterate and the average; must be above 0"
        yield _problem(config, "optim.beta1", reason, "optim.name")
    for key in ("optim.start_lr", "optim.min_lr"):
        if (_value(config, key) or 0) > optim.learning_rate:
            reason = f"must be at most the peak, optim.learning_rate = {optim.learning_rate!r}"
            yield _problem(config, key, reason, "optim.learning_rate")
    if 0 < optim.decay_ratio < 1 and optim.warmup_ratio >= optim.decay_ratio:
        reason = f"no decay is left after warm-up; must be above optim.warmup_ratio = {optim.warmup_ratio!r}"
        yield _problem(config, "optim.decay_ratio", reason, "optim.warmup_ratio")
    if optim.cooldown_steps and optim.decay_ratio < 1:
        reason = "optim.decay_ratio already reaches the final rate before the end; use only one of the two"
        yield _problem(config, "optim.cooldown_steps", reason, "optim.decay_ratio")
    if optim.schedule == "wsd" and optim.cooldown_steps == 0:
        yield _problem(config, "optim.cooldown_steps", "'wsd' (warm-up, stable, decay) needs steps to decay")
    if optim.schedule == "cosine_with_restarts" and optim.cycles is not None and optim.cycles % 1:
        reason = "restarts must be a whole number; optim.schedule = 'cosine' allows fractions of a wave"
        yield _problem(config, "optim.cycles", reason, "optim.schedule")


def _precision(config: Config) -> Iterator[Problem]:
    precision = config.precision
    if precision.recipe == "fp16":
        stored = ["precision.gradient_dtype", "model.dtype"]
        stored += ["lora.dtype"] if config.lora.enabled else ["precision.master_dtype"]
        for key in stored:
            if _value(config, key) == "bfloat16":
                better = "'float16' or 'float32'" if key == "model.dtype" else "'float32'"
                reason = (
                    "precision.recipe = 'fp16' computes in float16, more precise than bfloat16 but with less range; "
                    f"set it to {better}, or compute in bfloat16 with precision.recipe = 'bf16'"
                )
                yield _problem(config, key, reason, "precision.recipe")


def _lora(config: Config) -> Iterator[Problem]:
    lora = config.lora
    if not lora.enabled:
        return
    if config.model.from_scratch:
        reason = (
            "adapters on random weights learn nothing; train the whole model (lora.enabled = False) or load weights"
        )
        yield _problem(config, "model.from_scratch", reason, "lora.enabled")
    if not lora.target_modules:
        yield _problem(config, "lora.target_modules", "must name at least one module, or be 'all-linear'")
    if lora.target_modules in ("all", "linear", "all_linear"):
        yield _problem(config, "lora.target_modules", "no module has this name; 'all-linear' selects all linear layers")
    if lora.kind == "ia3":
        if lora.merge_interval:
            yield _problem(
                config, "lora.merge_interval", "only low-rank matrices can be merged, not factors", "lora.kind"
            )
        if config.rollout.server is not None:
            yield _problem(config, "lora.kind", "a server supports only low-rank adapters", "rollout.server")
        if config.optim.name in ("muon", "normuon"):
            reason = "it orthogonalises matrices, and ia3 trains vectors; use adamw"
            yield _problem(config, "optim.name", reason, "lora.kind")
    for key in ("lora.kind", "lora.bias", "lora.use_dora", "lora.init", "lora.freeze_a", "lora.modules_to_save"):
        # The tuple lists the values that work in a pipeline.
        if config.mesh.stage != 1 and _value(config, key) not in ("lora", "none", False, "uniform", "gaussian", ()):
            yield _problem(config, key, "not available with mesh.stage yet; use mesh.fsdp", "mesh.stage")
    for key in ("lora.bias", "lora.use_dora", "lora.modules_to_save"):
        if config.rollout.server is not None and _value(config, key) not in ("none", False, ()):
            yield _problem(config, key, "a server supports only low-rank matrices", "rollout.server")


def _quant(config: Config) -> Iterator[Problem]:
    quant = config.quant
    if quant.format is None:
        return
    if not config.lora.enabled:
        reason = "quantized weights are frozen; train adapters on them with lora.enabled = True"
        yield _problem(config, "quant.format", reason, "lora.enabled")
    sizes, size = BLOCK_SIZES[quant.format], quant.block_size
    if size is not None and size not in sizes and not (ANY_SIZE in sizes and isinstance(size, int) and size > 1):
        reason = f"quant.format = {quant.format!r} supports {' or '.join(map(str, sizes))}"
        yield _problem(config, "quant.block_size", reason, "quant.format")


def _mesh(config: Config) -> Iterator[Problem]:
    axes = {field.name: getattr(config.mesh, field.name) for field in dataclasses.fields(config.mesh)}
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield _problem(config, f"mesh.{axis}", "must be at least 1, or -1 for the remaining devices")
    if config.mesh.expert != 1 and config.optim.name in PER_MATRIX_OPTIMIZERS:
        reason = f"not available with optim.name = {config.optim.name!r} yet; shard experts with mesh.fsdp"
        yield _problem(config, "mesh.expert", reason, "optim.name")
    rest = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield Problem(tuple(rest), f"{' and '.join(rest)} are -1: only one axis can take the remaining devices")


def _memory(config: Config) -> Iterator[Problem]:
    asked = [f"memory.offload_{part}" for part in ("optimizer", "master", "gradients", "quants")]
    for key in (key for key in asked if _value(config, key)):
        gradients = key in ("memory.offload_master", "memory.offload_gradients")
        if config.optim.name == "schedule_free" and key != "memory.offload_quants":
            reason = "schedule_free computes gradients between weights and optimizer state; choose another optimizer"
            yield _problem(config, key, reason, "optim.name")
        if gradients and config.precision.recipe in ("fp8_hybrid", "nvfp4"):
            reason = f"{config.precision.recipe!r} quantizes all trained weights once a step; choose 'bf16'"
            yield _problem(config, key, reason, "precision.recipe")
        if gradients and config.parallel.zero != 3:
            yield _problem(
                config, key, "needs parallel.zero = 3, because weights on the host cannot be resharded", "parallel.zero"
            )
        for axis in ("stage", "expert"):
            if getattr(config.mesh, axis) != 1:
                yield _problem(config, key, f"not available with mesh.{axis} yet; use mesh.fsdp", f"mesh.{axis}")


def _value(config: Config, key: str) -> Any:
    return operator.attrgetter(key)(config)


def _problem(config: Config, key: str, reason: str, *others: str, moot: bool = False) -> Problem:
    return Problem((key, *others), f"{key} = {_value(config, key)!r}: {reason}", moot)
