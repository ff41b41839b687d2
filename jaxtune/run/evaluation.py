"""Loss and perplexity of a model over rows of data."""

import math
from collections.abc import Callable

import jax

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.models.decoder import Parameters
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.run.assembly import call_of
from jaxtune.run.model import Model
from jaxtune.run.process import compiler_options
from jaxtune.run.step import make_eval_step


def make_evaluate(
    config: Config, model: Model, rows: data.Rows, mesh: jax.sharding.Mesh
) -> Callable[[Parameters, Parameters], dict[str, float]]:
    """(trained, frozen) -> eval_loss in nats a token and eval_perplexity, over all of `rows` or eval.max_batches."""
    recipe = recipe_of(config.precision, model.linears)
    step = jax.jit(
        make_eval_step(model.graph, cross_entropy(), recipe, call_of(config, recipe)._replace(remat="none")),
        compiler_options=compiler_options(config.train.deterministic),
    )
    rows_per_batch = config.train.micro_batch_size * data_shards(mesh)
    stop_row = rows.total(1)
    if config.eval.max_batches is not None:
        stop_row = min(stop_row, config.eval.max_batches * rows_per_batch)
    sharding = jax.NamedSharding(mesh, jax.P(None, *by_token()))

    def evaluate(trained: Parameters, frozen: Parameters) -> dict[str, float]:
        total, tokens = 0.0, 0
        for _, batch in data.batches(rows, (1, rows_per_batch, config.data.seq_len), sharding, 0, stop_row):
            sums = jax.device_get(step(trained, frozen, batch))
            total, tokens = total + float(sums.loss), tokens + int(sums.weight)
        loss = total / max(tokens, 1)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    return evaluate
