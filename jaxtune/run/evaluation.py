"""Loss and perplexity, or accuracy, of a model over rows of data."""

import math
from collections.abc import Callable

import jax

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.run.assembly import call_of, task_of
from jaxtune.run.model import Model
from jaxtune.run.process import compiler_options
from jaxtune.run.step import make_eval_step


def make_evaluate(
    config: Config, model: Model, rows: data.Rows, mesh: jax.sharding.Mesh, beat: Callable[[], None] = lambda: None
) -> Callable[[Parameters, Parameters, Parameters], dict[str, float]]:
    """(trained, frozen, reference) -> eval_loss and more, over all of `rows` or eval.max_batches.

    Of a language model in nats a token, and eval_perplexity; of a classifier that of a document, and eval_accuracy; of
    preferences that of a pair or an answer, and the metrics of `objectives.preference`.
    `beat` is called after each batch.
    """
    recipe, task = recipe_of(config.precision, model.linears), task_of(model, config)
    step = jax.jit(
        make_eval_step(model.graph, task, recipe, call_of(config, recipe)._replace(remat="none")),
        compiler_options=compiler_options(config),
    )
    rows_per_batch = config.train.micro_batch_size * data_shards(mesh)
    stop_row = rows.total(1)
    if config.eval.max_batches is not None:
        stop_row = min(stop_row, config.eval.max_batches * rows_per_batch)
    shape, sharding = (1, rows_per_batch, config.data.seq_len), jax.NamedSharding(mesh, jax.P(None, *by_token()))

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        sums = []
        for _, batch in data.batches(rows, shape, sharding, 0, stop_row, config.data):
            # In Python's numbers, which neither round nor wrap however many batches there are.
            sums.append(
                jax.tree.map(lambda value: value.item(), jax.device_get(step(trained, frozen, batch, reference)))
            )
            beat()
        total = jax.tree.map(lambda *values: sum(values), *sums)
        loss = total.loss / max(total.weight, 1)
        means = {f"eval_{name}": value / max(weight, 1) for name, (value, weight) in total.metrics.items()}
        perplexity = {"eval_perplexity": math.exp(min(loss, 700.0))} if task.counts == "target_tokens" else {}
        return {"eval_loss": loss, **perplexity, **means}

    return evaluate
