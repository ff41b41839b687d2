"""Find options that contradict each other, before any file is read. Rules for a single option are in `option_rules`."""

import os
from collections.abc import Iterator

from jaxtune.config.option_rules import find_broken_rules
from jaxtune.config.schema import Config
from jaxtune.data_options import check_chat, check_data, check_types
from jaxtune.lora.options import check_lora
from jaxtune.models.options import check_attention, check_vision
from jaxtune.objectives.options import check_decision, check_distill, check_mtp, check_preference, check_rollout
from jaxtune.optim.options import check_optim
from jaxtune.option_field import Problem, problem, value_of
from jaxtune.parallel.options import check_memory, check_mesh
from jaxtune.precision.options import check_precision
from jaxtune.quant.options import check_quant, check_serve


def check(config: Config) -> list[Problem]:
    """Return every problem of a config whose types are correct."""
    parts = (
        find_broken_rules,
        check_data,
        check_types,
        _classification,
        check_preference,
        check_decision,
        check_distill,
        check_rollout,
        check_mtp,
        check_chat,
        _train,
        _ckpt,
        check_attention,
        check_vision,
        check_optim,
        check_precision,
        check_lora,
        check_quant,
        check_serve,
        check_mesh,
        check_memory,
    )
    return [problem for part in parts for problem in part(config)]


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


def _train(config: Config) -> Iterator[Problem]:
    name = config.train.run_name
    if name is not None and (name in ("", ".", "..") or "/" in name or "\\" in name):
        yield problem(config, "train.run_name", "must be a folder name; set its location with train.output_dir")


def _ckpt(config: Config) -> Iterator[Problem]:
    ckpt = config.ckpt
    if ckpt.start is not None and ckpt.resume == "never":
        yield problem(config, "ckpt.start", "continues another run, but ckpt.resume is 'never'", "ckpt.resume")
    if config.guard.action is not None and config.samples:
        reason = "the loss of rollouts has no baseline for spikes; use train.max_bad_steps"
        yield problem(config, "guard.action", reason, config.samples)
    if config.guard.max_loss is not None and config.rollout.rewards:
        reason = "the loss of rollouts is not a measure of quality; a plugin can end a run by its reward"
        yield problem(config, "guard.max_loss", reason, "rollout.rewards")
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
    if config.eval.tasks and not (config.eval.tasks_steps or config.eval.at_end or config.eval.at_start):
        yield problem(config, "eval.tasks", "they never score: set eval.tasks_steps, eval.at_end or eval.at_start")
