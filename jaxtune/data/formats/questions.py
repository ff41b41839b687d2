"""Questions on a state, in the format of System One: a prompt for each question, and the share of each option.

A question has one of three types: noul (yes or no), choice (of named options), score (a level, lowest first). Prompts
equal those of transformers' `decision` pipeline, so that it reads an exported model as it was trained.
"""

import json
import math
import string
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from jaxtune.columns import HEAD_ROWS, NOT_AN_OPTION, OPTION_SHARES, QUESTION_ROWS
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Rendered, RenderedUnit, UntrainableSample
from jaxtune.data.chat.messages import clip
from jaxtune.errors import UserError

OPTION_LABELS = {
    kind: ("Yes", "No") if kind == "noul" else tuple(string.ascii_uppercase[: len(rows)])
    for kind, rows in QUESTION_ROWS.items()
}
"""The label of each option in a prompt, by type of question, as in transformers."""

HEAD_LABELS = tuple(label for labels in OPTION_LABELS.values() for label in labels)
"""The label of each row of a decision model's head."""

_TOLERANCE = 1e-3  # probabilities in a file are rounded
_NOUL_OPTIONS = ("true", "false")


class Question(NamedTuple):
    """A question on a state.

    Attributes:
        name: its name in the sample.
        kind: noul, choice or score.
        instructions: the text of the question, or JSON; None: the question has only options.
        options: names of the options, in order; the levels of a score are "0", "1", ...
        descriptions: the text of each option, or JSON; None: the option has none.
    """

    name: str
    kind: str
    instructions: Any
    options: tuple[str, ...]
    descriptions: tuple[Any, ...]

    @property
    def rows(self) -> slice:
        """The rows of the head that score the options."""
        first = QUESTION_ROWS[self.kind].start
        return slice(first, first + len(self.options))


def read_questions(raw: Any, column: str) -> list[Question]:
    """Return the questions of a column: {name: {type, instructions, criteria}}, or its JSON text.

    criteria: for choice {option: description or null}; for score a list of levels; for noul, if given, {true, false}.
    Raises UserError for anything else.
    """
    raw = _from_json(raw, column)
    if not isinstance(raw, dict) or not raw:
        raise UserError(
            f"column {column!r} must be {{name: {{type, instructions, criteria}}}}, found {clip(repr(raw))}"
        )
    # Arrow gives every sample all names that any sample has, with None for those that it lacks.
    return [_read_question(name, one, column) for name, one in raw.items() if one is not None]


def _read_question(name: str, raw: Any, column: str) -> Question:
    where = f"column {column!r}, question {name!r}"
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind not in QUESTION_ROWS:
        raise UserError(f"{where}: type must be noul (yes or no), choice or score, found {clip(repr(kind))}")
    if unknown := raw.keys() - {"type", "instructions", "criteria"}:
        raise UserError(f"{where}: has {min(unknown)!r}; known are type, instructions and criteria")
    criteria = raw.get("criteria")
    if kind == "noul":
        criteria = criteria or {}
        if not isinstance(criteria, dict) or criteria.keys() - set(_NOUL_OPTIONS):
            raise UserError(f"{where}: criteria of noul describe 'true' and 'false', found {clip(repr(criteria))}")
        criteria = {option: criteria.get(option) for option in _NOUL_OPTIONS}
    elif kind == "score":
        if not isinstance(criteria, list) or not criteria:
            raise UserError(f"{where}: criteria of score are a list of levels, found {clip(repr(criteria))}")
        criteria = {str(level): text for level, text in enumerate(criteria)}
    elif not isinstance(criteria, dict) or not criteria:
        raise UserError(f"{where}: criteria of choice are {{option: description}}, found {clip(repr(criteria))}")
    if len(criteria) > (most := len(QUESTION_ROWS[kind])):
        raise UserError(f"{where}: {len(criteria)} options; a {kind} question has at most {most}")
    return Question(name, kind, raw.get("instructions"), tuple(criteria), tuple(criteria.values()))


def question_text(state: Any, question: Question) -> str:
    """Return the message of the user that asks a question, as transformers' DECISION_PROMPT."""
    lines, labels = [_as_text(question.instructions)], OPTION_LABELS[question.kind][: len(question.options)]
    for label, option, description in zip(labels, question.options, map(_as_text, question.descriptions)):
        if question.kind == "noul":
            lines.append(f"{label}: {description}" if description else "")
        elif question.kind == "choice":
            lines.append(f"{label}. {option}: {description}" if description else f"{label}. {option}")
        else:
            lines.append(f"{label}. {description}")
    asked = f"{labels[0]} or {labels[1]}" if question.kind == "noul" else ""
    if not asked:
        name = "option" if question.kind == "choice" else "level"
        asked = f"with the letter of the {name} that fits best ({labels[0]} to {labels[-1]})"
    return f"{_as_text(state)}\n\n" + "\n".join(filter(None, lines)) + f"\nAnswer {asked} only."


