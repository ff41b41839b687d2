"""Preference data: the two answers of a sample, or one and whether it is wanted, each after its prompt."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtune.config.schema import Dataset
from jaxtune.data.chat import ChatTemplate
from jaxtune.data.columns import DESIRABLE, SCORE_DELTA
from jaxtune.data.dialects import conversation_of
from jaxtune.data.encoding import Encoded, Pair, Refused, Rendered
from jaxtune.data.messages import Message, check_messages, check_tools, clip
from jaxtune.data.templates import columns_in, fill
from jaxtune.data.units import Unit
from jaxtune.errors import UserError

Sample = Mapping[str, Any]

# Where the two answers are, the better one first; ms-swift's follow the conversation, whose last answer is the better.
CHOSEN_AND_REJECTED = ("chosen", "rejected")
_SWIFT = ("rejected_response", "rejected_messages")
# ERNIEKit: queries, earlier answers, two answers, and a number for each, larger for the better one.
ERNIE = ("src", "tgt", "response", "sort")


def found_columns(entry: Dataset, sample: Sample) -> tuple[str, ...] | None:
    """The columns of a sample that hold a prompt and two answers, as one of the toolkits writes them; None: none do."""
    answers = entry.chosen_field, entry.rejected_field
    if set(answers) <= sample.keys():
        prompt = _prompt_field(entry, sample)
        return (*(columns_in(prompt) if prompt else ()), *answers)
    if {"messages"} <= sample.keys() and (rejected := next((name for name in _SWIFT if name in sample), None)):
        return "messages", rejected
    return ERNIE if set(ERNIE) <= sample.keys() else None


def _prompt_field(entry: Dataset, sample: Sample) -> str | None:
    if entry.prompt_field is not None:
        return entry.prompt_field
    known = ("prompt", "question", "query", "instruction", "conversations", "messages")
    there = (column for column in known if sample.get(column) is not None and column != entry.output_field)
    return next(there, None)


def pair_of(entry: Dataset, columns: tuple[str, ...], template: ChatTemplate | None, sample: Sample) -> Pair:
    """The chosen and the rejected answer of a sample after their prompt. Raises UserError for another form.

    template: None: the tokenizer has none, and texts are joined as they are.
    """
    values = _score_delta(entry, sample)
    if columns == ERNIE:
        prompt, *answers = _of_ernie(sample)
    elif columns[0] == "messages" and columns[-1] in _SWIFT:
        prompt, *answers = _of_swift(sample, columns[-1])
    else:
        prompt, *answers = _of_answers(entry, columns, sample)
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        return Pair(_continuations(*answers), values)
    if prompt is None:
        prompt, *answers = _with_shared_beginning(*answers)
    documents = tuple(_after(prompt, answer, entry, template, sample) for answer in answers)
    return Pair((documents[0], documents[1]), values)


def wanted_of(entry: Dataset, template: ChatTemplate | None, sample: Sample) -> Pair:
    """An answer after its prompt, and whether it is wanted. Raises UserError for another form."""
    label = sample.get(entry.desirable_field)
    if not isinstance(label, bool | np.bool_) and label not in (0, 1):
        raise UserError(f"column {entry.desirable_field!r} must be true or false, found {clip(repr(label))}")
    field, answer = _prompt_field(entry, sample), _value(sample, entry.output_field)
    prompt = None if field is None else fill(field, sample) if "{" in field else _value(sample, field)
    if prompt is None and isinstance(answer, list):  # a conversation, whose last message is judged
        prompt, answer = answer[:-1], answer[-1:]
    return Pair((_after(prompt, answer, entry, template, sample),), {DESIRABLE.name: float(label)})


def with_other_answers(units: Iterable[Unit]) -> Iterator[Unit]:
    """Each unit's answer, and after the same prompt that of the next unit; of the last unit, the first one's.

    What such answers gain says how far a model has moved from its reference (KTO, arXiv:2402.01306, section 4.1).
    """
    first = before = None
    for unit in units:
        if before is not None:
            yield _with_other(before, unit)
        first, before = first or unit, unit
    if first is not None and before is not None:
        yield _with_other(before, first)


def _with_other(unit: Unit, other: Unit) -> Unit:
    (own,), (its,) = unit.documents, other.documents
    prompt, answer = _answer_at(own), _answer_at(its)
    mixed = Encoded(
        np.concatenate([own.tokens[:prompt], its.tokens[answer:]]),
        np.concatenate([own.loss_weights[:prompt], its.loss_weights[answer:]]),
    )
    return Unit((own, mixed), unit.continuous, unit.values)


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
    if not lists or len(both) != 2 or len(order) != 2 or order[0] == order[1] or len(queries) != len(answers) + 1:
        raise UserError(
            "expected src with one text more than tgt, two of response and a number for each in sort, larger for the "
            f"better one; found {clip(repr({column: sample[column] for column in ERNIE}))}"
        )
    prompt = [{"role": "user", "content": queries[0]}]
    for answer, query in zip(answers, queries[1:]):
        prompt += [{"role": "assistant", "content": answer}, {"role": "user", "content": query}]
    texts = ["".join(text) if isinstance(text, list) else text for text in both]
    chosen, rejected = texts if order[0] > order[1] else texts[::-1]
    return prompt, chosen, rejected


def _of_swift(sample: Sample, column: str) -> tuple[Any, Any, Any]:
    messages, rejected = conversation_of(sample["messages"]), _value(sample, column)
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        raise UserError(f"column 'messages' must be a conversation, found {clip(repr(messages))}")
    if column == "rejected_messages":
        return None, messages, rejected
    return messages[:-1], messages[-1:], rejected


def _of_answers(entry: Dataset, columns: tuple[str, ...], sample: Sample) -> tuple[Any, Any, Any]:
    chosen, rejected = _value(sample, entry.chosen_field), _value(sample, entry.rejected_field)
    field = _prompt_field(entry, sample)
    prompt = None if field is None else fill(field, sample) if "{" in field else _value(sample, field)
    if field == "instruction" and isinstance(more := sample.get("input"), str) and more:
        prompt = f"{prompt}\n{more}"
    if isinstance(chosen, list) and isinstance(prompt, str) and chosen[0].get("role") != "assistant":
        prompt = None  # the answers are whole conversations, and the prompt is their beginning
    return prompt, chosen, rejected


def _value(sample: Sample, column: str) -> Any:
    """Text, or a list of messages, with the keys and roles of OpenAI."""
    if column not in sample:
        raise UserError(f"missing column {column!r}; it has {', '.join(map(str, sample)) or 'none'}")
    value = sample[column]
    value = [value] if isinstance(value, dict) else value
    found = value if isinstance(value, str) and not value.lstrip().startswith("[") else conversation_of(value)
    if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
        return found
    if not isinstance(found, str):
        raise UserError(f"column {column!r} must be text or messages, found {clip(repr(value))}")
    return found


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
    messages = check_messages([*({**message, "train": False} for message in before), *answers])
    system = entry.system_prompt if entry.system_field is None else sample.get(entry.system_field)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = check_tools(sample.get(entry.tools_field)) if entry.tools_field else None
    return template.render(messages, tools)


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


def _score_delta(entry: Dataset, sample: Sample) -> dict[str, float]:
    """By how much the score of the chosen answer is larger; 1 where the data has no scores."""
    if entry.chosen_score_field is None or entry.rejected_score_field is None:
        return {SCORE_DELTA.name: 1.0}
    columns = entry.chosen_score_field, entry.rejected_score_field
    chosen, rejected = (sample.get(column) for column in columns)
    if not isinstance(chosen, int | float) or not isinstance(rejected, int | float):
        raise UserError(f"columns {' and '.join(map(repr, columns))} must be numbers, found {chosen!r}, {rejected!r}")
    if chosen <= rejected:
        raise Refused(f"the score of the chosen answer, {chosen!r}, is not larger than {rejected!r}")
    return {SCORE_DELTA.name: float(chosen - rejected)}
