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
from jaxtune.models.head.score import Batch
from jaxtune.objectives.objective import Objective
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.rollout.completers import Completer
from jaxtune.rollout.completion_rows import batch_of_documents
from jaxtune.rollout.completions_file import completions_file
from jaxtune.rollout.groups import means_of_completions
from jaxtune.scoring.kept_teacher import keep_teacher
from jaxtune.scoring.teacher_scores import Teacher
from jaxtune.training.assembly import forward_of
from jaxtune.training.state import State
from jaxtune.training.step import make_eval_step
from jaxtune.weights.model import Model

# (trained, frozen, prompts, answers) -> a batch of the prompts with their answers, whose tokens are trained, and the
# teacher's columns. Without answers, the batch has the answers in the data.
ScoreAnswers = Callable[[Parameters, Parameters, Sequence[Prompt], Sequence[Completion] | None], Batch]


class Distillation(NamedTuple):
    """The parts of on-policy distillation.

    Attributes:
        objective: the divergence from the teacher.
        completer: samples the student's answers, on the devices of the run or on a server.
        score: makes the batch of a step, with what the teacher says.
    """

    objective: Objective
    completer: Completer
    score: ScoreAnswers

    def answer(
        self, trained: Parameters, frozen: Parameters, prompts: Sequence[Prompt], numbers: Sequence[int]
    ) -> list[Completion]:
        """Return the student's answer to each prompt. The prepared weights, perhaps a copy, are freed afterwards."""
        weights = self.completer.prepare(trained, frozen)
        return self.completer.complete(weights, [prompt.tokens for prompt in prompts], numbers)


def make_score_answers(config: Config, model: Model, objective: Objective, teacher: Teacher | None) -> ScoreAnswers:
    """Read the teacher and return a function that lets it score answers; teacher: as in `keep_teacher`.

    Raises UserError as `keep_teacher`.
    """
    mesh, add_columns = jax.sharding.get_mesh(), keep_teacher(config, model, teacher)
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    like = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *by_token())))[TOKENS.name]
    columns = tuple(column for column in objective.columns if column.name not in ADDED)

    def rows(prompts: Sequence[Sequence[int]], answers: Sequence[Completion], packing: bool) -> Batch:
        tokens = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers)]
        weights = [[0] * len(prompt) + [1] * len(answer.tokens) for prompt, answer in zip(prompts, answers)]
        return batch_of_documents(config, columns, tokens, weights, {}, like, packing)

    def score(
        trained: Parameters, frozen: Parameters, prompts: Sequence[Prompt], answers: Sequence[Completion] | None
    ) -> Batch:
        if answers is None:
            documents = [prompt.document for prompt in prompts if prompt.document is not None]
            tokens, weights = zip(*((document.tokens, document.loss_weights) for document in documents))
            batch = seen = batch_of_documents(config, columns, tokens, weights, {}, like)
        else:
            # If the teacher sees other prompts, it finds each answer in the row that the student has it in.
            others = any(prompt.teacher_tokens for prompt in prompts)
            batch = seen = rows([prompt.tokens for prompt in prompts], answers, packing=not others)
            if others:
                seen = rows([prompt.teacher_tokens or prompt.tokens for prompt in prompts], answers, packing=False)
        return add_columns(trained, frozen, batch, seen)

    return score


def make_distillation_step(
    config: Config, parts: Distillation, tokenizer, train_step: Callable[..., tuple[State, dict[str, Any]]], run: Path
) -> Callable[..., tuple[State, dict[str, Any]]]:
    """Wrap `train_step`: return a function (state, frozen, prompts of a step, learning rate) -> (state, metrics).

    As in TRL's GKD, distill.own_answers is the probability that a step trains on the student's answers, and not on
    those in the data. It is drawn by train.seed and the step's place in the data, so a resumed run draws the same.
    Metrics are from `train_step` and, if the student answered, from `means_of_completions`.

    run: the run folder; with log.jsonl, it gets the student's answer to the first prompt of each step.
    """
    written, share = completions_file(config, run), config.distill.own_answers

    def step(state: State, frozen: Parameters, asked: PromptBatch, rate: Any) -> tuple[State, dict[str, Any]]:
        prompts, answers, of_completions = asked.prompts, None, {}
        if np.random.default_rng([config.train.seed, asked.first]).random() < share:
            numbers = range(asked.first, asked.first + len(prompts))
            answers = parts.answer(state.trained, frozen, prompts, numbers)
            of_completions = means_of_completions(answers)
        if answers is not None and written is not None:
            text = completion_text(answers[0], tokenizer, after=prompts[0].tokens if prompts[0].begun else ())
            line = {"prompt": prompts[0].given, "completion": prompts[0].begun + text}
            written.write(asked.first // len(prompts) + 1, [line])
        batch = parts.score(state.trained, frozen, prompts, answers)
        state, metrics = train_step(state, frozen, batch, rate)
        return state, metrics | {name: np.asarray(value) for name, value in of_completions.items()}

    return step


def make_evaluate_answers(
    config: Config, model: Model, parts: Distillation, prompts: list[Prompt], beat: Callable[[], None] = lambda: None
) -> Callable[[Parameters, Parameters, Parameters], dict[str, float]]:
    """Return a function (trained, frozen, reference) -> eval_loss, eval_divergence and more, from one answer a prompt.

    eval.max_batches limits the number of batches, each as large as a step. beat: is called after each batch.
    """
    step = make_eval_step(forward_of(config, model), parts.objective)
    step = jax.jit(step, compiler_options=compiler_options(config))
    at_once = config.train.grad_accum_steps * config.train.micro_batch_size * data_shards(jax.sharding.get_mesh())
    if config.eval.max_batches is not None:
        prompts = prompts[: config.eval.max_batches * at_once]

    def evaluate(trained: Parameters, frozen: Parameters, reference: Parameters) -> dict[str, float]:
        sums_of_batches, answers = [], []
        for first in range(0, len(prompts), at_once):
            asked = prompts[first : first + at_once]
            # Negative numbers select random bits that no training step uses, the same in each evaluation.
            numbers = [-1 - first - number for number in range(len(asked))]
            written = parts.answer(trained, frozen, asked, numbers)
            sums = jax.device_get(step(trained, frozen, parts.score(trained, frozen, asked, written), {}))
            sums_of_batches.append(jax.tree.map(lambda value: value.item(), sums))
            answers += written
            beat()
        total = jax.tree.map(lambda *values: sum(values), *sums_of_batches)
        found = {"loss": total.loss / max(total.weight, 1)}
        found |= {name: value / max(weight, 1) for name, (value, weight) in total.metrics.items()}
        found |= means_of_completions(answers)
        return {f"eval_{name}": float(value) for name, value in found.items()}

    return evaluate
