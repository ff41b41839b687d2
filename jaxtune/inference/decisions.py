"""Answers to questions about a state, from one forward pass: no text is generated.

A run's last evaluation has its model's temperatures; an exported folder has them in decision.json.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxtune import hf
from jaxtune.config.schema import Dataset
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder
from jaxtune.data.chat.messages import clip
from jaxtune.data.formats.questions import OPTION_LABELS, Question, answer_of, read_questions, render_question
from jaxtune.errors import UserError
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import Opened
from jaxtune.json_file import read_json
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import Batch, score_labels
from jaxtune.monitor import metrics
from jaxtune.parallel.layout import by_token
from jaxtune.weights.served_linears import serve_weights

DECISION_FILE, TEMPLATE_FILE = "decision.json", "decision_template.jinja"
_NOUL_OPTIONS = ["true", "false"]  # the order in which a prompt names them
_PREFIX = "eval_temperature_"


class _Asked(NamedTuple):
    """A question of a sample: the sample's number, the question, and the tokens of its prompt."""

    sample: int
    question: Question
    tokens: np.ndarray


def evaluated_temperatures(folder: RunFolder, step: int | None = None) -> dict[str, float]:
    """Return the temperature of each type of question in a run's last evaluation up to a step; {} if there is none."""
    rows = metrics.read(folder.metrics) if folder.metrics.is_file() else []
    found = {}
    for row in rows:
        if step is None or row["step"] <= step:
            read = {name.removeprefix(_PREFIX): row[name] for name in row if name.startswith(_PREFIX)}
            found = read or found
    return found


def write_decision(folder: Path, temperatures: Mapping[str, float]) -> None:
    """Write decision.json, with which transformers' `decision` pipeline reads the options and calibrates their scores.

    Prompts need no template there: they are the pipeline's own.
    """
    labels = {kind: list(labels) for kind, labels in OPTION_LABELS.items()}
    described = {"labels": labels, "temperature": dict(temperatures), "noul_options": _NOUL_OPTIONS}
    (folder / DECISION_FILE).write_text(json.dumps(described, indent=2) + "\n")


def read_temperatures(folder: Path) -> dict[str, float]:
    """Return the temperatures in a folder's decision.json; {} if it has none: transformers then takes 1.

    Raises UserError if the folder has another prompt or other labels than jaxtune writes, or a temperature that is not
    a number above 0.
    """
    file = folder / DECISION_FILE
    described = read_json(file) if file.exists() else {}
    template, options = described.get("chat_template"), described.get("noul_options", _NOUL_OPTIONS)
    if (folder / TEMPLATE_FILE).exists() or template is not None or options != _NOUL_OPTIONS:
        raise UserError(f"{folder}: --decide has only the prompt with which jaxtune trains")
    for kind, labels in (described.get("labels") or {}).items():
        if tuple(labels) != OPTION_LABELS.get(kind):
            raise UserError(f"{file}: --decide has only the labels with which jaxtune trains")
    found = described.get("temperature") or {}
    numbers = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers):
        shown = clip(repr(found))
        raise UserError(f"{file}: temperature is {shown}; it must have a number above 0 for each type of question")
    return found


