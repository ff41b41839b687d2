"""Train by a recipe: config, mesh, model, data, step, loop, export. A run goes through this file from top to bottom.

python -m jaxtune.train --config=quickstart

In Python this module is called, as a function: `run = jaxtune.train("quickstart")`.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # flags and recipe are read before what takes seconds to import
    sys.exit(command.main("train"))

import inspect
import logging
import types
from functools import partial
from typing import Any

import jax
from absl.flags import FlagValues
from jax.experimental import multihost_utils

from jaxtune import data, hf
from jaxtune.checkpoint import CheckpointManager
from jaxtune.checkpoint.mirror import Mirror
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluation.evaluator import make_evaluate, metric_names
from jaxtune.exports.copied_tensors import warn_lost_layers
from jaxtune.exports.write import export
from jaxtune.host import plugins, process
from jaxtune.host.lock import hold_lock
from jaxtune.host.preflight import check_ready
from jaxtune.host.run_folder import RunFolder, final_summary, resume_command, run_folder
from jaxtune.inference.generation import continue_text
from jaxtune.models.decoder import Parameters
from jaxtune.monitor import curve
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.profiler import trace_on_signal
from jaxtune.optim.schedules import learning_rates
from jaxtune.parallel import multihost
from jaxtune.parallel.mesh import make_mesh
from jaxtune.python import Run, config_of, restore_mesh
from jaxtune.rollout import rollouts
from jaxtune.rollout.rewards import load_rewards, try_rewards
from jaxtune.run import loop, mirror_sync, resume
from jaxtune.run.best import check_metric, is_judged
from jaxtune.run.tasks import tasks_of
from jaxtune.run.watch import watching
from jaxtune.scoring.reference_scores import add_reference_scores
from jaxtune.scoring.teacher_scores import add_teacher_columns, declare_teacher
from jaxtune.terminal import STOPPED
from jaxtune.training import memory
from jaxtune.training.assembly import assemble
from jaxtune.training.state import State
from jaxtune.weights.class_labels import resolve_labels
from jaxtune.weights.describe import describe_layout, describe_pipeline
from jaxtune.weights.model import read_base
from jaxtune.weights.values import check_files, frozen_parameters, read_reference, result_of, start_parameters

log = logging.getLogger("jaxtune")


def train(config: Config) -> bool:
    """Starts or resumes a run, holding the lock on its folder. Returns False if it was asked to stop before its end."""
    if not isinstance(config, Config):
        raise UserError(
            f"train() takes a Config, not {type(config).__name__}: jaxtune.config.resolve(config, 'here') is one"
        )
    goodput = Goodput()
    with goodput.measure("start of JAX"):
        process.configure(config)
    folder = run_folder(config)
    with (
        process.exit_after_failure(),
        hold_lock(folder.path),
        process.log_to_file(config, folder.path),
        trace_on_signal(),
        memory.explain_out_of_memory(config),
        mirror_sync.mirror_run(config, folder) as mirror,
    ):
        return _train(config, folder, mirror, goodput)


def _train(config: Config, folder: RunFolder, mirror: Mirror | None, goodput: Goodput) -> bool:
    check_ready(config, folder)
    config = resolve_labels(config)
    mesh = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
    hub, private = config.export.push_to_hub, config.export.private
    if hub is not None:
        process.on_main(lambda: hf.check_upload(hub, private, "export.push_to_hub"))
    resume.link_checkpoints(config, folder)
    checkpoints = CheckpointManager(folder.checkpoints, config.ckpt.keep_last, mirror)
    mirror_sync.fetch(config, folder, mirror, checkpoints)
    saved = resume.saved_run(config, folder, checkpoints)

    # ---- model: declared, not read ----
    with goodput.measure("model"):
        program = assemble(read_base(config), config, mesh)
        model = program.model
        log.info(describe_layout(model, mesh))
        if mesh.shape["stage"] > 1:
            log.info(describe_pipeline(model, config))
        check_files(model, config)
        if not config.lora.enabled or config.export.merge or config.lora.merge_interval:
            warn_lost_layers(model, config)
        memory.check_state(config, program, mesh)

    # ---- data: documents, rows, the number of steps ----
    with goodput.measure("tokenizer"):
        tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    with goodput.measure("data"):
        rewards = load_rewards(config.rollout.rewards)
        teacher = declare_teacher(config, tokenizer, model.spec.vocabulary, mesh)
        if rewards:
            feed = data.open_prompts(config, tokenizer, mesh)
            prompt, group = feed.documents.prompts[0], config.rollout.group_size
            process.on_main(lambda: try_rewards(rewards, prompt, tokenizer, group))
        else:
            feed = data.open_feed(config, tokenizer, model.spec.vocabulary, mesh, program.objective.columns)
    record = resume.record(config, model, feed)
    if saved is not None:
        resume.check_same(saved.record, record, model, feed)
        resume.check_length(saved, feed.total_steps)
        if saved.finished(feed.total_steps) and (folder.exported or not config.export.at_end):
            why = f"; {saved.record['ended']}" if saved.record.get("ended") else ""
            done = saved.progress(config.train, feed.total_steps), folder.path, why
            log.info("this run is finished: %s, in %s%s", *done)
            return True

    if is_judged(config) and not isinstance(feed, data.PromptFeed):
        check_metric(config.eval, metric_names(config, program, feed.eval_rows))

    # ---- step: compiled before a weight is read, so that its memory is known ----
    rates = learning_rates(config.optim, feed.total_steps)
    log.info("compiling the step")
    with goodput.measure("compile"):
        before = None if saved is None else saved.record.get("remat")
        program, train_step, record["remat"] = memory.compile_fitting_step(config, program, mesh, before)
    step_text = train_step.as_text
    evaluate = None
    if isinstance(feed, data.PromptFeed):
        make = rollouts.make_rollouts(config, model, tokenizer, rewards, folder.path)
        train_step = rollouts.make_rollout_step(config, program, make, train_step, folder.path)
        if feed.eval_prompts is not None:
            evaluate = rollouts.make_evaluate(config, make, feed.eval_prompts, feed.rows_per_step, goodput.beat)

    # ---- values: from the checkpoint, or initial ones ----
    with goodput.measure("reference"):
        feed = feed.with_rows(partial(add_reference_scores, config, model, mesh))
    with goodput.measure("teacher"):
        feed = add_teacher_columns(teacher, mesh, feed)
    with goodput.measure("weights" if saved is None else "restore"):
        if saved is not None:
            state, starts, position = resume.restore_run(saved, program, config.ckpt.load_optimizer)
            frozen = starts | frozen_parameters(model, config, but={**state.base, **starts})
        else:
            trained, base, frozen = start_parameters(model, config)
            start = jax.jit(program.start, donate_argnums=0)
            first = ("eval",) if config.eval.at_start else ()
            state, position = start(trained)._replace(base=base), loop.Position(put_off=first)
            if state.reference and config.preference.reference != "start":
                state = state._replace(reference=read_reference(model, config, state.reference))
        resume.begin(config, folder, feed.counts)
        mirror_sync.begin(config, mirror)

    # ---- the loop: steps, and the tasks between them ----
    work, total_steps = model.work(config.data.seq_len), feed.total_steps
    called = plugins.callbacks(config, folder.path, position.plugins)

    def save(state: State, at: loop.Position) -> None:
        at.plugins = called.states()
        kept = state._replace(base=state.base | {name: frozen[name] for name in model.starts})
        kept = kept if config.ckpt.save_optimizer else kept._replace(optimizer=())
        best = at.standing.step if config.ckpt.keep_best else None
        checkpoints.save(at.step, kept, record | at.to_json(), model.grouping, best)
        called("on_save", at.step, folder.checkpoints / str(at.step))

    def sample(step: int, parameters: Parameters) -> None:
        text = continue_text(model, parameters, tokenizer, config.eval.sample_prompt or "")
        log.info("sample: %s", text)
        if multihost.is_main():
            folder.add_sample(step, config.eval.sample_prompt or "", text)

    with watching(config, folder, position.step, total_steps, feed.epoch, work, goodput, called, step_text) as watch:
        if feed.eval_rows:
            evaluate = make_evaluate(config, model, feed.eval_rows, mesh, goodput.beat)
        tasks = tasks_of(config, position, frozen, watch, evaluate, sample, save)
        batches = feed.batches(position.feed, total_steps - position.step)
        back = partial(resume.roll_back, checkpoints, program) if config.guard.action == "roll_back" else None
        state = loop.train(config, train_step, state, frozen, batches, position, rates, tasks, watch, back)
        with goodput.measure("save"):
            checkpoints.wait(final=True)

    # ---- results ----
    if position.step < total_steps and not position.ended:
        log.info("stopped at step %d of %d; go on with: %s", position.step, total_steps, resume_command(folder))
        multihost_utils.sync_global_devices("saved")  # a launcher ends all once one process ends with a code of its own
        return False
    if position.bad_steps:
        raise UserError(
            f"the last {position.bad_steps} steps were not finite and changed no parameter, so nothing is exported; "
            "lower optim.learning_rate, or look for NaN in the weights and the data"
        )
    if position.ended:
        log.info("ended at step %d of %d: %s", position.step, total_steps, position.ended)
    called("on_end", position.step)
    result, of_step = state.result, position.step
    if config.export.best and position.standing.step is not None:
        of_step = position.standing.step
        result = result_of(checkpoints, model, config, of_step)
        log.info("%s is best at step %d, which is exported", config.eval.best_metric, of_step)
    parameters = {**frozen, **result}
    if config.log.jsonl and multihost.is_main():
        with goodput.measure("loss curve"):
            curve.draw(folder.metrics, folder.loss_curve, folder.path.name)
    if config.export.at_end:
        write = partial(export, model, parameters, config, folder, steps=of_step, tokens=position.tokens)
        an_adapter = config.lora.enabled and not config.lora.merge_interval
        with goodput.measure("export"):
            write(folder.export, "peft" if an_adapter else "hf", merge=bool(config.lora.merge_interval), hub_id=hub)
            if config.export.merge:
                write(folder.merged, "hf", merge=True)
    if config.eval.sample_prompt and mesh.shape["stage"] == 1:
        with goodput.measure("sample"):
            sample(of_step, parameters)
    elif config.eval.sample_prompt:
        log.info("no sample: decoding has no stages; see generate below")
    log.info(goodput.report())
    log.info(final_summary(config, folder, feed.chat))
    if hub is not None:
        process.on_main(lambda: log.info("uploaded: %s", hf.upload(folder.export, hub, private)))
    return True


class _Callable(types.ModuleType):
    """`jaxtune.train(...)` trains. Importing this module gives the package an attribute of its name: this is it."""

    def __call__(self, recipe: Any, *, dialect: str | None = None, **sections: Any) -> Run:
        """Trains by a recipe, or continues its run: `run = jaxtune.train("quickstart", optim={"learning_rate": 1e-4})`.

        Args:
            recipe: As for `jaxtune.config_of`: NAME or FILE, either with :ARGUMENT, or a config.
            dialect: The system that a YAML file was written for; None: its keys tell.
            **sections: Options by their section, as dicts.

        Returns:
            The run: its `folder`, whether it is `finished`, `last` metrics, `generate(prompts)`, `evaluate()`.

        Raises:
            UserError: If the command would print an error.
        """
        config = config_of(recipe, dialect=dialect, **sections)
        with restore_mesh():
            finished = train(config)
        return Run(run_folder(config).path.absolute(), finished)


def run_command(_: FlagValues, config: Config) -> int:
    """Trains; returns the command's exit code."""
    return 0 if train(config) else STOPPED


sys.modules[__name__].__class__ = _Callable
# For help(jaxtune.train): what is called, not the parts of this module.
__doc__ = inspect.getdoc(_Callable.__call__)
__all__ = []
main = partial(command.main, "train")
