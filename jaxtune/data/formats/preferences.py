"""Preference data: a prompt with a better and a worse answer; or a prompt with one answer, wanted or not."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from jaxtune.columns import DESIRABLE, SCORE_DELTA
from jaxtune.config.schema import Dataset
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoded, Rendered, RenderedUnit, UntrainableSample
from jaxtune.data.chat.messages import Message, clip
from jaxtune.data.formats.image_messages import ImageMessages, holds_image, images_in
from jaxtune.data.formats.prompts import prompt_fields, prompt_in, value_in, with_system_and_tools
from jaxtune.data.formats.units import Unit
from jaxtune.errors import UserError

Sample = Mapping[str, Any]

# Columns of ms-swift: the worse answer, next to `messages`, a conversation that ends in the better one.
_SWIFT = ("rejected_response", "rejected_messages")
# Columns of ERNIEKit: queries, earlier answers, two answers, and a number for each answer, larger for the better one.
ERNIE = ("src", "tgt", "response", "sort")
_WANTED = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


def needed_fields(entry: Dataset, sample: Sample) -> list[tuple[str, str]] | None:
    """Return (option, column) for a sample's prompt and two answers, in the layout of TRL, ms-swift or ERNIEKit.

    The option is the one that names the column, "" if there is none. None if the sample has another layout.
    """
    answers = [("chosen_field", entry.chosen_field), ("rejected_field", entry.rejected_field)]
    if {field for _, field in answers} <= sample.keys():
        return [*prompt_fields(entry, sample), *answers]
    rejected = [("", name) for name in _SWIFT if name in sample]
    if "messages" in sample and rejected:
        return [("", "messages"), *rejected]
    return [("", name) for name in ERNIE] if set(ERNIE) <= sample.keys() else None


def render_pair(
    entry: Dataset,
    columns: tuple[str, ...],
    template: ChatTemplate | None,
    images: ImageMessages | None,
    sample: Sample,
) -> RenderedUnit:
    """Render the chosen and the rejected answer of a sample, each after the prompt.

    Args:
        entry: the entry, as `formats.detect` returned it.
        columns: the columns, as `formats.detect` returned them.
        template: the chat template; None: the tokenizer has none, and texts are joined.
        images: renders conversations with images; None: without images.
        sample: has the columns.

    Raises:
        UserError: the columns hold something else (`UntrainableSample`: neither answer is better).
    """
    values = {SCORE_DELTA.name: _score_delta(entry, sample)}
    if columns == ERNIE:
        prompt, *answers = _read_ernie(sample)
    elif columns[0] == "messages" and columns[-1] in _SWIFT:
        prompt, *answers = _read_swift(entry, sample)
    else:
        prompt, *answers = _read_answers(entry, sample)
    if answers[0] == answers[1]:
        raise UntrainableSample("both answers are the same, so neither is better")
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        if images is not None and images_in(sample):
            raise UserError("an image needs a conversation: messages, or a prompt")
        return RenderedUnit(_continuations(*answers), values)
    if prompt is None:
        prompt, *answers = _with_shared_beginning(*answers)
    documents = tuple(_after(prompt, answer, entry, template, images, sample) for answer in answers)
    return RenderedUnit((documents[0], documents[1]), values)


def render_labelled_answer(
    entry: Dataset, template: ChatTemplate | None, images: ImageMessages | None, sample: Sample
) -> RenderedUnit:
    """Render the answer of a sample after its prompt, with the label whether it is wanted; see `render_pair`.

    Raises:
        UserError: the label is not true or false, or the sample has no prompt and answer.
    """
    label = sample.get(entry.desirable_field)
    wanted = _WANTED.get(str(label).lower())
    if wanted is None:
        raise UserError(f"column {entry.desirable_field!r} must be true or false, found {clip(repr(label))}")
    prompt, answer = prompt_in(entry, sample), value_in(entry, sample, entry.output_field)
    if prompt is None and isinstance(answer, list):  # a conversation, whose last message is judged
        prompt, answer = answer[:-1], answer[-1:]
    rendered = _after(prompt, answer, entry, template, images, sample)
    if rendered.images and any(map(holds_image, [{"content": answer}] if isinstance(answer, str) else answer)):
        raise UserError(
            "an answer holds an image: type unpaired_preference allows images in the prompt only, because KTO puts "
            "answers behind the prompts of other samples"
        )
    return RenderedUnit((rendered,), {DESIRABLE.name: wanted})


def add_mismatched_answers(units: Iterable[Unit], name: str, entry: Dataset) -> Iterator[Unit]:
    """Add a mismatched answer to each unit: the answer of the next unit, after this unit's prompt.

    The last unit gets the answer of the first. KTO estimates from mismatched answers how far the model has moved from
    its reference, the KL term of its loss (arXiv:2402.01306, section 4.1). They are cut to max_tokens of
    the entry, as in TRL (KTOTrainer of trl 1.16), and never left out: at the end, unless the entry cuts the beginning.

    Raises:
        UserError: all units of the source `name` are the same.
    """
    first = previous = None  # the units may be a stream: only two are held
    differ = False
    for unit in units:
        if previous is not None:
            differ = differ or not np.array_equal(previous.documents[0].tokens, unit.documents[0].tokens)
            yield _with_other(previous, unit, entry)
        first, previous = first or unit, unit
    if first is not None and previous is not None:
        if not differ:
            raise UserError(
                f"data: {name} has only one answer, and KTO compares it with answers of other samples: add samples"
            )
        yield _with_other(previous, first, entry)


def one_kind_note(wanted: np.ndarray) -> str | None:
    """Return a line for the user if all answers are wanted, or all are unwanted; None otherwise."""
    if not len(wanted) or wanted.min() != wanted.max():
        return None
    now, other = ("wanted", "not wanted") if wanted[0] else ("not wanted", "wanted")
    return f"each of the {len(wanted):,} answers is {now} (desirable_field); KTO learns most with some that are {other}"


def _with_other(unit: Unit, other: Unit, entry: Dataset) -> Unit:
    """Return the unit with a second document: its prompt with the answer of `other`."""
    (document,), (other_document,) = unit.documents, other.documents
    prompt, answer = _answer_start(document), _answer_start(other_document)
    mixed = Encoded(
        np.concatenate([document.tokens[:prompt], other_document.tokens[answer:]]),  # a mismatched pair, x_i with y_j
        np.concatenate([document.loss_weights[:prompt], other_document.loss_weights[answer:]]),
        images=document.images,  # they are in the prompt
    )
    if entry.max_tokens is not None:
        # Also if longer ones are deleted: the sample itself is not too long. An image, in the prompt, is never cut.
        way = "left" if entry.longer == "left" and not mixed.images else "right"
        mixed = cut_document(mixed, entry.max_tokens, way)
    return Unit((document, mixed), unit.continuous, unit.values, unit.where)


def _answer_start(document: Encoded) -> int:
    """Return the index of the first trained token. The first token of a document is never predicted."""
    return 1 + int(np.argmax(document.loss_weights[1:] > 0))  # argmax of bools: the first True


def cut_prompt(document: Encoded, most: int) -> Encoded:
    """Cut the beginning of a document's prompt, so that at most `most` tokens come before the answer.

    Like truncation_mode='keep_end' of TRL, except that a beginning-of-sequence token is cut with the rest.
    """
    cut = max(0, _answer_start(document) - most)
    return dataclasses.replace(document, tokens=document.tokens[cut:], loss_weights=document.loss_weights[cut:])


def cut_document(document: Encoded, most: int, way: Literal["left", "right"]) -> Encoded:
    """Cut off the beginning (left) or the end (right) of a document that has more than `most` tokens."""
    kept = slice(max(0, len(document.tokens) - most), None) if way == "left" else slice(most)
    return dataclasses.replace(document, tokens=document.tokens[kept], loss_weights=document.loss_weights[kept])


def _read_ernie(sample: Sample) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected) from the columns of ERNIEKit."""
    queries, answers, both, order = (sample[column] for column in ERNIE)
    lists = all(isinstance(value, list) for value in (queries, answers, both, order))
    if not lists or not (len(both) == len(order) == 2 and len(queries) == len(answers) + 1):
        raise UserError(
            "expected src with one text more than tgt, two of response and a number for each in sort, larger for the "
            f"better one; found {clip(repr({column: sample[column] for column in ERNIE}))}"
        )
    first, second = (_number("sort", number) for number in order)
    if first == second:
        raise UntrainableSample(f"sort is {order!r}, so neither answer is better")
    prompt = [{"role": "user", "content": queries[0]}]
    for answer, query in zip(answers, queries[1:]):
        prompt += [{"role": "assistant", "content": answer}, {"role": "user", "content": query}]
    texts = ["".join(text) if isinstance(text, list) and all(map(_is_text, text)) else text for text in both]
    if not all(map(_is_text, texts)):
        raise UserError(f"column 'response' must be two texts, found {clip(repr(both))}")
    chosen, rejected = texts if first > second else texts[::-1]
    return prompt, chosen, rejected


