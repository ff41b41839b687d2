"""On-policy distillation: the student answers prompts, and the teacher scores these answers (GKD, arXiv:2306.13649)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxtune import data
from jaxtune.columns import ADDED, TEACHER, TOKENS, Column
from jaxtune.config.schema import Config
from jaxtune.data.chat.messages import clip
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.errors import UserError
from jaxtune.host.process import compiler_options
from jaxtune.inference.generation import Completion, completion_text
from jaxtune.models.decoder import Parameters
from jaxtune.models.head.score import Batch
from jaxtune.objectives.objective import Objective
from jaxtune.objectives.options import is_server
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import data_shards
from jaxtune.rollout.completers import Completer
from jaxtune.rollout.completion_rows import batch_of_documents
from jaxtune.rollout.completions_file import completions_file
from jaxtune.rollout.groups import means_of_completions
from jaxtune.rollout.teacher_server import TeacherServer
from jaxtune.scoring.kept_teacher import keep_teacher
from jaxtune.scoring.teacher_scores import Teacher
from jaxtune.training.assembly import forward_of
from jaxtune.training.state import State
from jaxtune.training.step import make_eval_step
from jaxtune.weights.model import Model

# (trained, frozen, prompts, answers) -> a batch of the prompts with their answers, whose tokens are trained, and the
# teacher's columns. Without answers, the batch has the answers in the data.
ScoreAnswers = Callable[[Parameters, Parameters, Sequence[Prompt], Sequence[Completion] | None], Batch]


Tokens = tuple[Sequence[int], Sequence[float]]
"""The tokens of a document, and their loss weights."""


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


def teacher_numbers(prompts: Sequence[Prompt], names: Sequence[str]) -> list[int]:
    """Return the number of each prompt's teacher. Raises UserError for one whose column names no teacher."""
    numbers = dict(zip(names, range(len(names))))
    if "" in numbers or not names:
        return [0] * len(prompts)
    for prompt in prompts:
        if prompt.sample.get(TEACHER.name) not in names:  # a list, which has no hash, is not either
            raise UserError(
                f"column {TEACHER.name!r} is {prompt.sample.get(TEACHER.name)!r}, which distill.teacher does not have: "
                f"{', '.join(names)} (prompt {clip(str(prompt.given))})"
            )
    return [numbers[prompt.sample[TEACHER.name]] for prompt in prompts]


def make_score_answers(
    config: Config, model: Model, objective: Objective, teachers: Mapping[str, Teacher | None]
) -> ScoreAnswers:
    """Read the teachers, by name, and return a function by which each scores the answers to its prompts.

    Raises UserError as `keep_teacher`.
    """
    mesh = jax.sharding.get_mesh()
    kept = [
        TeacherServer(config, place, model.spec.vocabulary)
        if is_server(place)
        else keep_teacher(config, model, teachers[name])
        for name, place in config.teachers.items()
    ]
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    like = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *by_token())))[TOKENS.name]
    columns = tuple(column for column in objective.columns if column.name not in ADDED)
    choose = jax.jit(_choose, compiler_options=compiler_options(config))

    def make_batch(documents: Sequence[Tokens], values: Mapping[Column, np.ndarray], packing: bool) -> Batch:
        tokens, weights = zip(*documents)
        return batch_of_documents(config, (*columns, *values), tokens, weights, values, like, packing)

    def score(
        trained: Parameters, frozen: Parameters, prompts: Sequence[Prompt], answers: Sequence[Completion] | None
    ) -> Batch:
        prompts = [prompt for prompt in prompts if answers is not None or prompt.document is not None]
        numbers = np.array(teacher_numbers(prompts, tuple(teachers)))
        own = shown = _documents(prompts, answers, of_teacher=False)
        if answers is not None and any(prompt.teacher_tokens for prompt in prompts):
            # If a teacher sees other prompts, it finds each answer in the row that the student has it in.
            shown = _documents(prompts, answers, of_teacher=True)
        asked, packing = np.unique(numbers), shown is own
        batch = seen = make_batch(own, {TEACHER: numbers} if len(asked) > 1 else {}, packing)
        number_of = batch.pop(TEACHER.name, None)
        if not packing:
            seen = make_batch(shown, {}, packing)
        scored = []
        for number in asked:
            teacher = kept[number]
            if isinstance(teacher, TeacherServer):
                values = teacher.score([weights for _, weights in own], shown, numbers == number)
                placed = make_batch(own, values, packing)
                scored.append(batch | {column.name: placed[column.name] for column in values})
            else:
                scored.append(teacher(trained, frozen, batch, seen))
        return scored[0] if number_of is None else choose(number_of, asked, scored)

    return score


def _documents(prompts: Sequence[Prompt], answers: Sequence[Completion] | None, of_teacher: bool) -> list[Tokens]:
    """Return tokens and loss weights of prompts with their answers; answers: None: those in the data."""
    if answers is None:
        found = [prompt.document for prompt in prompts if prompt.document is not None]
        return [(document.tokens.tolist(), document.loss_weights.tolist()) for document in found]
    given = [(prompt.teacher_tokens if of_teacher else ()) or prompt.tokens for prompt in prompts]
    return [
        ([*tokens, *answer.tokens], [0] * len(tokens) + [1] * len(answer.tokens))
        for tokens, answer in zip(given, answers)
    ]


def _choose(number_of: Array, numbers: Array, scored: Sequence[Batch]) -> Batch:
    """Return the batch with each document's columns of the batch that its teacher scored; numbers: of the teachers."""
    chosen = dict(scored[0])
    for number, batch in zip(numbers[1:], scored[1:]):
        own = (number_of == number)[..., None]
        chosen |= {name: jnp.where(own, batch[name], chosen[name]) for name in chosen if name in ADDED}
    return chosen


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
