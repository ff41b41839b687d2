"""Evaluation on a config's validation data: of a run, of any model, or of a recipe's starting point."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from jaxtune import data, hf
from jaxtune.config.differences import differences
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.evaluation.evaluator import Evaluate, make_evaluate
from jaxtune.host import process
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.host.run_folder import RunFolder
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.mesh import data_shards
from jaxtune.rollout import own_answers, rollouts
from jaxtune.rollout.completers import completer
from jaxtune.rollout.episodes.toolbox import load_functions, try_functions
from jaxtune.scoring.reference_scores import add_reference_scores
from jaxtune.scoring.teacher_scores import BASE, declare_teachers
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.assembly import objective_of, open_images, task_of
from jaxtune.training.memory import explain_out_of_memory
from jaxtune.weights.base import read_base
from jaxtune.weights.class_labels import resolve_labels
from jaxtune.weights.model import Model, declare_model
from jaxtune.weights.reference import is_kept
from jaxtune.weights.same_inputs import check_same_inputs
from jaxtune.weights.values import config_for_model, open_run, start_parameters, tokenizer_folder

log = logging.getLogger("jaxtune")

NO_DATA = "no validation data: set data.eval_datasets or data.validation_split"


class EvaluatedModel(NamedTuple):
    """A model to evaluate.

    Attributes:
        config: validation data and precision.
        model: declared parameters.
        trained, frozen: values of the parameters.
        reference: values that the run's objective compares with.
        step: of the checkpoint; None without a run.
    """

    config: Config
    model: Model
    trained: Parameters
    frozen: Parameters
    reference: Parameters
    step: int | None


@explain_missing_kernels()
def evaluate(
    config: Config, mesh: jax.sharding.Mesh, run: str | None = None, step: int | None = None, name: str | None = None
) -> dict[str, float]:
    """Evaluate a model: loss and perplexity; a classifier's accuracy; rewards; the divergence from a teacher.

    Args:
        config: The validation data and the precision.
        mesh: The devices.
        run: The folder of a run, whose model is evaluated.
        step: The run's checkpoint; None: the newest good one.
        name: Another model, without a run: a Hugging Face folder, hub id or adapter. With neither run nor name, the
            model from which the config starts.

    Raises:
        UserError: There is no validation data, or the arguments do not fit each other.
    """
    with explain_out_of_memory(config):
        opened = open_evaluated_model(config, mesh, run, step, name, reference=not config.samples)
        config, model = opened.config, opened.model
        evaluated_name = name or config.model.path if run is None else f"{run}, step {opened.step}"
        log.info("evaluated: %s", evaluated_name)
        home = tokenizer_home(model, config, name)
        tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
        if config.samples:
            evaluate_model, close = _make_evaluate_prompts(run, config, model, mesh, tokenizer)
        else:
            evaluate_model, close = _make_evaluate_documents(config, model, mesh, tokenizer), lambda: None
        try:
            return evaluate_model(opened.trained, opened.frozen, opened.reference)
        finally:
            close()


def tokenizer_home(model: Model, config: Config, name: str | None) -> Path:
    """Return the tokenizer's folder: the base model's or, if a model is evaluated by `name`, that model's own."""
    return model.folders.tokenizer if name is None else tokenizer_folder(model, config)