def _read_swift(entry: Dataset, sample: Sample) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected) from the columns of ms-swift; prompt None: the answers begin with it."""
    messages = value_in(entry, sample, "messages")
    # In an Arrow file every sample has both columns, and one is null.
    column = next((name for name in _SWIFT if sample.get(name) is not None), _SWIFT[0])
    rejected = value_in(entry, sample, column)
    if not isinstance(messages, list):
        raise UserError(f"column 'messages' must be a conversation, found {clip(repr(messages))}")
    if column == "rejected_messages":
        return None, messages, rejected
    return messages[:-1], messages[-1:], rejected  # the last message is the better answer


def _read_answers(entry: Dataset, sample: Sample) -> tuple[Any, Any, Any]:
    """Return (prompt, chosen, rejected) from the columns that the entry names; prompt None as in `_read_swift`."""
    chosen, rejected = value_in(entry, sample, entry.chosen_field), value_in(entry, sample, entry.rejected_field)
    prompt = prompt_in(entry, sample)
    if isinstance(chosen, list) and isinstance(prompt, str) and chosen[0].get("role") != "assistant":
        prompt = None  # the answers are whole conversations, and the prompt is their beginning
    return prompt, chosen, rejected


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _number(column: str, value: Any) -> float:
    """Return a number, which CSV files hold as text. Raises UserError for anything else, and for NaN."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # float(True) is 1.0
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) < 1e30:  # refuses NaN too
        raise UserError(f"column {column!r} must be a number, found {clip(repr(value))}")
    return number


