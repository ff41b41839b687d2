"""Loss and perplexity of a run's model on the validation data."""

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
from absl import flags

from jaxtune import command, data, hf, runtime
from jaxtune.compiler import compiler_options
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.parallel.layout import TOKENS
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.run_folder import RunFolder, differences, open_run
from jaxtune.state import Model, recipe_of_run
from jaxtune.step import make_eval_step

log = logging.getLogger("jaxtune")


def make_evaluate(
    config: Config, model: Model, rows: data.Rows, mesh: jax.sharding.Mesh
) -> Callable[[Parameters, Parameters], dict[str, float]]:
    """(trained, frozen) -> eval_loss in nats a token and eval_perplexity, over all of `rows` or eval.max_batches."""
    step = jax.jit(
        make_eval_step(model.graph, cross_entropy, recipe_of_run(config, model)),
        compiler_options=compiler_options(config.train.deterministic),
    )
    rows_per_batch = config.train.micro_batch_size * data_shards(mesh)
    stop_row = rows.total(1)
    if config.eval.max_batches is not None:
        stop_row = min(stop_row, config.eval.max_batches * rows_per_batch)
    sharding = jax.NamedSharding(mesh, jax.P(None, *TOKENS))

    def evaluate(trained: Parameters, frozen: Parameters) -> dict[str, float]:
        total, tokens = 0.0, 0
        for _, batch in data.batches(rows, 1, rows_per_batch, config.data.seq_len, sharding, 0, stop_row):
            batch_total, batch_tokens = jax.device_get(step(trained, frozen, batch))
            total, tokens = total + float(batch_total), tokens + int(batch_tokens)
        loss = total / max(tokens, 1)
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    return evaluate


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values, required=True)
    flags.DEFINE_integer("step", None, "checkpoint; default: the newest good one", flag_values=values)


def _main(values: flags.FlagValues, config: Config | None) -> None:
    assert config is not None
    runtime.configure(config)
    runtime.show_log()
    mesh = make_mesh(config.mesh)
    run = open_run(RunFolder(Path(values.run)), mesh, values.step, low_precision=True)
    if config.model.path != run.config.model.path:
        raise UserError(
            f"the run is of model.path={run.config.model.path}, not {config.model.path}; give its own recipe"
        )
    changed = [
        f"  {key}: {before!r} then, {after!r} now"
        for section in ("quant", "precision")
        for key, before, after in differences(
            asdict(getattr(run.config, section)), asdict(getattr(config, section)), section
        )
        if key not in ("precision.master_dtype", "precision.gradient_dtype")  # of training alone
    ]
    if changed:
        raise UserError("\n".join(["the run was trained with other options:", *changed, "set them back"]))
    if config.data.seq_len > run.model.spec.max_positions:
        raise UserError(
            f"data.seq_len={config.data.seq_len} is more than the model's {run.model.spec.max_positions} positions"
        )
    _, documents = data.open_documents(config, hf.load_tokenizer(run.model.folder))
    if documents is None:
        raise UserError("no validation data: set data.eval_datasets or data.validation_split")
    rows = data.Rows(documents, config.data, epochs=1)
    log.info("validation: %s", rows.counts)
    for name, value in make_evaluate(config, run.model, rows, mesh)(run.trained, run.frozen).items():
        print(f"{name} {value:.6f}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return command.run(_define_flags, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