class Decider:
    """Answers questions with an opened model."""

    def __init__(self, opened: Opened, temperatures: Mapping[str, float], batch_size: int) -> None:
        """Compile nothing yet.

        Args:
            opened: the model; its config has decision.label_tokens, unless the model has a linear head.
            temperatures: by type of question; 1 for others.
            batch_size: questions of a forward pass.

        Raises UserError: the tokenizer has no chat template.
        """
        config = opened.config
        tokenizer = hf.load_tokenizer(opened.home, config.chat.template, config.data.special_tokens)
        self._template, self._encode = ChatTemplate(tokenizer, chat=config.chat), Encoder(tokenizer)
        self._parameters = serve_weights(opened.model.linears, opened.parameters)
        self._most = opened.model.spec.max_positions
        self._temperatures, self._batch_size = temperatures, batch_size
        tokens = () if opened.model.spec.labels else config.decision.label_tokens
        call = ForwardOptions(opened.parameters["embed.weight"].dtype, remat="none")

        def run(parameters: Parameters, batch: Batch) -> Float[Array, "b r"]:
            """Return the scores after each row's last token."""
            logits = score_labels(bind(opened.model.graph, parameters), batch, call, tokens=tokens).logits
            # One position of a row is `last`, so the sum over positions is its scores.
            return jax.reshard(jnp.sum(jnp.where(batch["last"][..., None], logits, 0.0), axis=1), jax.P())

        self._run = jax.jit(run)

    def each(self, samples: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[Mapping[str, Any], dict]]:
        """Yield (sample, {name of a question: answer}) for each (source, sample), in order.

        Raises UserError, which names the source, for a sample that is not a state with questions or is too long.
        """
        numbered = enumerate(samples)
        while chunk := list(islice(numbered, self._batch_size)):
            asked = [one for number, (where, sample) in chunk for one in self._ask(number, where, sample)]
            answers: dict[int, dict[str, Any]] = {number: {} for number, _ in chunk}
            for first in range(0, len(asked), self._batch_size):
                together = asked[first : first + self._batch_size]
                for one, logits in zip(together, self._logits([one.tokens for one in together])):
                    answers[one.sample][one.question.name] = self._answer(one.question, logits)
            for number, (_, sample) in chunk:
                yield sample, answers[number]

    def _ask(self, number: int, where: str, sample: Mapping[str, Any]) -> list[_Asked]:
        fields = Dataset()
        try:
            for column in (fields.state_field, fields.questions_field):
                if column not in sample:
                    raise UserError(f"missing column {column!r}; it has {', '.join(map(str, sample)) or 'none'}")
            questions = read_questions(sample[fields.questions_field], fields.questions_field)
            rendered = [render_question(sample[fields.state_field], one, self._template) for one in questions]
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        asked = [_Asked(number, one, text.tokens) for one, text in zip(questions, self._encode(rendered))]
        for one in asked:
            if len(one.tokens) > self._most:
                raise UserError(
                    f"{where}: question {one.question.name!r} has {len(one.tokens)} tokens with its state, and the "
                    f"model {self._most} positions"
                )
        return asked

    def _logits(self, prompts: list[np.ndarray]) -> Float32[np.ndarray, "prompts rows"]:
        """Return the scores of the head's rows after each prompt; a prompt is a row, padded to a power of two."""
        length = 2 ** math.ceil(math.log2(max(map(len, prompts))))
        devices = jax.sharding.get_mesh().size
        # Multiples of the number of devices: any axes of the mesh divide rows and positions.
        length, rows = math.ceil(length / devices) * devices, math.ceil(self._batch_size / devices) * devices
        shape = rows, length
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segment_ids")}
        # Padding sees no key: its first visible key is past the last one.
        batch |= {"key_start": np.full(shape, length, np.int32), "last": np.zeros(shape, bool)}
        for row, tokens in enumerate(prompts):
            count = len(tokens)
            batch["tokens"][row, :count], batch["positions"][row, :count] = tokens, np.arange(count)
            batch["segment_ids"][row, :count], batch["key_start"][row, :count] = 1, 0  # segment 0 is padding
            batch["last"][row, count - 1] = True
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), by_token())
        scores = self._run(self._parameters, jax.device_put(batch, sharding))
        return np.asarray(scores)[: len(prompts)]

    def _answer(self, question: Question, logits: Float32[np.ndarray, "rows"]) -> dict[str, Any]:
        scaled = logits[question.rows].astype(np.float64) / self._temperatures.get(question.kind, 1.0)
        weights = np.exp(scaled - scaled.max())  # a softmax in float64; the largest exponent is 0
        return answer_of(question, dict(zip(question.options, (weights / weights.sum()).tolist())))