def _after(
    prompt: Any,
    answer: Any,
    entry: Dataset,
    template: ChatTemplate | None,
    images: ImageMessages | None,
    sample: Sample,
) -> Rendered:
    """Render an answer after its prompt, both text or messages. Prompt None: the answer begins with the prompt."""
    if not answer:
        raise UntrainableSample("an answer is empty")
    if template is None:
        if images is not None and images_in(sample):
            raise UserError("an image needs a chat template, and the tokenizer has none: set chat.template")
        if not isinstance(answer, str) or not isinstance(prompt, str | None):
            raise UserError("it holds messages, and the tokenizer has no chat template: set chat.template")
        return Rendered(
            (prompt or "") + answer, ((len(prompt or ""), len(prompt or "") + len(answer)),), append_eos=True
        )
    answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    messages = [*({**message, "train": False} for message in prompt_messages), *answers]
    messages, tools = with_system_and_tools(messages, entry, sample, images is not None)
    return images.render(template, messages, tools, sample) if images else template.render(messages, tools)


def _continuations(chosen: str, rejected: str) -> tuple[Rendered, Rendered]:
    """Render two texts; the prompt is their common beginning, without a space at its end (TRL's extract_prompt)."""
    pairs = zip(chosen, rejected)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    shared -= bool(shared) and chosen[shared - 1] == " "  # tokenizers join a space to the next word
    if shared in (len(chosen), len(rejected)):
        raise UntrainableSample("one answer is the beginning of the other, so it has no token to train")
    first, second = (Rendered(text, ((shared, len(text)),), append_eos=True) for text in (chosen, rejected))
    return first, second


def _with_shared_beginning(chosen: Any, rejected: Any) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two conversations into (prompt, chosen, rejected); the prompt is their common messages."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise UserError("one answer is text, the other messages")
    pairs = zip(chosen, rejected)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    if shared in (len(chosen), len(rejected)):
        raise UntrainableSample("one conversation is the beginning of the other, so it has no message to train")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _score_delta(entry: Dataset, sample: Sample) -> float:
    """Return the score of the chosen answer less the score of the rejected one; 1 if the entry names no scores."""
    if entry.chosen_score_field is None or entry.rejected_score_field is None:
        return 1.0
    columns = entry.chosen_score_field, entry.rejected_score_field
    chosen, rejected = (_number(column, sample.get(column)) for column in columns)
    if chosen <= rejected:
        raise UntrainableSample(f"the score of the chosen answer, {chosen:g}, is not larger than {rejected:g}")
    return chosen - rejected
