"""Loss and perplexity, or accuracy, of a model over rows of data."""

import math
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Parameters
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.training.assembly import Program, forward_of, task_of
from jaxtune.training.step import make_eval_step
from jaxtune.weights.model import Model

Evaluate = Callable[[Parameters, Parameters, Parameters], dict[str, float]]
"""(trained, frozen, reference) -> metrics by name."""


def make_evaluate(
    config: Config,
    model: Model,
    rows: Mapping[str, data.Rows],
    mesh: jax.sharding.Mesh,
    beat: Callable[[], None] = lambda: None,
) -> Evaluate:
    """Make a function (trained, frozen, reference) -> eval_loss and further metrics over `rows`.

    The loss of a language model is in nats per token, with eval_perplexity and eval_token_accuracy. A classifier's is
    per document, with eval_accuracy. A decision model's is per question, with the metrics of `objectives.decision`. A
    preference loss is per pair or answer, with the metrics of
    `objectives.preference`. Metrics that do not apply to the rows, such as those over unwanted answers, are left out.

    Args:
        config: The run's config; eval.max_batches limits the batches of each set.
        model: The model.
        rows: Rows by the name of their set. If there are several sets, each named one also has its own metrics, such
            as eval_NAME_loss.
        mesh: The devices.
        beat: Called after each batch.
    """
    task, step = _step(config, model)
    step = jax.jit(step, compiler_options=compiler_options(config))
    rows_per_batch = (config.eval.micro_batch_size or config.train.micro_batch_size) * data_shards(mesh)
    # (micro-batches, b, s), as a training step gets them
    shape, sharding = (1, rows_per_batch, config.data.seq_len), jax.NamedSharding(mesh, jax.P(None, *by_token()))

    def sum_set(set_rows: data.Rows, *parameters: Parameters) -> Sums:
        trained, frozen, reference = parameters
        stop_row, most, sums_of_batches = set_rows.total(1), config.eval.max_batches, []
        if most is not None:
            stop_row = min(stop_row, most * rows_per_batch)
        for _, batch in data.batches(set_rows, shape, sharding, 0, stop_row, config.data):
            # Add up as Python numbers, so that sums over many batches neither wrap nor round to float32.
            sums = jax.device_get(step(trained, frozen, batch, reference))
            sums_of_batches.append(jax.tree.map(_as_python, sums))
            beat()
        return _add(sums_of_batches)

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        sums = {name: sum_set(set_rows, trained, frozen, reference) for name, set_rows in rows.items()}
        overall = _means(_add(list(sums.values())), task)
        return _flatten({"": overall} | {name: _means(sums[name], task) for name in _reported_sets(sums)})

    return evaluate


def metric_names(config: Config, program: Program, sets: Collection[str]) -> list[str]:
    """Return the names of the metrics that `make_evaluate` reports for these sets of rows, only by tracing the step."""
    task, step = _step(config, program.model)
    state = program.state
    sums = jax.eval_shape(step, state.trained, {**program.frozen, **state.base}, program.batch, state.reference)
    # Ones, because a metric without weight would be left out.
    metrics = _means(jax.tree.map(lambda sum_: np.ones(sum_.shape), sums), task)
    return list(_flatten(dict.fromkeys(("", *_reported_sets(sets)), metrics)))


def _reported_sets(sets: Collection[str]) -> list[str]:
    """Return the sets with metrics of their own; none if there is only one set, whose metrics are the overall ones."""
    return [name for name in sets if name] if len(sets) > 1 else []


def _step(config: Config, model: Model) -> tuple[Objective, Callable[..., Sums]]:
    """Return the objective a model is evaluated by, and the evaluation step."""
    task = task_of(model, config)
    return task, make_eval_step(forward_of(config, model), task)


def _means(total: Sums, task: Objective) -> dict[str, float]:
    loss = float(total.loss / max(total.weight, 1))
    # Cap the exponent, because exp overflows a float above 709.
    perplexity = {"perplexity": math.exp(min(loss, 700.0))} if task.counts == "target_tokens" else {}
    return {"loss": loss, **perplexity, **task.summarise(total.metrics)}


def _as_python(value: np.ndarray) -> float | np.ndarray:
    return value.astype(np.float64) if value.ndim else value.item()


def _flatten(metrics_by_set: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Name the metrics of each set: eval_METRIC of all rows, whose name is "", and eval_NAME_METRIC of a set."""
    return {
        f"eval_{name}_{metric}" if name else f"eval_{metric}": value
        for name, metrics in metrics_by_set.items()
        for metric, value in metrics.items()
    }


def _add(sums: list[Sums]) -> Sums:
    return jax.tree.map(lambda *values: sum(values), *sums)
