"""Loss and perplexity, or accuracy, of a model over rows of data."""

import math
from collections.abc import Callable, Collection, Mapping

import jax

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Parameters
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.training.assembly import Program, call_of, task_of
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
    """(trained, frozen, reference) -> eval_loss and more, over all of `rows`, or eval.max_batches of each set of them.

    Of a language model in nats a token, with eval_perplexity and eval_token_accuracy; of a classifier that of a
    document, and eval_accuracy; of preferences that of a pair or an answer, and the metrics of `objectives.preference`.
    A metric of a kind that the rows lack, such as unwanted answers, is left out.
    `rows`: by the name of their set; of several sets those with a name have metrics of their own too, as
    eval_NAME_loss.
    `beat` is called after each batch.
    """
    task, step = _step(config, model)
    step = jax.jit(step, compiler_options=compiler_options(config))
    rows_per_batch = (config.eval.micro_batch_size or config.train.micro_batch_size) * data_shards(mesh)
    shape, sharding = (1, rows_per_batch, config.data.seq_len), jax.NamedSharding(mesh, jax.P(None, *by_token()))

    def sums_of(own: data.Rows, *parameters: Parameters) -> Sums:
        trained, frozen, reference = parameters
        stop_row, most, found = own.total(1), config.eval.max_batches, []
        if most is not None:
            stop_row = min(stop_row, most * rows_per_batch)
        for _, batch in data.batches(own, shape, sharding, 0, stop_row, config.data):
            # In Python's numbers, which neither round nor wrap however many batches there are.
            sums = jax.device_get(step(trained, frozen, batch, reference))
            found.append(jax.tree.map(lambda value: value.item(), sums))
            beat()
        return _added(found)

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        sums = {name: sums_of(own, trained, frozen, reference) for name, own in rows.items()}
        of_all = _described(_added(list(sums.values())), task)
        return _named({"": of_all} | {name: _described(sums[name], task) for name in _apart(sums)})

    return evaluate


def metric_names(config: Config, program: Program, sets: Collection[str]) -> list[str]:
    """What `make_evaluate` of these sets of rows will find, by tracing it alone."""
    task, step = _step(config, program.model)
    state = program.state
    sums = jax.eval_shape(step, state.trained, {**program.frozen, **state.base}, program.batch, state.reference)
    found = _described(jax.tree.map(lambda _: 1.0, sums), task)
    return list(_named(dict.fromkeys(("", *_apart(sets)), found)))


def _apart(sets: Collection[str]) -> list[str]:
    """The sets that have metrics of their own: a single one has those of all."""
    return [name for name in sets if name] if len(sets) > 1 else []


def _step(config: Config, model: Model) -> tuple[Objective, Callable[..., Sums]]:
    """What a model is evaluated by, and the step that does."""
    recipe, task = recipe_of(config.precision, model.linears), task_of(model, config)
    return task, make_eval_step(model.graph, task, recipe, call_of(config, recipe)._replace(remat="none"))


def _described(total: Sums, task: Objective) -> dict[str, float]:
    loss = float(total.loss / max(total.weight, 1))
    means = {name: float(value / max(weight, 1)) for name, (value, weight) in total.metrics.items() if weight}
    perplexity = {"perplexity": math.exp(min(loss, 700.0))} if task.counts == "target_tokens" else {}
    return {"loss": loss, **perplexity, **means}


def _named(of_sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """eval_loss of all rows, whose name is "", eval_NAME_loss of a set of them."""
    return {
        f"eval_{name}_{metric}" if name else f"eval_{metric}": value
        for name, metrics in of_sets.items()
        for metric, value in metrics.items()
    }


def _added(sums: list[Sums]) -> Sums:
    return jax.tree.map(lambda *values: sum(values), *sums)
