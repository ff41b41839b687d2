"""Preference data: the two answers of a sample, or one and whether it is wanted, each after its prompt."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtune.columns import DESIRABLE, SCORE_DELTA
from jaxtune.config.schema import Dataset
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoded, Pair, Refused, Rendered
from jaxtune.data.chat.messages import Message, clip
from jaxtune.data.formats.prompts import conversation, prompt_fields, prompt_in, value_in
from jaxtune.data.formats.units import Unit
from jaxtune.errors import UserError

Sample = Mapping[str, Any]

# ms-swift: the worse answer, beside a conversation whose last answer is the better one.
_SWIFT = ("rejected_response", "rejected_messages")
# ERNIEKit: queries, earlier answers, two answers, and a number for each, larger for the better one.
ERNIE = ("src", "tgt", "response", "sort")
_WANTED = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


def needed_fields(entry: Dataset, sample: Sample) -> list[tuple[str, str]] | None:
    """The columns of a sample that hold a prompt and two answers, as one of the toolkits writes them; None: none do.

    Each with the option that names it, if there is one.
    """
    answers = [("chosen_field", entry.chosen_field), ("rejected_field", entry.rejected_field)]
    if {field for _, field in answers} <= sample.keys():
        return [*prompt_fields(entry, sample), *answers]
    rejected = [("", name) for name in _SWIFT if name in sample]
    if "messages" in sample and rejected:
        return [("", "messages"), *rejected]
    return [("", name) for name in ERNIE] if set(ERNIE) <= sample.keys() else None


def pair_of(entry: Dataset, columns: tuple[str, ...], template: ChatTemplate | None, sample: Sample) -> Pair:
    """The chosen and the rejected answer of a sample after their prompt. Raises UserError for another form.

    entry, columns: what `formats.detect` returned. template: None: the tokenizer has none, and texts are joined.
    """
    values = {SCORE_DELTA.name: _score_delta(entry, sample)}
    if columns == ERNIE:
        prompt, *answers = _of_ernie(sample)
    elif columns[0] == "messages" and columns[-1] in _SWIFT:
        prompt, *answers = _of_swift(entry, sample)
    else:
        prompt, *answers = _of_answers(entry, sample)
    if answers[0] == answers[1]:
        raise Refused("both answers are the same, so that none is better")
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        return Pair(_continuations(*answers), values)
    if prompt is None:
        prompt, *answers = _with_shared_beginning(*answers)
    documents = tuple(_after(prompt, answer, entry, template, sample) for answer in answers)
    return Pair((documents[0], documents[1]), values)


def wanted_of(entry: Dataset, template: ChatTemplate | None, sample: Sample) -> Pair:
    """An answer after its prompt, and whether it is wanted. Raises UserError for another form."""
    label = sample.get(entry.desirable_field)
    wanted = _WANTED.get(str(label).lower())
    if wanted is None:
        raise UserError(f"column {entry.desirable_field!r} must be true or false, found {clip(repr(label))}")
    prompt, answer = prompt_in(entry, sample), value_in(entry, sample, entry.output_field)
    if prompt is None and isinstance(answer, list):  # a conversation, whose last message is judged
        prompt, answer = answer[:-1], answer[-1:]
    return Pair((_after(prompt, answer, entry, template, sample),), {DESIRABLE.name: wanted})


def with_other_answers(units: Iterable[Unit], name: str) -> Iterator[Unit]:
    """Each unit's answer, and after the same prompt that of the next unit; of the last unit, the first one's.

    What such answers gain says how far a model has moved from its reference (KTO, arXiv:2402.01306, section 4.1).
    Raises UserError if all units of the source `name` are the same one.
    """
    first = before = None
    differ = False
    for unit in units:
        if before is not None:
            differ = differ or not np.array_equal(before.documents[0].tokens, unit.documents[0].tokens)
            yield _with_other(before, unit)
        first, before = first or unit, unit
    if first is not None and before is not None:
        if not differ:
            raise UserError(
                f"data: {name} has only one answer, and KTO compares each with that of another sample: add samples"
            )
        yield _with_other(before, first)


def of_one_kind(wanted: np.ndarray) -> str | None:
    """A line for the user if all answers are wanted, or none is."""
    if not len(wanted) or wanted.min() != wanted.max():
        return None
    now, other = ("wanted", "not wanted") if wanted[0] else ("not wanted", "wanted")
    return f"each of the {len(wanted):,} answers is {now} (desirable_field); KTO learns most with some that are {other}"


def _with_other(unit: Unit, other: Unit) -> Unit:
    (own,), (its,) = unit.documents, other.documents
    prompt, answer = _answer_at(own), _answer_at(its)
    mixed = Encoded(
        np.concatenate([own.tokens[:prompt], its.tokens[answer:]]),
        np.concatenate([own.loss_weights[:prompt], its.loss_weights[answer:]]),
    )
    return Unit((own, mixed), unit.continuous, unit.values, unit.where)


def _answer_at(document: Encoded) -> int:
    """Where the first trained token is, after the first token, which is never predicted."""
    return 1 + int(np.argmax(document.loss_weights[1:] > 0))


def shortened(document: Encoded, most: int) -> Encoded:
    """The document without the beginning of what stands before its answer, so that at most so many tokens do.

    As truncation_mode='keep_end' of TRL; but a beginning-of-sequence token is left out with the rest.
    """
    cut = max(0, _answer_at(document) - most)
    return Encoded(document.tokens[cut:], document.loss_weights[cut:])


def _of_ernie(sample: Sample) -> tuple[Any, Any, Any]:
    queries, answers, both, order = (sample[column] for column in ERNIE)
    lists = all(isinstance(value, list) for value in (queries, answers, both, order))
    if not lists or not (len(both) == len(order) == 2 and len(queries) == len(answers) + 1):
        raise UserError(
            "expected src with one text more than tgt, two of response and a number for each in sort, larger for the "
            f"better one; found {clip(repr({column: sample[column] for column in ERNIE}))}"
        )
    first, second = (_number("sort", number) for number in order)
    if first == second:
        raise Refused(f"sort is {order!r}, so that no answer is better")
    prompt = [{"role": "user", "content": queries[0]}]
    for answer, query in zip(answers, queries[1:]):
        prompt += [{"role": "assistant", "content": answer}, {"role": "user", "content": query}]
    texts = ["".join(text) if isinstance(text, list) and all(map(_is_text, text)) else text for text in both]
    if not all(map(_is_text, texts)):
        raise UserError(f"column 'response' must be two texts, found {clip(repr(both))}")
    chosen, rejected = texts if first > second else texts[::-1]
    return prompt, chosen, rejected


def _of_swift(entry: Dataset, sample: Sample) -> tuple[Any, Any, Any]:
    messages = value_in(entry, sample, "messages")
    # Of Arrow's files every sample has both columns, one of them empty.
    column = next((name for name in _SWIFT if sample.get(name) is not None), _SWIFT[0])
    rejected = value_in(entry, sample, column)
    if not isinstance(messages, list):
        raise UserError(f"column 'messages' must be a conversation, found {clip(repr(messages))}")
    if column == "rejected_messages":
        return None, messages, rejected
    return messages[:-1], messages[-1:], rejected


def _of_answers(entry: Dataset, sample: Sample) -> tuple[Any, Any, Any]:
    chosen, rejected = value_in(entry, sample, entry.chosen_field), value_in(entry, sample, entry.rejected_field)
    prompt = prompt_in(entry, sample)
    if isinstance(chosen, list) and isinstance(prompt, str) and chosen[0].get("role") != "assistant":
        prompt = None  # the answers are whole conversations, and the prompt is their beginning
    return prompt, chosen, rejected


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _number(column: str, value: Any) -> float:
    """A number, also as the text that CSV files have. Raises UserError for anything else, and NaN."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 1e30:
        raise UserError(f"column {column!r} must be a number, found {clip(repr(value))}")
    return number


