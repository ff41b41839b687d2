"""Train by a recipe, or resume its run: pretraining, fine-tuning, adapters, preferences, rewards, distillation.

    python -m jaxtune.train --config=quickstart --config.optim.learning_rate=1e-3

`jaxtune options` lists the options. A run goes through this file in order; CONTRIBUTING.md says where the rest is.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # flags and recipe are read before what takes seconds to import
    sys.exit(command.main("train"))

from contextlib import ExitStack
from functools import partial

from absl.flags import FlagValues

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.host import plugins, process
from jaxtune.host.lock import hold_lock
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.host.preflight import check_ready
from jaxtune.host.run_folder import RunFolder, run_folder
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.profiler import trace_on_signal
from jaxtune.optim.schedules import learning_rates
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run import loop, mirror_sync, results, resume
from jaxtune.run.benchmarks import open_benchmarks
from jaxtune.run.best import check_best_metric
from jaxtune.run.inputs import add_scores, check_inputs, open_inputs
from jaxtune.run.start import check_model, check_start_step, first_state, quantize_late, step_functions
from jaxtune.run.tasks import make_sample, make_save, tasks_of
from jaxtune.run.watch import watching
from jaxtune.scoring.kept_teacher import kept_bytes
from jaxtune.terminal import STOPPED
from jaxtune.training import memory
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import read_base
from jaxtune.weights.class_labels import resolve_labels


def train(config: Config) -> bool:
    """Start or resume a run, holding the lock on its folder. Returns False if it was asked to stop before its end."""
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
        explain_missing_kernels(),
        mirror_sync.mirror_run(config, folder) as mirror,
        ExitStack() as at_end,
    ):
        return _train(config, folder, mirror, goodput, at_end)


def _train(
    config: Config, folder: RunFolder, mirror: mirror_sync.Mirror | None, goodput: Goodput, at_end: ExitStack
) -> bool:
    # ---- devices, and the checkpoint to continue from, if any; errors that need no model are raised first ----
    check_ready(config, folder)
    if not config.data.datasets:
        raise UserError(
            "data.datasets is empty, so there is nothing to train on: add an entry, jaxtune.config.dataset(path=...), "
            "or evaluate only, with jaxtune evaluate"
        )
    config = resolve_labels(config)
    mesh = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
    results.check_upload(config)
    checkpoints = resume.open_checkpoints(config, folder, mirror)
    at_end.push(checkpoints.finish)
    saved = resume.saved_run(config, folder, checkpoints)

    # ---- model: only declared, so that what does not fit is refused before any weight is read ----
    with goodput.measure("model"):
        program = assemble(read_base(config), config, mesh)
        held = kept_bytes(config, mesh)  # of a teacher that stays on the devices
        check_model(config, program, mesh, held)

    # ---- data: rows of documents, or prompts; their number gives the number of steps ----
    inputs = open_inputs(config, program, mesh, goodput)
    check_inputs(inputs, config, program.model)
    feed, total_steps = inputs.feed, inputs.feed.total_steps
    record = resume.record(config, program.model, feed)
    if saved is not None and resume.is_complete(saved, record, config, folder, program.model, feed):
        return True
    check_best_metric(config, program, feed)
    check_start_step(config, total_steps)
    with goodput.measure("benchmarks"):
        benchmark = open_benchmarks(config, program.model, mesh, goodput.beat)

    # ---- step: compiled before a weight is read, so that its memory is known ----
    with goodput.measure("compile"):
        before = {} if saved is None else saved.record
        program, compiled, chosen = memory.compile_fitting_step(config, program, mesh, before, held)
        compiled_as = {"remat": chosen.remat, "unroll": bool(chosen.unroll)}
        memory.warn_changed(before, compiled_as)
        record |= compiled_as
    model = program.model
    inputs = add_scores(inputs, config, model, mesh, goodput)  # of a reference or a teacher: no step runs these
    feed = inputs.feed
    train_step, evaluate = step_functions(config, program, compiled, inputs, mesh, folder, goodput, at_end)

    # ---- weights and the optimizer's state: from the checkpoint, or initial ones ----
    with goodput.measure("weights" if saved is None else "restore"):
        state, frozen, position = first_state(config, program, saved)
        resume.begin(config, folder, feed.counts)
        mirror_sync.remove_overwritten(config, mirror)
    with goodput.measure("compile"):
        train_step = quantize_late(config, program, train_step, position, chosen)

    # ---- the loop: steps, and the tasks between them; it advances `position` ----
    callbacks = plugins.callbacks(config, folder.path, position.plugins)
    save = make_save(config, checkpoints, record, model, frozen, callbacks, folder)
    sample = make_sample(config, model, inputs.tokenizer, folder)
    work = model.work(config.data.seq_len)
    with watching(
        config, folder, position.step, total_steps, feed.epoch, work, goodput, callbacks, compiled.as_text
    ) as watch:
        tasks = tasks_of(config, position, frozen, watch, evaluate, benchmark, sample, save)
        batches = feed.batches(position.feed, total_steps - position.step)
        rates = learning_rates(config.optim, total_steps)
        roll_back = partial(resume.roll_back, checkpoints, program) if config.guard.action == "roll_back" else None
        state = loop.train(config, train_step, state, frozen, batches, position, rates, tasks, watch, roll_back)
        with goodput.measure("save"):
            checkpoints.wait(final=True)

    # ---- results: a stopped run has none yet; a finished one is exported, sampled and summarised ----
    if results.is_stopped(position, total_steps, folder):
        return False
    callbacks("on_end", position.step)
    parameters, step = results.choose_parameters(config, model, checkpoints, {**frozen, **state.result}, position)
    results.write(config, model, parameters, folder, step, position.tokens, goodput)
    results.finish(config, folder, partial(sample, step, parameters), feed.chat, goodput)
    return True


def run_command(_: FlagValues, config: Config) -> int:
    """Train; return the command's exit code."""
    return 0 if train(config) else STOPPED


main = partial(command.main, "train")
