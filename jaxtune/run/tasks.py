"""The tasks of a run between steps: samples, evaluations, callbacks after an epoch, checkpoints."""

import logging
from collections.abc import Callable
from typing import Any

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config.schema import Config
from jaxtune.evaluation.evaluator import Evaluate
from jaxtune.host.plugins import Callbacks
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.generation import continue_text
from jaxtune.models.decoder import Parameters
from jaxtune.parallel import multihost
from jaxtune.run.benchmarks import ScoreTasks
from jaxtune.run.best import is_judged
from jaxtune.run.loop import Position, StepInfo, Task, every
from jaxtune.run.watch import Watch
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.state import State
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")


def tasks_of(
    config: Config,
    position: Position,
    frozen: Parameters,
    watch: Watch,
    evaluate: Evaluate | None,
    benchmark: ScoreTasks | None,
    sample: Callable[[int, Parameters], None],
    save: Callable[[State, Position], None],
) -> list[Task]:
    """The tasks of a run, in order. The task that saves is last: others change the state that a checkpoint holds.

    Args:
        config: the options of the run.
        position: of the run; the loop updates it.
        frozen: the frozen parameters.
        watch: gets metrics and callbacks.
        evaluate: None without validation data.
        benchmark: None without eval.tasks.
        sample: (step, parameters) -> None, writes samples.
        save: writes a checkpoint.
    """
    ckpt, options = config.ckpt, config.eval

    def write(state: State, at: Position) -> None:
        sample(at.step, {**frozen, **state.result})

    def judge(state: State, at: Position) -> None:
        assert evaluate is not None
        metrics = evaluate(state.result, frozen, state.reference)
        watch.evaluation(at.step, metrics)
        # The state before the first step cannot be the best one, because it is not saved.
        if at.step and is_judged(config):
            at.standing = at.standing.after(at.step, metrics, options)
            at.ended = at.ended or at.standing.ending(options)

    def score(state: State, at: Position) -> None:
        assert benchmark is not None
        watch.scores(at.step, benchmark(state.result, frozen))

    def end_epoch(state: State, at: Position) -> None:
        watch.plugins("on_epoch", at.step, round(watch.epoch(at.feed)))

    def save_due(at: StepInfo) -> bool:
        # A new best evaluation needs a checkpoint; `judge` runs before this, in the same moment.
        return every(ckpt.save_steps, ckpt.save_epochs)(at) or (ckpt.keep_best and position.standing.step == at.step)

    tasks = [Task("epoch", every(epochs=1.0), end_epoch, at_end=False)]
    if options.sample_prompt and options.sample_steps:
        tasks.append(Task("sample", every(options.sample_steps), write, at_end=False))
    if evaluate is not None:  # before saving: the rows of metrics after a checkpoint's step are cut on resume
        tasks.append(Task("eval", every(options.steps, options.epochs), judge, at_end=options.at_end))
    if benchmark is not None:
        tasks.append(Task("benchmarks", every(options.tasks_steps), score, at_end=options.at_end))
    return [*tasks, Task("save", save_due, save, at_end=ckpt.at_end, at_stop=True)]


def make_save(
    config: Config,
    checkpoints: CheckpointManager,
    record: dict[str, Any],
    model: Model,
    frozen: Parameters,
    callbacks: Callbacks,
    folder: RunFolder,
) -> Callable[[State, Position], None]:
    """Return (state, position) -> None, which saves a checkpoint. record: describes the run (`run.resume.record`)."""

    def save(state: State, at: Position) -> None:
        at.plugins = callbacks.states()
        saved = state._replace(base=state.base | {name: frozen[name] for name in model.starts})
        if not config.ckpt.save_optimizer:
            saved = saved._replace(optimizer=())
        best = at.standing.step if config.ckpt.keep_best else None
        checkpoints.save(at.step, saved, record | at.to_json(), model.grouping, best)
        callbacks("on_save", at.step, folder.checkpoints / str(at.step))

    return save


def make_sample(
    config: Config, model: Model, tokenizer: Tokenizer, folder: RunFolder
) -> Callable[[int, Parameters], None]:
    """Return (step, parameters) -> None, which continues eval.sample_prompt; the text is logged, and recorded."""
    prompt = config.eval.sample_prompt or ""

    def sample(step: int, parameters: Parameters) -> None:
        text = continue_text(model, parameters, tokenizer, prompt)
        log.info("sample: %s", text)
        if multihost.is_main():
            folder.add_sample(step, prompt, text)

    return sample