def _after(prompt: Any, answer: Any, entry: Dataset, template: ChatTemplate | None, sample: Sample) -> Rendered:
    """An answer after its prompt, each text or messages; None for a prompt: the answer begins with it."""
    if not answer:
        raise Refused("an answer is empty")
    if template is None:
        if not isinstance(answer, str) or not isinstance(prompt, str | None):
            raise UserError("it holds messages, and the tokenizer has no chat template: set chat.template")
        return Rendered(
            (prompt or "") + answer, ((len(prompt or ""), len(prompt or "") + len(answer)),), append_eos=True
        )
    answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    messages = [*({**message, "train": False} for message in before), *answers]
    return template.render(*conversation(messages, entry, sample))


def _continuations(chosen: str, rejected: str) -> tuple[Rendered, Rendered]:
    """Two texts of which the beginning that they share is the prompt, up to a space, as TRL's extract_prompt."""
    pairs = zip(chosen, rejected)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    shared -= bool(shared) and chosen[shared - 1] == " "
    if shared in (len(chosen), len(rejected)):
        raise Refused("one answer is the beginning of the other, so that nothing of it is trained")
    first, second = (Rendered(text, ((shared, len(text)),), append_eos=True) for text in (chosen, rejected))
    return first, second


def _with_shared_beginning(chosen: Any, rejected: Any) -> tuple[list[Message], list[Message], list[Message]]:
    """Two conversations of which the messages that they share are the prompt."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError("one answer is text, the other messages")
    pairs = zip(chosen, rejected)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if shared in (len(chosen), len(rejected)):
        raise Refused("one conversation is the beginning of the other, so that nothing of it is trained")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _score_delta(entry: Dataset, sample: Sample) -> float:
    """By how much the score of the chosen answer is larger; 1 where the data has no scores."""
    if entry.chosen_score_field is None or entry.rejected_score_field is None:
        return 1.0
    columns = entry.chosen_score_field, entry.rejected_score_field
    chosen, rejected = (_number(column, sample.get(column)) for column in columns)
    if chosen <= rejected:
        raise Refused(f"the score of the chosen answer, {chosen:g}, is not larger than {rejected:g}")
    return chosen - rejected
