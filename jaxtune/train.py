"""Train by a recipe: config, mesh, model, data, step, loop, export. This file is the whole road, top to bottom.

python -m jaxtune.train --config=configs/quickstart.py
"""

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from absl import flags

from jaxtune import command, data, hf, loop, runtime
from jaxtune.checkpoint import CheckpointManager, fingerprint, verify_fingerprint
from jaxtune.compiler import compiler_options
from jaxtune.config import to_json
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluate import make_evaluate
from jaxtune.export import export
from jaxtune.generate import continue_text
from jaxtune.monitor import curve, throughput
from jaxtune.monitor.goodput import Goodput
from jaxtune.monitor.metrics import MetricsLog
from jaxtune.monitor.profiler import Profiler
from jaxtune.monitor.progress import Progress
from jaxtune.monitor.signals import StopRequest
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.build import Optimizer
from jaxtune.optim.schedules import check_length, learning_rate
from jaxtune.parallel import multihost
from jaxtune.parallel.layout import TOKENS
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.precision.recipes import check_device
from jaxtune.run_folder import RunFolder, abstract_state, check_unchanged, optimizer_of, run_folder, start_of
from jaxtune.state import (
    Model,
    declare_model,
    describe_layout,
    frozen_parameters,
    initial_parameters,
    recipe_of_run,
    refuse_unsharded,
)
from jaxtune.step import accumulated_gradients, make_train_step
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")


def train(config: Config) -> None:
    """One run, from wherever it stands to its end."""
    goodput = Goodput()
    runtime.configure(config)
    runtime.show_log()
    mesh = make_mesh(config.mesh)
    folder = run_folder(config)
    checkpoints = CheckpointManager(folder.checkpoints, config.ckpt.keep_last)
    saved = resumed(config, folder, checkpoints)

    # ---- model: declared, not read ----
    model = declare_model(config, mesh)
    refuse_unsharded(model, mesh)
    optimizer = optimizer_of(model, config)
    if note := check_device(config.precision.recipe, current_device()):
        log.info(note)
    log.info(describe_layout(model, mesh))

    # ---- data: documents, rows, the number of steps ----
    tokenizer = hf.load_tokenizer(model.folder)
    documents, eval_documents = data.open_documents(config, tokenizer)
    for note in documents.notes:
        log.info("data: %s", note)
    rows = data.Rows(documents, config.data, epochs=None if config.train.max_steps else config.train.epochs)
    micro_rows = config.train.micro_batch_size * data_shards(mesh)
    rows_per_step = micro_rows * config.train.grad_accum_steps
    total_steps = config.train.max_steps or -(-rows.total(config.train.epochs) // rows_per_step)
    log.info("data: %s", rows.counts)
    log.info("%d steps of %d rows of %d tokens", total_steps, rows_per_step, config.data.seq_len)
    base = {} if config.model.from_scratch else fingerprint(model.folder)
    host = {"config": json.loads(to_json(config)), "base": base, "data": documents.key}
    host |= {"rows_per_step": rows_per_step, "total_steps": total_steps}
    if saved is not None:
        check_same(saved, host, model)
        if saved["step"] >= total_steps and (folder.export.exists() or not config.export.at_end):
            log.info("this run is finished: %d steps, %d asked for, in %s", saved["step"], total_steps, folder.path)
            return

    # ---- step: compiled before a weight is read, so that its memory is known ----
    if note := check_length(config.optim, total_steps):
        log.warning(note)
    step, (abstract, abstract_frozen, batch) = step_of(config, model, optimizer, mesh, total_steps)
    with goodput.measure("compile"):
        compiled = jax.jit(step, donate_argnums=0, compiler_options=compiler_options(config.train.deterministic))
        train_step = compiled.lower(abstract, abstract_frozen, batch).compile()
    log.info(memory(train_step))

    # ---- values: from the checkpoint, or as the recipe starts ----
    with goodput.measure("restore"):
        restored = None
        if saved is not None:
            restored = checkpoints.restore(abstract, None if config.ckpt.resume == "auto" else saved["step"])
        if restored is not None:
            state, position = restored.state, loop.Position.from_json(restored.host)
            log.info("resumed from step %d", position.step)
        else:
            start = jax.jit(start_of(model, config, optimizer), donate_argnums=0)
            state, position = start(initial_parameters(model, config)), loop.Position()
        frozen = frozen_parameters(model, config)
        folder.write_records(config, rows.counts)

    # ---- the loop ----
    main = multihost.is_main()
    work = model.work(config.data.seq_len)
    evaluate = None
    if eval_documents is not None:
        evaluate = make_evaluate(config, model, data.Rows(eval_documents, config.data, epochs=1), mesh)
    metrics = MetricsLog(folder.path, config.log, config.train.run_name or "", host["config"], position.step, main)
    progress = Progress(total_steps, position.step, config.log.every, main)
    profiler = Profiler(folder.path, config.prof, main)
    hooks = loop.Hooks(
        train_step=train_step,
        evaluate=evaluate and (lambda state: evaluate(state.trained, frozen)),
        save=lambda state, at: checkpoints.save(at.step, state, host | at.to_json()),
        utilization=lambda speed: throughput.mfu(work, speed, jax.devices()[0].device_kind, jax.device_count()),
    )
    accum, sharding = config.train.grad_accum_steps, batch["tokens"].sharding
    stop_row = total_steps * rows_per_step
    batches = data.batches(rows, accum, micro_rows, config.data.seq_len, sharding, position.row, stop_row)
    try:
        with StopRequest() as stop:
            watch = loop.Watch(metrics, progress, profiler, goodput, stop)
            state = loop.train(config, state, frozen, batches, position, total_steps, hooks, watch)
            with goodput.measure("save"):
                checkpoints.wait(final=True)
    finally:
        for watcher in (progress, profiler, metrics):
            watcher.close()

    # ---- what is left behind ----
    if position.step < total_steps:
        log.info("stopped at step %d of %d; go on with: %s", position.step, total_steps, this_command())
        return
    parameters = {**frozen, **state.trained}
    if config.export.at_end:
        kind = "peft" if config.lora.enabled else "hf"
        export(model, parameters, config, folder.export, kind, steps=position.step, tokens=position.tokens)
    if main and config.log.jsonl:
        curve.draw(folder.metrics, folder.loss_curve, folder.path.name)
    if config.eval.sample_prompt and mesh.size == 1:
        log.info("sample: %s", continue_text(model, parameters, tokenizer, config.eval.sample_prompt))
    elif config.eval.sample_prompt:
        log.info("no sample: decoding is not sharded; see generate below")
    log.info(goodput.report())
    log.info(closing(config, folder))


def step_of(
    config: Config, model: Model, optimizer: Optimizer, mesh: jax.sharding.Mesh, total_steps: int
) -> tuple[Callable, tuple]:
    """The step of a run, and the shapes of its state, frozen parameters and batch: enough to compile it anywhere."""
    recipe, seed = recipe_of_run(config, model), config.train.seed
    objective = partial(cross_entropy, z_loss=config.train.z_loss)
    gradients = accumulated_gradients(model.graph, objective, recipe, config.memory.remat, seed)
    rate = learning_rate(config.optim, total_steps)
    step = make_train_step(gradients, optimizer, rate, config.optim.max_grad_norm, recipe, seed)
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    batch = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *TOKENS)))
    return step, (abstract_state(model, config, optimizer, mesh), model.abstract(model.frozen), batch)


