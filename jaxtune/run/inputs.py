"""The inputs of a run: tokenizer, rows or prompts, reward functions, and scores of models that no step runs."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax

from jaxtune import data, hf
from jaxtune.config.schema import Config
from jaxtune.host import process
from jaxtune.monitor.goodput import Goodput
from jaxtune.rollout.episodes.toolbox import RolloutFunctions, Toolbox, load_functions, try_functions
from jaxtune.rollout.own_answers import teacher_numbers
from jaxtune.rollout.rewards import Reward
from jaxtune.scoring.reference_scores import add_reference_scores
from jaxtune.scoring.teacher_scores import Teacher, add_teacher_columns, declare_teachers
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.assembly import Program, open_images
from jaxtune.weights.model import Model
from jaxtune.weights.same_inputs import check_same_inputs


class RunInputs(NamedTuple):
    """The inputs of a run.

    Attributes:
        tokenizer: The model's tokenizer.
        feed: Batches of rows, or of prompts if the run samples answers to them.
        rewards: The reward functions by name; empty unless the run learns from rewards.
        toolbox: The tools and environments of its completions; None without both.
        teachers: The declared teachers (distill.teacher) by name; None: the student without its adapters.
    """

    tokenizer: Tokenizer
    feed: data.Feed | data.PromptFeed
    rewards: Mapping[str, Reward]
    toolbox: Toolbox | None
    teachers: Mapping[str, Teacher | None]


def open_inputs(config: Config, program: Program, mesh: jax.sharding.Mesh, goodput: Goodput) -> RunInputs:
    """Open the inputs of a run; documents are tokenised, or read from the cache.

    Raises UserError for data, rewards or a teacher that the run cannot use.
    """
    model = program.model
    with goodput.measure("tokenizer"):
        tokenizer = hf.load_tokenizer(model.folders.tokenizer, config.chat.template, config.data.special_tokens)
    with goodput.measure("data"):
        functions, images = load_functions(config), open_images(model, config)
        teachers = declare_teachers(config, tokenizer, model.spec.vocabulary, mesh)
        if config.samples:
            feed = data.open_prompts(config, tokenizer, mesh, functions.row_tools, images)
            teacher_numbers([*feed.documents.prompts, *(feed.eval_prompts or ())], tuple(teachers))
            if functions.rewards:
                process.on_main(lambda: _try_functions(config, functions, feed, tokenizer))
        else:
            vocabulary, columns = model.spec.vocabulary, program.objective.columns
            feed = data.open_feed(config, tokenizer, vocabulary, mesh, columns, images)
    return RunInputs(tokenizer, feed, functions.rewards, functions.toolbox, teachers)


def _try_functions(config: Config, functions: RolloutFunctions, feed: data.PromptFeed, tokenizer: Tokenizer) -> None:
    tried = {"first prompt": feed.documents.prompts[0]}
    if config.data.eval_datasets and feed.eval_prompts:  # may have other columns
        tried["first validation prompt"] = feed.eval_prompts[0]
    for which, prompt in tried.items():
        try_functions(config, functions, prompt, tokenizer, feed.columns, which)


def check_inputs(inputs: RunInputs, config: Config, model: Model) -> None:
    """Raise UserError in every process, if the processes do not read the same data, weights and teachers."""
    models = {"model.path": (model, config)}
    for name, teacher in inputs.teachers.items():
        models |= {f"distill.teacher {name}".rstrip(): (teacher.model, teacher.config)} if teacher else {}
    check_same_inputs({"data.datasets": inputs.feed.content_key}, inputs.feed.eval_keys, models)


def add_scores(inputs: RunInputs, config: Config, model: Model, mesh: jax.sharding.Mesh, goodput: Goodput) -> RunInputs:
    """Return the inputs with columns of scores by the reference of a preference loss, and by a teacher.

    They are computed here, or read from the cache, so that no step runs these models. A teacher of the
    student's own answers is kept instead: see `run.start`.
    """
    with goodput.measure("reference"):
        feed = inputs.feed.with_rows(partial(add_reference_scores, config, model, mesh))
    with goodput.measure("teacher"):
        return inputs._replace(feed=add_teacher_columns(inputs.teachers.get(""), mesh, feed))
