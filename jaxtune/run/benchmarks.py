"""Scores of benchmark tasks of lm-evaluation-harness while a run trains (eval.tasks)."""

import contextlib
import re
from collections.abc import Callable, Iterator

import jax

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import EvaluatedModel
from jaxtune.models.decoder import Parameters
from jaxtune.weights.model import Model

# (trained, frozen) -> metrics, named tasks/TASK/METRIC.
ScoreTasks = Callable[[Parameters, Parameters], dict[str, float]]

# The flags of `jaxtune evaluate --tasks` in messages; each is also an option of a run.
_FLAG = re.compile(r"--(?:tasks|(num_fewshot|limit|include_path|apply_chat_template))\b")


def open_benchmarks(
    config: Config, model: Model, mesh: jax.sharding.Mesh, beat: Callable[[], None]
) -> ScoreTasks | None:
    """Load the tasks of eval.tasks and return a function that scores weights by them; None without eval.tasks.

    beat: is called after each batch.

    Raises:
        UserError: lm-eval is not installed, a task does not exist, cannot be loaded or cannot be run.
    """
    options = config.eval
    if not options.tasks:
        return None
    with _name_options():
        from jaxtune.evaluation import lm_evaluation_harness as harness  # slow, and needs an optional package

        request = harness.EvalRequest(
            options.tasks,
            options.tasks_num_fewshot,
            options.tasks_limit,
            options.tasks_include_path,
            options.tasks_apply_chat_template,
        )
        tasks = harness.load_tasks(request)
        opened = EvaluatedModel(config, model, {}, {}, {}, None)
        lm = harness.DecoderLM(opened, model.folders.tokenizer, mesh, request.apply_chat_template, beat)
        for kwargs in tasks.generations:  # now, and not after hours of training
            lm.generation(kwargs)

    def score(trained: Parameters, frozen: Parameters) -> dict[str, float]:
        lm.set_weights(trained, frozen)
        with _name_options():
            results = harness.score_tasks(lm, request, tasks)
        lm.set_weights({}, {})  # an average of the weights would stay in memory
        return {f"tasks/{name}": value for name, value in harness.metrics_of(results).items()}

    return score


@contextlib.contextmanager
def _name_options() -> Iterator[None]:
    """Name options of a run in errors, in place of the flags of the command."""
    try:
        yield
    except UserError as error:
        named = _FLAG.sub(lambda flag: f"eval.tasks_{flag[1]}" if flag[1] else "eval.tasks", str(error))
        raise UserError(named) from error
