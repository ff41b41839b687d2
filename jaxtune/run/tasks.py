"""What a run does between its steps: samples, evaluations, callbacks after an epoch, checkpoints."""

from collections.abc import Callable

from jaxtune.config.schema import Config
from jaxtune.evaluation.evaluator import Evaluate
from jaxtune.models.decoder import Parameters
from jaxtune.run.best import is_judged
from jaxtune.run.loop import Moment, Position, Task, each
from jaxtune.run.watch import Watch
from jaxtune.training.state import State


def tasks_of(
    config: Config,
    position: Position,
    frozen: Parameters,
    watch: Watch,
    evaluate: Evaluate | None,
    sample: Callable[[int, Parameters], None],
    save: Callable[[State, Position], None],
) -> list[Task]:
    """The tasks of a run, those that change what a checkpoint holds before the one that saves it.

    position: of the run, which the loop moves. evaluate: None where there is nothing to evaluate on. sample: (step,
    parameters).
    """
    ckpt, options = config.ckpt, config.eval

    def write(state: State, at: Position) -> None:
        sample(at.step, {**frozen, **state.result})

    def judge(state: State, at: Position) -> None:
        assert evaluate is not None
        metrics = evaluate(state.result, frozen, state.reference)
        watch.evaluation(at.step, metrics)
        # What was there before the first step is never the best: there is no checkpoint of it.
        if at.step and is_judged(config):
            at.standing = at.standing.after(at.step, metrics, options)
            at.ended = at.ended or at.standing.ending(options)

    def end_epoch(state: State, at: Position) -> None:
        watch.plugins("on_epoch", at.step, round(watch.epoch(at.feed)))

    def save_due(at: Moment) -> bool:
        return each(ckpt.save_steps, ckpt.save_epochs)(at) or (ckpt.keep_best and position.standing.step == at.step)

    tasks = [Task("epoch", each(epochs=1.0), end_epoch, at_end=False)]
    if options.sample_prompt and options.sample_steps:
        tasks.append(Task("sample", each(options.sample_steps), write, at_end=False))
    if evaluate is not None:  # before saving: the rows of metrics after a checkpoint's step are cut on resume
        tasks.append(Task("eval", each(options.steps, options.epochs), judge, at_end=options.at_end))
    return [*tasks, Task("save", save_due, save, at_end=ckpt.at_end, at_stop=True)]
