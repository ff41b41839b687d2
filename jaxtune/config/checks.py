"""Find options that contradict each other, before any file is read. Rules for a single option are in `rules`."""

import dataclasses
import os
import re
from collections.abc import Iterator

from jaxtune.config.option_rules import find_broken_rules
from jaxtune.config.schema import MESSAGE_SELECTIONS, TEXT_WEIGHTINGS, ChatOptions, Config
from jaxtune.lora.options import check_lora
from jaxtune.models.options import check_attention
from jaxtune.objectives.options import check_distill, check_preference, check_rollout
from jaxtune.optim.options import check_optim
from jaxtune.option_field import Problem, problem, value_of
from jaxtune.parallel.options import check_memory, check_mesh
from jaxtune.precision.options import check_precision
from jaxtune.quant.options import check_quant


def check(config: Config) -> list[Problem]:
    """Return every problem of a config whose types are correct."""
    parts = (
        find_broken_rules,
        _data,
        _task,
        _classification,
        check_preference,
        check_distill,
        check_rollout,
        _chat,
        _train,
        _ckpt,
        check_attention,
        check_optim,
        check_precision,
        check_lora,
        check_quant,
        check_mesh,
        check_memory,
    )
    return [problem for part in parts for problem in part(config)]


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if not config.model.path:
        yield problem(config, "model.path", "must name a Hugging Face folder or hub id")
    if not data.datasets:
        yield problem(config, "data.datasets", "no training data; add an entry: jaxtune.config.dataset(path=...)")
    for name in ("datasets", "eval_datasets"):
        for key, entry in data.entries(name):
            if not entry.path:
                yield problem(config, f"{key}.path", "must name a file, folder, or hub id")
            if entry.path == "dummy" and entry.samples is None:
                text = f"{key}.samples: path='dummy' is endless; set the number of samples"
                yield Problem((f"{key}.samples", f"{key}.path"), text)
            if entry.name is not None and (name == "datasets" or config.rollout.rewards):
                reason = "only entries of data.eval_datasets are evaluated separately"
                if config.rollout.rewards:
                    reason = "completions are rewarded together (rollout.rewards)"
                yield Problem((f"{key}.name",), f"{key}.name: has no effect: {reason}", moot=True)
            elif entry.name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", entry.name):
                reason = "is part of a metric's name: use letters, digits and _.-"
                yield problem(config, f"{key}.name", reason)
            if entry.shards is not None and (entry.shard_idx is None or entry.shard_idx >= entry.shards):
                reason = f"must be one of the parts, 0 to {entry.shards - 1}"
                yield problem(config, f"{key}.shard_idx", reason, f"{key}.shards")
        weights = {f"{key}.weight": entry.weight for key, entry in data.entries(name)}
        with_weight = [key for key, weight in weights.items() if weight is not None]
        if with_weight and data.mixing == "concat":
            reason = "has no effect: data.mixing = 'concat' takes all of each dataset"
            yield Problem((with_weight[0], "data.mixing"), f"{with_weight[0]}: {reason}", moot=True)
        elif with_weight and data.mixing_temperature is not None:
            keys = with_weight[0], "data.mixing_temperature"
            yield Problem(keys, f"{keys[0]}: not with data.mixing_temperature")
        elif with_weight and len(with_weight) < len(weights):
            without = next(key for key in weights if key not in with_weight)
            yield problem(config, without, "other datasets have a weight; give one to each, or to none")
    if data.streaming and data.validation_split and not data.eval_datasets:
        reason = "has no effect: a stream has no held-out part; set data.eval_datasets"
        yield problem(config, "data.validation_split", reason, "data.streaming", moot=True)
    if data.streaming and config.train.max_steps is None:
        yield problem(config, "train.max_steps", "data.streaming is endless; set the number of steps")
    if data.validation_split >= 1 and data.validation_split % 1:
        yield problem(config, "data.validation_split", "must be a whole number of documents, or a fraction below 1")
    if data.packing and data.packing_method == "first_fit_decreasing" and (not data.shuffle or data.shuffle_each):
        key, value = ("data.shuffle_each", True) if data.shuffle else ("data.shuffle", False)
        reason = f"sorts documents by length, but {key} = {value} keeps their order; choose 'sequential'"
        yield problem(config, "data.packing_method", reason, key)


