"""The start of a run: checks of the declared model, the functions that the loop calls, and the first state."""

import dataclasses
import logging
from contextlib import ExitStack

import jax

from jaxtune.config.schema import Config
from jaxtune.data import PromptFeed
from jaxtune.errors import UserError
from jaxtune.evaluation.evaluator import Evaluate, make_evaluate
from jaxtune.exports.copied_tensors import warn_lost_layers
from jaxtune.host.run_folder import RunFolder
from jaxtune.models.decoder import Parameters
from jaxtune.monitor.goodput import Goodput
from jaxtune.parallel.options import MemoryOptions
from jaxtune.quant.options import ServeOptions
from jaxtune.rollout import own_answers, rollouts
from jaxtune.rollout.completers import completer
from jaxtune.run.inputs import RunInputs
from jaxtune.run.loop import Position, TrainStep
from jaxtune.run.resume import Saved, restore_run
from jaxtune.training import memory
from jaxtune.training.assembly import Program, assemble, compile_step
from jaxtune.training.state import State
from jaxtune.weights.describe import describe_layout, describe_pipeline
from jaxtune.weights.served_linears import ServedLinears
from jaxtune.weights.values import check_files, frozen_parameters, read_reference, start_parameters

log = logging.getLogger("jaxtune")


def check_model(config: Config, program: Program, mesh: jax.sharding.Mesh, held: int) -> None:
    """Log the model and its sharding.

    Raises UserError if tensors are missing, or the state and `held` other bytes do not fit in a device's memory.
    """
    model = program.model
    log.info(describe_layout(model, mesh))
    if mesh.shape["stage"] > 1:
        log.info(describe_pipeline(model, config))
    if isinstance(model.linears, ServedLinears) and model.linears.left_out:
        served_as, others = config.serve.format, model.linears.left_out
        log.warning("serve.format=%r: linear layers that are not quantized: %s", served_as, others)
    check_files(model, config)
    if not config.lora.enabled or config.export.merge or config.lora.merge_interval:
        warn_lost_layers(model, config)
    memory.check_state(config, program, mesh, held)


def step_functions(
    config: Config,
    program: Program,
    compiled: jax.stages.Compiled,
    inputs: RunInputs,
    mesh: jax.sharding.Mesh,
    folder: RunFolder,
    goodput: Goodput,
    at_end: ExitStack,
) -> tuple[TrainStep, Evaluate | None]:
    """Return the step and the evaluation (None without validation data) that the loop calls.

    With reward functions, or a teacher of own answers, a step first samples completions of its prompts, and the
    evaluation scores completions too. at_end: is called when the run ends, however it does.
    """
    feed = inputs.feed
    if not isinstance(feed, PromptFeed):
        rows = feed.eval_rows
        return compiled, make_evaluate(config, program.model, rows, mesh, goodput.beat) if rows else None
    if config.distill.own_answers:
        return _distillation_functions(config, program, compiled, inputs, feed, folder, goodput, at_end)
    opened = inputs.tokenizer, inputs.rewards, folder.path, inputs.toolbox
    make_rollout = rollouts.make_rollouts(config, program.model, *opened, feed.columns)
    step = rollouts.make_rollout_step(config, program, make_rollout, compiled, folder.path, at_end)
    at_end.callback(make_rollout.close)
    if feed.eval_prompts is None:
        return step, None
    return step, rollouts.make_evaluate(config, make_rollout, feed.eval_prompts, feed.rows_per_step, goodput.beat)


def _distillation_functions(
    config: Config,
    program: Program,
    compiled: jax.stages.Compiled,
    inputs: RunInputs,
    feed: PromptFeed,
    folder: RunFolder,
    goodput: Goodput,
    at_end: ExitStack,
) -> tuple[TrainStep, Evaluate | None]:
    """As `step_functions`, for a teacher that scores the student's own answers; its weights are read here."""
    model, objective, tokenizer = program.model, program.objective, inputs.tokenizer
    with goodput.measure("teacher"):
        score = own_answers.make_score_answers(config, model, objective, inputs.teachers)
    parts = own_answers.Distillation(objective, completer(config, model, tokenizer, folder.path), score)
    at_end.callback(parts.completer.close)
    step = own_answers.make_distillation_step(config, parts, tokenizer, compiled, folder.path)
    if feed.eval_prompts is None:
        return step, None
    return step, own_answers.make_evaluate_answers(config, model, parts, feed.eval_prompts, goodput.beat)


def check_start_step(config: Config, total_steps: int) -> None:
    """Raise UserError if all steps of the run come before serve.start_step."""
    start_step = config.serve.start_step
    if start_step and start_step >= total_steps:
        raise UserError(
            f"serve.start_step={start_step}: the run has {total_steps} steps, so none would be trained as served; "
            "lower it, or train longer"
        )


def quantize_late(
    config: Config, program: Program, train_step: TrainStep, position: Position, chosen: MemoryOptions
) -> TrainStep:
    """Return the step of a run whose first serve.start_step steps multiply by the unquantized weights.

    Their program is compiled here, with the memory options `chosen`. Both programs have the same state.
    position: the run's progress, which the loop advances.
    """
    start_step = config.serve.start_step
    if position.step >= start_step:
        return train_step
    serve = ServeOptions(distill=config.serve.distill)  # the same teacher, and so the same columns
    plain = dataclasses.replace(config, serve=serve, memory=chosen)
    log.info("compiling the step before serve.start_step=%d", start_step)
    first = compile_step(assemble(program.model.base, plain, jax.sharding.get_mesh()), plain)
    return lambda *arguments: (first if position.step < start_step else train_step)(*arguments)


def first_state(config: Config, program: Program, saved: Saved | None) -> tuple[State, Parameters, Position]:
    """Return state, frozen parameters and position: those in the checkpoint or, without one, the initial ones."""
    model = program.model
    if saved is not None:
        state, starts, position = restore_run(saved, program, config.ckpt.load_optimizer)
        return state, starts | frozen_parameters(model, config, but={**state.base, **starts}), position
    trained, base, frozen = start_parameters(model, config)
    state = jax.jit(program.start, donate_argnums=0)(trained)._replace(base=base)  # no copy of `trained`
    if state.reference and config.preference.reference != "start":
        state = state._replace(reference=read_reference(model, config, state.reference))
    # Evaluations at the start are tasks that were put off: the loop runs such tasks before its first step.
    return state, frozen, Position(put_off=("eval", "benchmarks") if config.eval.at_start else ())