def resumed(config: Config, folder: RunFolder, checkpoints: CheckpointManager) -> dict | None:
    """What the checkpoint to go on from says, by ckpt.resume; None to start anew.

    Raises UserError where there is nothing to go on from, a run that is not to go on, or one with other options.
    """
    if config.ckpt.resume == "never":
        if checkpoints.steps():
            raise UserError(
                f"{folder.path} holds a run and ckpt.resume is 'never'; choose another --config.train.run_name, "
                "or remove the folder"
            )
        return None
    saved = checkpoints.host(None if config.ckpt.resume == "auto" else int(config.ckpt.resume))
    if saved is not None:
        check_unchanged(saved["config"], config)
    return saved


def check_same(saved: dict, now: dict, model: Model) -> None:
    """Raise UserError unless data, base model and rows a step are those that the checkpoint was trained with."""
    if saved["rows_per_step"] != now["rows_per_step"]:
        raise UserError(
            f"a step was {saved['rows_per_step']} rows and is {now['rows_per_step']} now; choose "
            "train.micro_batch_size * train.grad_accum_steps * (mesh.data * mesh.fsdp) so that it stays the same"
        )
    if saved["data"] != now["data"]:
        raise UserError("the training data or the tokenizer changed since the checkpoint; start a new run")
    if now["base"] or saved["base"]:
        verify_fingerprint(model.folder, saved["base"])
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            "the learning-rate schedule was for %d steps and is for %d now", saved["total_steps"], now["total_steps"]
        )


def memory(compiled: jax.stages.Compiled) -> str:
    """What the compiled step takes on each device, one line."""
    analysis: Any = compiled.memory_analysis()
    gigabytes = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    return (
        f"memory a device: {gigabytes(analysis.argument_size_in_bytes)} state and batch, "
        f"{gigabytes(analysis.temp_size_in_bytes)} temporaries"
    )


def this_command() -> str:
    """The command line of this process, as a user would type it to go on: without ckpt.resume, which is auto."""
    given = sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:]
    kept = [argument for argument in given if not re.match("--?config.ckpt.resume=", argument)]
    return shlex.join(["python", "-m", "jaxtune.train", *kept])


def closing(config: Config, folder: RunFolder) -> str:
    """Where everything is, and what to type next."""
    lines = [f"run: {folder.path}"]
    if config.log.jsonl:
        lines.append(f"loss curve: {folder.loss_curve}")
    if config.export.at_end:
        lines.append(f"{'adapter' if config.lora.enabled else 'model'}: {folder.export}")
    model = folder.path if config.lora.enabled or not config.export.at_end else folder.export
    merge = " --merge" if config.lora.enabled else ""
    prompt = shlex.quote(config.eval.sample_prompt or "Once")
    lines += [
        f"resume:   {this_command()}",
        f"export:   python -m jaxtune.export --run={folder.path} --output={folder.path}-model{merge}",
        f"generate: python -m jaxtune.generate --model={model} --prompt={prompt}",
    ]
    if config.log.next_command:
        lines.append(f"next:     {config.log.next_command}")
    return "\n".join(lines)


def _main(_: flags.FlagValues, config: Config | None) -> None:
    assert config is not None
    train(config)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return command.run(lambda values: None, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