def _task(config: Config) -> Iterator[Problem]:
    """Yield problems of entries whose type belongs to another task."""
    # The sample type follows from preference.loss or model.head; None means that 'auto' may choose.
    wanted = config.sample_type
    of_classifier = {
        None: "labels need model.head = 'classification'",
        "classification": "model.head = 'classification' needs type='classification', with a label in target_column",
    }
    for key, entry in config.data.entries():
        key = f"{key}.type"
        if wanted in ("preference", "unpaired_preference"):
            if entry.type not in ("auto", wanted):
                reason = f"preference.loss = {config.preference.loss!r} needs type {wanted!r}"
                yield problem(config, key, reason, "preference.loss")
        elif entry.type in ("preference", "unpaired_preference"):
            reason = "needs preference.loss, for example 'sigmoid' (DPO) or 'kto'"
            yield problem(config, key, reason, "preference.loss")
        elif (entry.type == "classification") != (wanted == "classification"):
            yield problem(config, key, of_classifier[wanted], "model.head")


def _classification(config: Config) -> Iterator[Problem]:
    model, classifier = config.model, config.sample_type == "classification"
    if classifier and config.data.truncation == "split":
        reason = "the label of a document may not hold for its parts; choose 'left', 'right' or 'delete'"
        yield problem(config, "data.truncation", reason, "model.head")
    if classifier and config.data.streaming and not model.id2label and model.num_labels != 1:
        yield problem(config, "model.id2label", "data.streaming reads no labels before training; name them here")
    if model.id2label and model.num_labels not in (None, len(model.id2label)):
        reason = f"model.id2label names {len(model.id2label)} labels; set only one of the two"
        yield problem(config, "model.num_labels", reason, "model.id2label")
    if len(set(model.id2label)) < len(model.id2label):
        yield problem(config, "model.id2label", "names a label twice")


def _chat(config: Config) -> Iterator[Problem]:
    first, *more = config.chat.loss_scale.split("+")
    if first not in (*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS) or not set(more) <= set(TEXT_WEIGHTINGS):
        words = ", ".join((*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS))
        reason = f"must be one of {words}, or a sum such as last_round+hermes"
        yield problem(config, "chat.loss_scale", reason)
    if not config.chat.roles:
        yield problem(config, "chat.roles", "is empty, so nothing would be trained")
    of_generation = ("template", "response_prefix")
    rendered = ("auto", "conversation", "instruction", "preference", "unpaired_preference")
    if not any(entry.type in rendered and not entry.prompt_format for _, entry in config.data.entries()):
        for field in dataclasses.fields(ChatOptions):
            if getattr(config.chat, field.name) != field.default and field.name not in of_generation:
                reason = "has no effect: no entry of data.datasets uses a chat template"
                yield problem(config, f"chat.{field.name}", reason, "data.datasets", moot=True)


def _train(config: Config) -> Iterator[Problem]:
    name = config.train.run_name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\\" in name):
        yield problem(config, "train.run_name", "must be a folder name; set its location with train.output_dir")


def _ckpt(config: Config) -> Iterator[Problem]:
    ckpt = config.ckpt
    if ckpt.start is not None and ckpt.resume == "never":
        yield problem(config, "ckpt.start", "continues another run, but ckpt.resume is 'never'", "ckpt.resume")
    if config.guard.action is not None and config.rollout.rewards:
        reason = "the loss of rollouts has no baseline for spikes; use train.max_bad_steps"
        yield problem(config, "guard.action", reason, "rollout.rewards")
    if config.guard.action == "roll_back":
        if not ckpt.save_optimizer:
            yield problem(
                config, "ckpt.save_optimizer", "roll_back needs the optimizer state in checkpoints", "guard.action"
            )
        if not (ckpt.save_steps or ckpt.save_epochs):
            yield problem(
                config, "ckpt.save_steps", "roll_back needs checkpoints; set it or ckpt.save_epochs", "guard.action"
            )
    if ckpt.dir is not None and os.path.abspath(ckpt.dir) == os.path.abspath(config.train.output_dir):
        reason = "is train.output_dir, the folder of runs; leave it out, or choose a separate folder"
        yield problem(config, "ckpt.dir", reason, "train.output_dir")
    evaluates = config.eval.steps or config.eval.epochs is not None or config.eval.at_end or config.eval.at_start
    for key in ("ckpt.keep_best", "eval.patience", "eval.target"):
        if value_of(config, key) and not evaluates:
            yield problem(config, key, "there is no evaluation: set eval.steps, eval.epochs or eval.at_end")