def render_question(state: Any, question: Question, template: ChatTemplate) -> Rendered:
    """Return the prompt of a question, which ends where the answer would begin; none of its tokens is trained.

    Raises UserError if the state or the question holds a special token: transformers would write it as text, and here
    it would become that token.
    """
    text = question_text(state, question)
    if token := template.special_token_in(text):
        raise UserError(f"question {question.name!r}: its text or the state holds the special token {token}; remove it")
    return Rendered(template.prompt_text([{"role": "user", "content": text}], enable_thinking=False), ())


def render_questions(
    state: Any, questions: Iterable[Question], labels: Any, column: str, template: ChatTemplate
) -> RenderedUnit:
    """Return the questions on a state that have a label, as documents that share a row.

    Args:
        state: the state, text or JSON.
        questions: the questions.
        labels: label by name of a question, or its JSON text: `option_shares`.
        column: the column of the labels, for errors.
        template: the chat template.

    Raises:
        UserError: a label does not fit its question; UntrainableSample: no question has a label.
    """
    labels, questions = _from_json(labels, column), list(questions)
    if not isinstance(labels, dict):
        raise UserError(f"column {column!r} must be {{name of a question: label}}, found {clip(repr(labels))}")
    if unknown := {name for name in labels if labels[name] is not None} - {one.name for one in questions}:
        raise UserError(f"column {column!r}: there is no question {min(unknown)!r}")
    asked = [question for question in questions if labels.get(question.name) is not None]
    if not asked:
        raise UntrainableSample(f"column {column!r}: no question has a label")
    # (questions, HEAD_ROWS) float32
    shares = np.stack([option_shares(question, labels[question.name], column) for question in asked])
    documents = tuple(render_question(state, question, template) for question in asked)
    return RenderedUnit(documents, {OPTION_SHARES.name: shares}, answered=False)


def option_shares(question: Question, label: Any, column: str) -> Float32[np.ndarray, "rows"]:
    """Return the target probability of each row of the head, NOT_AN_OPTION for rows that are not options.

    A hard label is the name of an option (choice), its number (score), or true or false (noul). A soft label is the
    probability of each option by name (choice), of each level in order (score), or of true (noul). Raises UserError for
    anything else.
    """
    where, options = f"column {column!r}, question {question.name!r}", question.options
    shares: list[float] | None = None
    if question.kind == "noul" and isinstance(label, bool | int | float):
        shares = [float(label), 1.0 - float(label)]  # (yes, no); true is 1.0
    elif question.kind == "choice" and isinstance(label, str) and label in options:
        shares = [float(option == label) for option in options]
    elif question.kind == "choice" and isinstance(label, dict) and label.keys() <= set(options):
        shares = [label.get(option) or 0.0 for option in options]  # null, as Arrow fills it, or absent: 0
    elif question.kind == "score" and isinstance(label, int) and not isinstance(label, bool) and str(label) in options:
        shares = [float(level == label) for level in range(len(options))]
    elif question.kind == "score" and isinstance(label, list) and len(label) == len(options):
        shares = label
    numbers = shares is not None and all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares)
    if shares is None or not numbers or not math.isclose(total := sum(shares), 1.0, abs_tol=_TOLERANCE):
        wanted = {
            "noul": "true, false or the probability of true",
            "choice": f"one of {', '.join(options[:10])}, or the probability of each by name, with the sum 1",
            "score": f"a level from 0 to {len(options) - 1}, or the probability of each level, with the sum 1",
        }
        raise UserError(f"{where}: a label is {wanted[question.kind]}; found {clip(repr(label))}")
    every = np.full(HEAD_ROWS, NOT_AN_OPTION, np.float32)  # (head rows,): of all types of question
    every[question.rows] = np.array(shares) / total  # probabilities in a file are rounded
    return every


def answer_of(question: Question, probabilities: Mapping[str, float]) -> dict[str, Any]:
    """Return the answer to a question in the format of System One, from the probability of each option.

    The confidence of a choice is 0 at equal probabilities and 1 at certainty; of a score, 1 minus the mean distance
    from the likeliest level, over that distance at equal probabilities; both as in transformers.
    """
    if question.kind == "noul":
        return {"type": "noul", "noul": probabilities["true"]}
    best, count = max(probabilities, key=lambda option: probabilities[option]), len(probabilities)
    if question.kind == "choice":
        confidence = 1.0 if count == 1 else max(0.0, (probabilities[best] - 1 / count) / (1 - 1 / count))
        return {"type": "choice", "choice": best, "confidence": confidence, "probabilities": dict(probabilities)}
    by_level = list(probabilities.values())
    distance = sum(p * abs(level - int(best)) for level, p in enumerate(by_level))
    # The mean distance of equal probabilities from the middle level.
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return {
        "type": "score",
        "score": sum(level * p for level, p in enumerate(by_level)),
        "legend": dict(zip(question.options, question.descriptions)),
        "confidence": 1.0 if count == 1 else max(0.0, 1 - distance / uniform),
        "probabilities": dict(probabilities),
    }


def _as_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _from_json(raw: Any, column: str) -> Any:
    """Return the object of a column, which may be JSON text, as in CSV files."""
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except ValueError as error:
        raise UserError(f"column {column!r} is not valid JSON: {error}") from error
