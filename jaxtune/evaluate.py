"""Evaluate a model on validation data: loss and perplexity, a classifier's accuracy, or the rewards of answers.

    python -m jaxtune.evaluate --run=runs/quickstart_lora
    python -m jaxtune.evaluate --config=quickstart_lora --model=runs/quickstart/export
    python -m jaxtune.evaluate --run=runs/quickstart_lora --tasks=hellaswag,gsm8k

The model is a run's (with the run's own options unless --config is given), --model (a Hugging Face folder, hub id or
adapter), or the base model of a recipe. --config.SECTION.OPTION=VALUE changes an option. Python files that only the
run's config.json names are not run; to run them, use --plugin=FILE or --config=RUN/config.json.

With --tasks, EleutherAI's lm-evaluation-harness evaluates the model instead (pip install 'jaxtune[lm-eval]'). Its flags
keep their names, its table is printed, and --model needs no --config. Results are also written to the run's folder or
to --output.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags and recipe before the slow imports below
    sys.exit(command.main("evaluate"))

from functools import partial
from pathlib import Path

import jax
from absl import flags

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import evaluate
from jaxtune.host import process
from jaxtune.host.preflight import check_writable
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import mesh_of
from jaxtune.parallel.mesh import make_mesh
from jaxtune.weights.trusted_code import config_to_evaluate

TASK_FLAGS = ("num_fewshot", "limit", "include_path", "apply_chat_template")


def run_command(values: flags.FlagValues, config: Config | None) -> None:
    """Print the metrics, or the table of --tasks."""
    if config is not None and values.run is not None and values.config is None:
        config = config_to_evaluate(config, values.run, reads_data=not values.tasks)
    if values.tasks:
        return _run_tasks(values, config)
    for name in (*TASK_FLAGS, "output"):
        if values[name].present:
            raise UserError(f"--{name}: has no effect without --tasks")
    assert config is not None
    mesh = _mesh(config)
    for name, value in evaluate(config, mesh, values.run, values.step, values.model).items():
        print(f"{name} {value:.6f}")


def _mesh(config: Config) -> jax.sharding.Mesh:
    process.configure(config)
    return make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)


def _run_tasks(values: flags.FlagValues, config: Config | None) -> None:
    output = values.output and Path(values.output)
    if output is not None:
        check_writable(output.parent, f"--output={values.output}")
    from jaxtune.evaluation import lm_evaluation_harness as harness  # slow, and needs an optional package

    tasks = harness.EvalRequest(tuple(values.tasks), **{name: getattr(values, name) for name in TASK_FLAGS})
    mesh = mesh_of([]) if config is None else _mesh(config)
    results, step = harness.run_tasks(tasks, config, mesh, values.run, values.step, values.model)
    print(harness.table(results))
    if output is None and values.run is not None:
        output = RunFolder(Path(values.run)).task_results(step)
    if output is not None:
        harness.write(results, output)
        print(f"results: {output}")


main = partial(command.main, "evaluate")
