"""How a sample becomes a document of its type, which is recognised by its columns."""

import dataclasses
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtune.config.schema import READ_BY_TYPE, Chat, Dataset
from jaxtune.data.chat import ChatTemplate
from jaxtune.data.encoding import Encoded, Refused, Rendered
from jaxtune.data.labels import label_of
from jaxtune.data.messages import NO_IMAGES, check_messages, check_tools, clip
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Sample = Mapping[str, Any]
Format = Callable[[Sample], Rendered | Encoded]

Say = Callable[[str], object]
"""Takes a line for the user about a dataset; the same line is shown only once."""

IGNORED_LABEL = -100
"""The label of a token that is not trained, as in Hugging Face datasets."""

# Optional columns that `auto` reads besides the columns that decide the type, by the option that names each.
BESIDE = {"tools_field": "tools", "system_field": "system"}


def detect(entry: Dataset, columns: list[str]) -> tuple[Dataset, str]:
    """Decides the type and columns of an entry from the columns of its first sample.

    Recognised besides the columns that the entry names: ShareGPT's `conversations`, TRL's `prompt` and `completion`;
    and with type auto `tools` and `system`.

    Returns:
        The entry with its type set, and the columns that decided it, for the summary.

    Raises:
        UserError: the columns fit no type, or not the type that the entry gives.
    """
    fields = {
        type_: {field: getattr(entry, field) for field in columns}
        for type_, (columns, _) in READ_BY_TYPE.items()
        if type_ != "classification" or entry.type == type_  # never by auto: text beside other columns is text
    }
    fields["tokenized"][""] = "input_ids"
    forms = list(fields.items())
    forms.insert(2, ("conversation", {"messages_field": "conversations"}))
    forms.insert(4, ("instruction", {"instruction_field": "prompt", "output_field": "completion"}))
    for type_, needed in forms:
        if entry.type in ("auto", type_) and set(needed.values()) <= set(columns):
            changes = {field: column for field, column in needed.items() if field}
            if entry.type == "auto":
                reads = [field for field in BESIDE if type_ in READ_BY_TYPE and field in READ_BY_TYPE[type_][1]]
                changes |= {
                    field: BESIDE[field] for field in reads if BESIDE[field] in columns and not getattr(entry, field)
                }
            return dataclasses.replace(entry, type=type_, **changes), ", ".join(needed.values())
    has = ", ".join(map(str, columns)) or "none"
    if {"chosen", "rejected"} <= set(columns):
        raise UserError(f"preference data, with the columns {has}: losses that learn from pairs are not there yet")
    wanted = "; ".join(
        f"{type_}: {' and '.join(column + (f' ({field})' if field else '') for field, column in needed.items())}"
        for type_, needed in fields.items()
        if entry.type in ("auto", type_)
    )
    raise UserError(f"missing column: it has {has}, but needs {wanted}; the options in brackets name other columns")


def unused(entry: Dataset, columns: Iterable[str]) -> Iterator[str]:
    """A line for each column that is not used; the entry is one returned by `detect`."""
    needed, more = READ_BY_TYPE[entry.type]
    read = {getattr(entry, option) for option in (*needed, *more) if option.endswith(("_field", "_column"))}
    if entry.type == "tokenized":
        read |= {"input_ids", "labels", "attention_mask"}
    for column in columns:
        if column not in read:
            option = next((option for option, name in BESIDE.items() if name == column and option in more), None)
            yield f"column {column!r} is not used" + (f"; {option}={column!r} would" if option else "")


def refuse_images(sample: Sample) -> None:
    """Raise UserError for a sample with images: without them, its text would be another one."""
    if column := next((column for column in ("image", "images") if sample.get(column)), None):
        raise UserError(f"column {column!r} holds images: {NO_IMAGES}; remove the column if the text needs none")


def make_format(
    entry: Dataset,
    tokenizer: "PreTrainedTokenizerFast",
    say: Say = lambda line: None,
    labels: tuple[str, ...] = (),
    chat: Chat = Chat(),
) -> Format:
    """The function from a sample to a document, for an entry returned by `detect`; `labels` of its classes, by number.

    `say` is called with a line about each part of a conversation that the chat template leaves out.

    Raises:
        UserError: at once, if the tokenizer or the entry's options do not allow the type; from the function, if a
            sample is malformed (`Refused`: it is well formed, but nothing in it is trained).
    """
    match entry.type:
        case "text":
            if tokenizer.eos_token is None:
                raise UserError(
                    "the tokenizer has no end-of-sequence token, so no document would have an end and what is "
                    "generated would never stop; set eos_token in its tokenizer_config.json"
                )
            return lambda sample: Rendered(_text(sample, entry.text_field), append_eos=True)
        case "tokenized":
            return partial(_tokenized, len(tokenizer))
        case "conversation":
            return partial(_conversation, entry, ChatTemplate(tokenizer, say, chat))
        case "instruction":
            if entry.prompt_format is None:
                return partial(_chat_instruction, entry, ChatTemplate(tokenizer, say, chat))
            return _formatted_instruction(entry, entry.prompt_format, tokenizer)
        case "classification":
            return partial(_classification, entry, labels, _ends_texts(tokenizer))
    raise ValueError(entry.type)