def open_evaluated_model(
    config: Config, mesh: jax.sharding.Mesh, run_path: str | None, step: int | None, name: str | None, reference: bool
) -> EvaluatedModel:
    """Open the model of a run, a named model, or the recipe's starting point; arguments as in `evaluate`.

    reference: whether the evaluation compares with the reference of a preference loss.
    """
    if run_path is None:
        if step is not None:
            raise UserError(f"--step={step} needs --run: only a run has checkpoints")
        config = resolve_labels(config if name is None else config_for_model(name, config))
        model = declare_model(read_base(config), config, mesh, train=name is None)
        if reference and (is_kept(config) or config.preference.precompute_reference):
            raise UserError(f"preference.loss={config.preference.loss!r} compares with a reference: give --run")
        trained, base, frozen = start_parameters(model, config)
        return EvaluatedModel(config, model, trained, {**frozen, **base}, {}, None)  # here the base does not change
    if name is not None:
        raise UserError("--run and --model: give only one of the two")
    run = open_run(RunFolder(Path(run_path)), mesh, step, config.train.plugins, low_precision=True, reference=reference)
    for option in ("path", "head"):
        then, now = getattr(run.config.model, option), getattr(config.model, option)
        if then != now:
            raise UserError(f"the run trained model.{option}={then}, not {now}; evaluate it with its own recipe")
    # Includes the labels of the training.
    config = resolve_labels(dataclasses.replace(config, model=run.config.model))
    then, now = dataclasses.asdict(run.config), dataclasses.asdict(config)
    changed = [
        f"  {key}: {before!r} then, {after!r} now"
        for section in ("quant", "serve", "precision")
        for key, before, after in differences(then[section], now[section], section)
        if key not in ("precision.master_dtype", "precision.gradient_dtype")  # only training uses them
    ]
    if changed:
        raise UserError("\n".join(["the run was trained with other options:", *changed, "set them back"]))
    if config.longest_document > (most := run.model.spec.max_positions):
        raise UserError(f"data.seq_len={config.data.seq_len} is more than the model's {most} positions")
    return EvaluatedModel(config, run.model, run.trained, run.frozen, run.reference, run.step)


def _make_evaluate_documents(config: Config, model: Model, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> Evaluate:
    documents = data.open_validation(config, tokenizer, model.spec.vocabulary, open_images(model, config))
    if not documents:
        raise UserError(NO_DATA)
    rows = data.rows_to_evaluate(documents, config, task_of(model, config).columns)
    check_same_inputs({}, {name: named.documents.key for name, named in rows.items()}, {"model.path": (model, config)})
    for name, set_rows in rows.items():
        for loss in set_rows.losses:
            log.warning("validation%s: %s", f" {name}" if name else "", loss)
        log.info("validation%s: %s", f" {name}" if name else "", set_rows.counts)
    scored = {name: add_reference_scores(config, model, mesh, set_rows) for name, set_rows in rows.items()}
    return make_evaluate(config, model, scored, mesh)


def _make_evaluate_prompts(
    run: str | None, config: Config, model: Model, mesh: jax.sharding.Mesh, tokenizer: Tokenizer
) -> tuple[Evaluate, Callable[[], None]]:
    """Return the evaluation of completions, and the function that ends its use of a server."""
    functions, train = load_functions(config), config.train
    trained, prompts = data.open_prompt_sets(config, tokenizer, functions.row_tools, open_images(model, config))
    if prompts is None:
        raise UserError(NO_DATA)
    check_same_inputs({}, {"": data.PromptSet(prompts).key}, {"model.path": (model, config)})
    folder = Path(run or config.train.output_dir) / "evaluation"  # for weights that are sent to a server
    if config.distill.own_answers:
        if BASE in config.distill.teachers.values() and not config.lora.enabled:
            raise UserError(
                "distill.teacher=base: this model has no adapters, so it would be compared with itself; evaluate the "
                "run or its adapter"
            )
        objective, complete = objective_of(config, model), completer(config, model, tokenizer, folder)
        teachers = declare_teachers(config, tokenizer, model.spec.vocabulary, mesh)
        score = own_answers.make_score_answers(config, model, objective, teachers)
        parts = own_answers.Distillation(objective, complete, score)
        return own_answers.make_evaluate_answers(config, model, parts, prompts), complete.close
    columns = data.columns_of([*trained, *prompts])
    process.on_main(lambda: try_functions(config, functions, prompts[0], tokenizer, columns))
    opened = tokenizer, functions.rewards, folder, functions.toolbox
    make_rollout = rollouts.make_rollouts(config, model, *opened, columns)
    completions_at_once = train.micro_batch_size * train.grad_accum_steps * data_shards(mesh)
    return rollouts.make_evaluate(config, make_rollout, prompts, completions_at_once), make_rollout.close
