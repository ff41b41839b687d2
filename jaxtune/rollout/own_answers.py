"""On-policy distillation: the student answers prompts, and the teacher scores these answers (GKD, arXiv:2306.13649)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtune import data
from jaxtune.columns import ADDED, TOKENS
from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.host.process import compiler_options
from jaxtune.inference.generation import Completion, completion_text
from jaxtune.models.decoder import Parameters
from jaxtune.models.score import Batch
from jaxtune.objectives.objective import Objective
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.rollout.completers import completer
from jaxtune.rollout.completion_rows import batch_of_documents
from jaxtune.rollout.completions_file import completions_file
from jaxtune.rollout.groups import means_of_completions
from jaxtune.scoring.kept_teacher import keep_teacher
from jaxtune.scoring.teacher_scores import Teacher
from jaxtune.training.assembly import forward_of
from jaxtune.training.state import State
from jaxtune.training.step import make_eval_step
from jaxtune.weights.model import Model


class ScoredAnswers(NamedTuple):
    """Answers of the student.

    Attributes:
        completions: an answer to each prompt.
        batch: a row for each prompt with its answer, whose tokens are trained, and with the teacher's columns.
    """

    completions: list[Completion]
    batch: Batch


# (trained, frozen, the prompt of each answer, the number of each) -> answers.
MakeAnswers = Callable[[Parameters, Parameters, list[Prompt], Sequence[int]], ScoredAnswers]


def make_answers(
    config: Config, model: Model, objective: Objective, tokenizer, teacher: Teacher, run: Path
) -> MakeAnswers:
    """Read the teacher and return a function that samples answers and lets the teacher score them.

    The student samples on the devices of the current mesh or, with rollout.server, on a server. The answers' numbers
    select their random bits. run: the run folder, for adapters that are sent to the server.

    Raises:
        UserError: as `read_parameters`; the function raises it as `completion_server.complete`.
    """
    complete, mesh = completer(config, model, tokenizer, run), jax.sharding.get_mesh()
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    like = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *by_token())))[TOKENS.name]
    columns = tuple(column for column in objective.columns if column.name not in ADDED)
    add_columns = keep_teacher(teacher)

    def make(trained: Parameters, frozen: Parameters, prompts: list[Prompt], numbers: Sequence[int]) -> ScoredAnswers:
        completions = complete(trained, frozen, [prompt.tokens for prompt in prompts], numbers)
        pairs = list(zip(prompts, completions))
        tokens = [[*prompt.tokens, *completion.tokens] for prompt, completion in pairs]
        weights = [[0] * len(prompt.tokens) + [1] * len(completion.tokens) for prompt, completion in pairs]
        return ScoredAnswers(
            completions, add_columns(batch_of_documents(config, columns, tokens, weights, {}, like))
        )

    return make


def make_distillation_step(
    config: Config, make: MakeAnswers, tokenizer, train_step: Callable[..., tuple[State, dict[str, Any]]], run: Path
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """Wrap `train_step`: return a function (state, frozen, prompts of a step, learning rate) -> (state, metrics).

    The metrics are those of `train_step` and `means_of_completions`.

    run: the run folder; with log.jsonl, it gets the answer to the first prompt of each step.
    """
    written = completions_file(config, run)

    def step(state: State, frozen: Parameters, asked: PromptBatch, rate: Any) -> tuple[State, dict[str, Any]]:
        prompts = asked.prompts
        answers = make(state.trained, frozen, prompts, range(asked.first, asked.first + len(prompts)))
        if written is not None:
            text = completion_text(answers.completions[0], tokenizer)
            line = {"prompt": prompts[0].given, "completion": prompts[0].begun + text}
            written.write(asked.first // len(prompts) + 1, [line])
        state, metrics = train_step(state, frozen, answers.batch, rate)
        of_completions = means_of_completions(answers.completions)
        return state, metrics | {name: np.asarray(value) for name, value in of_completions.items()}

    return step


def make_evaluate_answers(
    config: Config,
    model: Model,
    objective: Objective,
    make: MakeAnswers,
    prompts: list[Prompt],
    beat: Callable[[], None] = lambda: None,
) -> Callable[[Parameters, Parameters, Parameters], dict[str, float]]:
    """Return a function (trained, frozen, reference) -> eval_loss, eval_divergence and more, from one answer a prompt.

    eval.max_batches limits the number of batches, each as large as a step. beat: is called after each batch.
    """
    step = jax.jit(make_eval_step(forward_of(config, model), objective), compiler_options=compiler_options(config))
    at_once = config.train.grad_accum_steps * config.train.micro_batch_size * data_shards(jax.sharding.get_mesh())
    if config.eval.max_batches is not None:
        prompts = prompts[: config.eval.max_batches * at_once]

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        parts, completions = [], []
        for first in range(0, len(prompts), at_once):
            asked = prompts[first : first + at_once]
            # Negative numbers select random bits that no training step uses, the same in each evaluation.
            answers = make(trained, frozen, asked, [-1 - first - number for number in range(len(asked))])
            sums = jax.device_get(step(trained, frozen, answers.batch, {}))
            parts.append(jax.tree.map(lambda value: value.item(), sums))
            completions += answers.completions
            beat()
        total = jax.tree.map(lambda *values: sum(values), *parts)
        found = {"loss": total.loss / max(total.weight, 1)}
        found |= {name: value / max(weight, 1) for name, (value, weight) in total.metrics.items()}
        found |= means_of_completions(completions)
        return {f"eval_{name}": float(value) for name, value in found.items()}

    return evaluate
