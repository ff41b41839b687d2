"""Loss and perplexity of a model on validation data; of a classifier loss and accuracy; of rewarded answers rewards.

    python -m jaxtune.evaluate --run=runs/quickstart_lora
    python -m jaxtune.evaluate --config=quickstart_lora --model=runs/quickstart/export

The model is that of a run (with the run's own options unless --config is given), --model (a Hugging Face folder, hub id
or adapter), or the model that a recipe starts from. --config.SECTION.OPTION=VALUE changes an option.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from absl import flags

from jaxtune import command, data, hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.run import process, rollouts
from jaxtune.run.assembly import task_of
from jaxtune.run.evaluation import make_evaluate
from jaxtune.run.folder import RunFolder
from jaxtune.run.labels import labelled
from jaxtune.run.memory import out_of_memory_is_answered
from jaxtune.run.model import Model, declare_model, read_base
from jaxtune.run.reference import is_kept
from jaxtune.run.resume import differences
from jaxtune.run.rewards import load_rewards
from jaxtune.run.scored import with_reference
from jaxtune.run.values import frozen_parameters, initial_parameters, of_model, open_run, tokenizer_folder

log = logging.getLogger("jaxtune")

NO_DATA = "no validation data: set data.eval_datasets or data.validation_split"
Evaluate = Callable[[Parameters, Parameters, Parameters], dict[str, float]]


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "folder of the run", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of the run; default: the newest good one", flag_values=values)
    flags.DEFINE_string("model", None, "Hugging Face folder, hub id or adapter, instead of a run", flag_values=values)


def _recipe(values: flags.FlagValues) -> str | None:
    return None if values.run is None else str(RunFolder(Path(values.run)).config)


def _open(
    values: flags.FlagValues, config: Config, mesh: jax.sharding.Mesh
) -> tuple[Config, Model, Parameters, Parameters, Parameters]:
    """(config, model, trained, frozen, reference): of a run, of --model, or of the recipe's starting point."""
    if values.run is None:
        if values.step is not None:
            raise UserError(f"--step={values.step}: without --run there are no checkpoints")
        config = labelled(config if values.model is None else of_model(values.model, config))
        model = declare_model(read_base(config), config, mesh, train=values.model is None)
        if not config.rollout.rewards and (is_kept(config) or config.preference.precompute_reference):
            raise UserError(f"preference.loss={config.preference.loss!r} compares with a reference: give --run")
        return config, model, initial_parameters(model, config), frozen_parameters(model, config), {}
    if values.model is not None:
        raise UserError("--run and --model: one at a time")
    run = open_run(RunFolder(Path(values.run)), mesh, values.step, low_precision=True, reference=True)
    for option in ("path", "head"):
        trained, asked = getattr(run.config.model, option), getattr(config.model, option)
        if trained != asked:
            raise UserError(f"the run trained model.{option}={trained}, not {asked}; give its own recipe")
    config = dataclasses.replace(config, model=run.config.model)  # with the labels that it was trained with
    then, now = dataclasses.asdict(run.config), dataclasses.asdict(config)
    changed = [
        f"  {key}: {before!r} then, {after!r} now"
        for section in ("quant", "precision")
        for key, before, after in differences(then[section], now[section], section)
        if key not in ("precision.master_dtype", "precision.gradient_dtype")  # only training uses them
    ]
    if changed:
        raise UserError("\n".join(["the run was trained with other options:", *changed, "set them back"]))
    if config.data.seq_len > (most := run.model.spec.max_positions):
        raise UserError(f"data.seq_len={config.data.seq_len} is more than the model's {most} positions")
    return config, run.model, run.trained, run.frozen, run.reference


def _main(values: flags.FlagValues, config: Config) -> None:
    process.configure(config)
    with out_of_memory_is_answered(config):
        _evaluate(values, config)


def _evaluate(values: flags.FlagValues, config: Config) -> None:
    mesh = make_mesh(config.mesh, process.devices(config.device), parallel=config.parallel)
    config, model, trained, frozen, reference = _open(values, config, mesh)
    home = model.folders.tokenizer if values.model is None else tokenizer_folder(model, config)  # a run uses its base's
    tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
    if config.rollout.rewards:
        evaluate = _of_prompts(values, config, model, mesh, tokenizer)
    else:
        evaluate = _of_documents(config, model, mesh, tokenizer)
    for name, value in evaluate(trained, frozen, reference).items():
        print(f"{name} {value:.6f}")


def _of_documents(config: Config, model: Model, mesh: jax.sharding.Mesh, tokenizer) -> Evaluate:
    documents = data.open_validation(config, tokenizer, model.spec.vocabulary)
    if not documents:
        raise UserError(NO_DATA)
    rows = data.rows_to_evaluate(documents, config, task_of(model, config).columns)
    for name, own in rows.items():
        log.info("validation%s: %s", f" {name}" if name else "", own.counts)
    return make_evaluate(
        config, model, {name: with_reference(config, model, mesh, own) for name, own in rows.items()}, mesh
    )


def _of_prompts(values: flags.FlagValues, config: Config, model: Model, mesh: jax.sharding.Mesh, tokenizer) -> Evaluate:
    rewards, train = load_rewards(config.rollout.rewards), config.train
    _, prompts = data.open_prompt_sets(config, tokenizer)
    if prompts is None:
        raise UserError(NO_DATA)
    folder = Path(values.run or config.train.output_dir) / "evaluation"  # for an adapter that is sent to a server
    make = rollouts.make_rollouts(config, model, tokenizer, rewards, folder)
    at_once = train.micro_batch_size * train.grad_accum_steps * data_shards(mesh)
    return rollouts.make_evaluate(config, make, prompts, at_once)


main = partial(command.run, _define_flags, _main, recipe=_recipe)

if __name__ == "__main__":
    sys.exit(main())