def _conversation(entry: Dataset, template: ChatTemplate, sample: Sample) -> Rendered:
    messages = check_messages(_column(sample, entry.messages_field))
    system = _system(sample, entry)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = check_tools(sample.get(entry.tools_field)) if entry.tools_field else None
    return template.render(messages, tools)


def _chat_instruction(entry: Dataset, template: ChatTemplate, sample: Sample) -> Rendered:
    prompt, more = _text(sample, entry.instruction_field), _optional(sample, entry.input_field)
    messages = [
        {"role": "user", "content": f"{prompt}\n{more}" if more else prompt},
        {"role": "assistant", "content": _answer(sample, entry)},
    ]
    system = _system(sample, entry)
    return template.render([{"role": "system", "content": system}, *messages] if system else messages)


def _formatted_instruction(entry: Dataset, prompt_format: str, tokenizer: "PreTrainedTokenizerFast") -> Format:
    without_input = entry.prompt_format_no_input or prompt_format
    _check_prompt_format("prompt_format", prompt_format)
    _check_prompt_format("prompt_format_no_input", without_input)
    if tokenizer.eos_token is None:
        raise UserError("the tokenizer has no end-of-sequence token: an answer after prompt_format would never stop")

    def convert(sample: Sample) -> Rendered:
        more = _optional(sample, entry.input_field)
        prompt = (prompt_format if more else without_input).format(
            system=_system(sample, entry) or "", instruction=_text(sample, entry.instruction_field), input=more
        )
        text = prompt + _answer(sample, entry)
        return Rendered(text, ((len(prompt), len(text)),), append_eos=True)

    return convert


def _check_prompt_format(option: str, form: str):
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(form) if name is not None}
    except ValueError as error:
        raise UserError(f"{option}: {error}; write {{{{ and }}}} for plain braces") from None
    if unknown := names - {"system", "instruction", "input"}:
        raise UserError(f"{option}: unknown {{{unknown.pop()}}}; known are {{system}}, {{instruction}} and {{input}}")


def _classification(entry: Dataset, labels: tuple[str, ...], append_eos: bool, sample: Sample) -> Rendered:
    text = _text(sample, entry.text_field)
    if entry.text_pair_field is not None:
        text = f"{text}\n{_text(sample, entry.text_pair_field)}"
    if not text:
        raise Refused(f"column {entry.text_field!r} is empty")
    return Rendered(text, (), append_eos, label_of(sample, entry.target_column, labels))


def _ends_texts(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether tokenizer(text) ends with an end-of-sequence token that transformers does not take for padding."""
    end = tokenizer.eos_token_id
    return tokenizer("a").input_ids[-1] == end != tokenizer.pad_token_id


def _tokenized(vocabulary: int, sample: Sample) -> Encoded:
    tokens = _integers(sample, "input_ids")
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if outside.size:
        raise UserError(
            f"input_ids[{outside[0]}] = {tokens[outside[0]]} is not in the vocabulary of {vocabulary} tokens"
        )
    trained = np.ones(len(tokens), bool)
    if sample.get("labels") is not None:
        labels = _integers(sample, "labels", len(tokens))
        trained = labels != IGNORED_LABEL
        wrong = np.flatnonzero(trained & (labels != tokens))
        if wrong.size:
            raise UserError(
                f"labels[{wrong[0]}] = {labels[wrong[0]]} is neither {IGNORED_LABEL} nor input_ids[{wrong[0]}] = "
                f"{tokens[wrong[0]]}; labels are not shifted"
            )
    if sample.get("attention_mask") is not None:
        real = _integers(sample, "attention_mask", len(tokens)) != 0
        tokens, trained = tokens[real], trained[real]
    return Encoded(tokens.astype(np.int32), trained.astype(np.float16))


def _integers(sample: Sample, column: str, length: int | None = None) -> np.ndarray:
    raw = _column(sample, column)
    try:
        values = np.asarray(raw if len(raw) else np.zeros(0, np.int64))
    except (TypeError, ValueError):
        values = np.zeros((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise UserError(f"column {column!r} must be a list of integers, found {clip(repr(raw))}")
    if length is not None and len(values) != length:
        raise UserError(f"column {column!r} has {len(values)} entries, input_ids {length}")
    return values


def _column(sample: Sample, column: str) -> Any:
    if column not in sample:
        raise UserError(f"missing column {column!r}; it has {', '.join(map(str, sample)) or 'none'}")
    return sample[column]


def _text(sample: Sample, column: str) -> str:
    value = _column(sample, column)
    if not isinstance(value, str):
        raise UserError(f"column {column!r} must be text, found {clip(repr(value))}")
    return value


def _optional(sample: Sample, column: str | None) -> str:
    return _text(sample, column) if column and sample.get(column) is not None else ""


def _system(sample: Sample, entry: Dataset) -> str | None:
    return _optional(sample, entry.system_field) or entry.system_prompt


def _answer(sample: Sample, entry: Dataset) -> str:
    answer = _text(sample, entry.output_field)
    if not answer:
        raise Refused(f"column {entry.output_field!r} is empty, so nothing is trained")
    return answer
