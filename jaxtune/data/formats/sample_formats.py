"""Turn samples into documents. The type of a dataset is recognised by the columns of its first sample."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxtune.columns import DESIRABLE, LABEL, OPTION_SHARES, SCORE_DELTA, Column
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoded, Rendered, RenderedUnit, UntrainableSample
from jaxtune.data.chat.messages import NO_IMAGES, check_messages, check_tools, clip
from jaxtune.data.formats import preferences
from jaxtune.data.formats.dialects import HISTORY, PROMPT_AND_COMPLETION, QUERIES_AND_ANSWERS, messages_in, read_history
from jaxtune.data.formats.image_messages import COLUMNS as IMAGE_COLUMNS
from jaxtune.data.formats.image_messages import ImageMessages
from jaxtune.data.formats.labels import label_number
from jaxtune.data.formats.questions import read_questions, render_questions
from jaxtune.data.formats.templates import columns_in, fill, fill_to, is_template
from jaxtune.data_options import READ_BY_TYPE, TASK_TYPES, ChatOptions, Dataset
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

Sample = Mapping[str, Any]
Format = Callable[[Sample], Rendered | Encoded | RenderedUnit]

Say = Callable[[str], object]
"""Takes a line for the user about a dataset; the same line is shown only once."""

COLUMNS: dict[str, tuple[Column, ...]] = {
    "classification": (LABEL,),
    "decision": (OPTION_SHARES,),
    "preference": (SCORE_DELTA,),
    "unpaired_preference": (DESIRABLE,),
}
"""Columns that documents of a type have besides tokens and weights."""

_LONG_NAME = 50  # characters: a longer column name is taken for text
IGNORED_LABEL = -100  # ignore_index of torch's cross_entropy
"""The label of a token that is not trained, as in Hugging Face datasets."""

# Column names to try if the entry does not set the option; the first one that the sample has is used.
KNOWN = {
    "text_field": ("text", "tgt"),  # tgt: ERNIEKit's stage PT
    "messages_field": ("messages", "conversations", "conversation"),
    "instruction_field": ("instruction", "prompt", "question", "query", "problem", "input"),
    "output_field": ("output", "completion", "answer", "response", "solution", "targets", "target", "answer_key"),
}

# Optional columns that `auto` reads, by the option that names another column; and columns that are always read.
BESIDE = {"tools_field": ("tools",), "system_field": ("system", "system_prompt")}
OF_IMAGES = (*IMAGE_COLUMNS, "objects")
_ALWAYS_BESIDE = {("input_ids",): ("labels", "attention_mask"), QUERIES_AND_ANSWERS: ("label",)}


def detect(entry: Dataset, sample: Sample) -> tuple[Dataset, tuple[str, ...]]:
    """Decide the type and columns of an entry from its first sample.

    Type auto is the first type that reads all options set in the entry, and whose columns the sample has.

    Returns:
        The entry with its type and fields set, and the columns that decided the type.

    Raises:
        UserError: the columns fit no type, or not the type set in the entry.
    """
    if entry.type != "auto":
        types = [entry.type]
    else:
        every = {option for type_ in READ_BY_TYPE for option in _options(type_)}
        set_options = {option for option in every if getattr(entry, option) != getattr(Dataset(), option)}
        # `auto` never picks the type of a task (classification, preference): their columns also fit other types. A text
        # with a label is text too, and one of two answers is an answer.
        types = [type_ for type_ in READ_BY_TYPE if type_ not in TASK_TYPES and set_options <= set(_options(type_))]
        if not types:
            raise UserError(f"no type reads all of {', '.join(sorted(set_options))}; set type, and only what it reads")
    for type_ in types:
        needed = _needed_columns(type_, entry, sample)
        columns = tuple(dict.fromkeys(column for _, field in needed for column in columns_in(field)))
        if set(columns) <= sample.keys():
            break
    else:
        raise UserError(_no_type(types, entry, sample))
    changes: dict[str, Any] = {option: field for option, field in needed if option}
    # A column may be the default of two options (`input`): it is the instruction, and there is no further input.
    if changes.get("instruction_field") == entry.input_field:
        changes["input_field"] = None
    of_preference = type_ in ("preference", "unpaired_preference")
    if of_preference and changes.get("prompt_field") != "instruction":
        changes["input_field"] = None
    for option, known in BESIDE.items() if entry.type == "auto" or of_preference else ():
        if option in _options(type_) and not getattr(entry, option):
            changes[option] = next((column for column in known if column in sample), None)
    return dataclasses.replace(entry, type=type_, **changes), columns


def _no_type(types: list[str], entry: Dataset, sample: Sample) -> str:
    """Return the text of the error: the columns that the sample has, and the columns that each type needs."""
    has = ", ".join(map(str, sample)) or "none"
    pair = {"chosen", "rejected"} <= sample.keys()
    if pair and types == ["unpaired_preference"]:
        return (
            f"a pair of answers, with the columns {has}, and preference.loss='kto' learns from single ones: give each "
            "answer a sample with the columns prompt, completion and label, true for the chosen one and false for the "
            "rejected one; or set a loss of pairs, such as preference.loss='sigmoid' for DPO"
        )
    if pair and "preference" not in types:
        return (
            f"preference data, with the columns {has}: set preference.loss, 'sigmoid' for DPO; or to learn only the "
            "better answer, type='instruction' with output_field='chosen'"
        )
    needed = {
        type_: " and ".join(
            field + (f" ({option})" if option else "") for option, field in _needed_columns(type_, entry, sample)
        )
        for type_ in types
    }
    wanted = "; ".join(f"{type_}: {columns}" for type_, columns in needed.items())
    general = f"missing column: it has {has}, but needs {wanted}; the options in brackets name other columns"
    cause = _cause(types, entry, sample)
    return f"{cause}. Otherwise: {general}" if cause else general


def _cause(types: list[str], entry: Dataset, sample: Sample) -> str:
    """Return the likely cause that a sample has no known column; "" if nothing hints at one."""
    column = next((name for name in sample if _is_messages(sample[name])), None)
    if column is not None and "conversation" not in types:
        return f"column {column!r} holds a conversation, and this run learns from samples of type {' or '.join(types)}"
    if column is not None:
        return (
            f"column {column!r} holds messages: set messages_field={column!r}, which is "
            f"'--config.data.datasets[0].messages_field={column}' for the first dataset"
        )
    if alike := _columns_in_other_case(types, entry, sample):
        options = " and ".join(f"{option}={column!r}" for option, column in alike.items())
        return f"names of columns differ by capitals only: set {options}"
    lists = {
        column: len(value)
        for column, value in sample.items()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    }
    if lists:
        names = " and ".join(f"{column!r} ({count:,})" for column, count in lists.items())
        written = f"write each list to a file of its own, such as `jq .{next(iter(lists))} FILE > samples.json`"
        return f"if the objects in {names} are the samples, {written}"
    if any(re.search(r"[.?!]( |$)|^-?[\d.]+$|^$", column) or len(column) > _LONG_NAME for column in sample):
        return "if this is a CSV file without a header, write one: its first line names the columns"
    paths = (entry.path,) if isinstance(entry.path, str) else entry.path or ()
    is_csv = entry.ds_type in ("csv", "tsv") or any(re.search(r"\.[ct]sv(\.\w+)?$", path) for path in paths)
    if is_csv and all(_kinds_of_words(column) == _kinds_of_words(value) for column, value in sample.items()):
        first = clip(", ".join(map(str, sample)))
        return (
            f"the first line seems to be data, not a header: {first!r} is like the next one; write a header before it, "
            "which names the columns"
        )
    return ""


def _is_messages(value: Any) -> bool:
    """Whether a value is a list of objects with a role and content, as they are commonly named."""
    names = ({"role", "content"}, {"from", "value"})
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) and any(keys <= row.keys() for keys in names) for row in value)
    )


def _columns_in_other_case(types: list[str], entry: Dataset, sample: Sample) -> dict[str, str]:
    """Return columns whose names differ from needed ones only in case, by the option that names each."""
    alike = {}
    for option in dict.fromkeys(option for type_ in types for option in READ_BY_TYPE[type_][0]):
        field, default = getattr(entry, option), getattr(Dataset(), option)
        names = KNOWN.get(option, (default,)) if field == default else (field,)
        if not any(name in sample for name in names):
            pairs = ((name, column) for name in names for column in sample)
            if column := next((column for name, column in pairs if str(name).lower() == str(column).lower()), None):
                alike[option] = column
    return alike


def _kinds_of_words(text: Any) -> list[str]:
    """Return the kind of each word of a value's text: letters, digits, or others."""
    return ["letters" if word.isalpha() else "digits" if word.isdigit() else "others" for word in str(text).split()]


def _needed_columns(type_: str, entry: Dataset, sample: Sample) -> list[tuple[str, str]]:
    """Return (option, column) for the columns that a sample of a type must have; option "": none names the column."""
    if type_ == "tokenized":
        return [("", "input_ids")]
    if type_ == "preference" and (needed := preferences.needed_fields(entry, sample)):
        return needed
    fields = [(option, _field(option, entry, sample)) for option in READ_BY_TYPE[type_][0]]
    if type_ == "unpaired_preference":
        entry = dataclasses.replace(entry, output_field=fields[0][1])
        return [*fields, *preferences.prompt_fields(entry, sample)]
    if type_ == "conversation" and fields[0][1] not in sample:
        if set(QUERIES_AND_ANSWERS) <= sample.keys():
            return [("", column) for column in QUERIES_AND_ANSWERS]
        if all(isinstance(sample.get(column), list) for column in PROMPT_AND_COMPLETION):
            return [("", column) for column in PROMPT_AND_COMPLETION]
    if type_ == "instruction" and entry.prompt_format is None and isinstance(sample.get(HISTORY), list):
        fields.append(("", HISTORY))
    if type_ == "instruction" and entry.prompt_format is not None:
        named = set(columns_in(entry.prompt_format) + columns_in(entry.prompt_format_no_input or ""))
        fields = [field for field in fields if field[0] == "output_field" or "instruction" in named]
        fields += [("", column) for column in sorted(named - {"system", "instruction", "input", "output", ""})]
    return fields


def _field(option: str, entry: Dataset, sample: Sample) -> str:
    """Return the column that the entry names, else the first known column that the sample has, else the default."""
    field = getattr(entry, option)
    if field != getattr(Dataset(), option):
        return field
    return next((column for column in KNOWN.get(option, ()) if column in sample), field)


def find_unused(entry: Dataset, found: tuple[str, ...], columns: Iterable[str], images: bool = False) -> Iterator[str]:
    """Yield columns that are not used, with the option that would use each.

    Args:
        entry: the entry that `detect` returned.
        found: the columns that `detect` returned.
        columns: the columns of samples.
        images: whether images are read.
    """
    read = {*found, *_ALWAYS_BESIDE.get(found, ()), *(OF_IMAGES if images else ())}
    for option in _options(entry.type):
        if option.endswith(("_field", "_column")) and (field := getattr(entry, option)):
            read.update(columns_in(field))
    for column in columns:
        if column not in read:
            option = next((option for option in _options(entry.type) if column in BESIDE.get(option, ())), None)
            yield repr(column) + (f" ({option}={column!r} would)" if option else "")


def _options(type_: str) -> tuple[str, ...]:
    """Return the options that a type reads."""
    needed, more = READ_BY_TYPE[type_]
    return needed + more


def refuse_images(sample: Sample, reason: str = NO_IMAGES) -> None:
    """Raise UserError for a sample with images: the text refers to them, and they cannot be trained on."""
    if column := next((column for column in IMAGE_COLUMNS if sample.get(column)), None):
        raise UserError(f"column {column!r} holds images: {reason}; remove the column if the text needs none")


def make_format(
    entry: Dataset,
    columns: tuple[str, ...],
    tokenizer: Tokenizer,
    say: Say = lambda line: None,
    labels: tuple[str, ...] = (),
    chat: ChatOptions = ChatOptions(),
    images: ImageMessages | None = None,
) -> Format:
    """Return the function that turns a sample into a document.

    Args:
        entry: the entry that `detect` returned.
        columns: the columns that `detect` returned.
        tokenizer: its vocabulary, special tokens and chat template are used.
        say: called with a line about each part of a conversation that the chat template leaves out.
        labels: the names of classes, by number.
        chat: the section chat, which selects the messages to train.
        images: renders conversations with images; None: without images.

    Raises:
        UserError: here, if the tokenizer or the entry's options do not allow the type; from the returned function, if a
            sample is malformed (`UntrainableSample`: it is well formed, but nothing in it is trained).
    """
    match entry.type:
        case "text":
            if tokenizer.eos_token is None:
                raise UserError(
                    "the tokenizer has no end-of-sequence token, so no document would have an end and generation "
                    "would never stop; set eos_token in its tokenizer_config.json"
                )
            return lambda sample: Rendered(_running_text(sample, entry.text_field), append_eos=True)
        case "tokenized":
            return partial(_read_tokens, len(tokenizer))
        case "conversation":
            renamed = dict(pair.split("=", 1) for pair in entry.message_property_mappings)
            return partial(_conversation, entry, columns, renamed, ChatTemplate(tokenizer, say, chat), images)
        case "instruction":
            if entry.prompt_format is None:
                return partial(_chat_instruction, entry, columns, ChatTemplate(tokenizer, say, chat), images)
            if tokenizer.eos_token is None:
                raise UserError(
                    "the tokenizer has no end-of-sequence token: an answer after prompt_format would never stop"
                )
            return partial(_formatted_instruction, entry, entry.prompt_format)
        case "preference":
            return partial(preferences.render_pair, entry, columns, _template_of(tokenizer, say, chat), images)
        case "unpaired_preference":
            return partial(preferences.render_labelled_answer, entry, _template_of(tokenizer, say, chat), images)
        case "classification":
            return partial(_classification, entry, labels, ends_texts(tokenizer))
        case "decision":
            return partial(_decision, entry, ChatTemplate(tokenizer, say, chat))
    raise ValueError(entry.type)


def _template_of(tokenizer: Tokenizer, say: Say, chat: ChatOptions) -> ChatTemplate | None:
    if tokenizer.chat_template:
        return ChatTemplate(tokenizer, say, chat)
    if tokenizer.eos_token is None:
        raise UserError("the tokenizer has neither a chat template nor an end-of-sequence token; set chat.template")
    say("the tokenizer has no chat template: an answer follows its prompt as it is")
    return None


def _conversation(
    entry: Dataset,
    columns: tuple[str, ...],
    renamed: Mapping[str, str],
    template: ChatTemplate,
    images: ImageMessages | None,
    sample: Sample,
) -> Rendered:
    for column in columns:
        _column(sample, column)
    messages = check_messages(messages_in(sample, columns, renamed), images is not None)
    system = _system(sample, entry)
    if system and messages[0]["role"] != "system":
        messages = [*check_messages([{"role": "system", "content": system}], images is not None), *messages]
    tools = check_tools(sample.get(entry.tools_field)) if entry.tools_field else None
    return images.render(template, messages, tools, sample) if images else template.render(messages, tools)


def _chat_instruction(
    entry: Dataset, columns: tuple[str, ...], template: ChatTemplate, images: ImageMessages | None, sample: Sample
) -> Rendered:
    prompt = _text(sample, entry.instruction_field, "instruction_field")
    addition = _optional(sample, entry.input_field, "input_field")
    messages = [
        *(read_history(sample) if HISTORY in columns else ()),
        {"role": "user", "content": f"{prompt}\n{addition}" if addition else prompt},
        {"role": "assistant", "content": _answer(sample, entry)},
    ]
    system = _system(sample, entry)
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    messages = check_messages(messages, images is not None)
    return images.render(template, messages, None, sample) if images else template.render(messages)


def _formatted_instruction(entry: Dataset, prompt_format: str, sample: Sample) -> Rendered:
    addition, output = _optional(sample, entry.input_field, "input_field"), _answer(sample, entry)
    form = prompt_format if addition else entry.prompt_format_no_input or prompt_format
    values = dict(sample) | {"system": _system(sample, entry) or "", "input": addition, "output": output}
    if "instruction" in columns_in(form):
        values["instruction"] = _text(sample, entry.instruction_field, "instruction_field")
    prompt, answer = fill_to(form, "output", values)
    text = prompt + (answer or output)  # a format without {output} ends where the answer begins
    return Rendered(text, ((len(prompt), len(text)),), append_eos=True)


def _classification(entry: Dataset, labels: tuple[str, ...], append_eos: bool, sample: Sample) -> Rendered:
    text = _text(sample, entry.text_field, "text_field")
    if entry.text_pair_field is not None:
        text = f"{text}\n{_text(sample, entry.text_pair_field, 'text_pair_field')}"
    if not text:
        raise UntrainableSample(f"column {entry.text_field!r} is empty")
    return Rendered(text, (), append_eos, label_number(sample, entry.target_column, labels))


def _decision(entry: Dataset, template: ChatTemplate, sample: Sample) -> RenderedUnit:
    state, questions = (_column(sample, field) for field in (entry.state_field, entry.questions_field))
    read = read_questions(questions, entry.questions_field)
    return render_questions(state, read, _column(sample, entry.labels_field), entry.labels_field, template)


def ends_texts(tokenizer: Tokenizer) -> bool:
    """Whether tokenizer(text) ends with an end-of-sequence token that transformers does not take for padding."""
    end = tokenizer.eos_token_id
    return tokenizer("a").input_ids[-1] == end != tokenizer.pad_token_id  # the last token is `end`, no padding


def _read_tokens(vocabulary: int, sample: Sample) -> Encoded:
    tokens = _integers(sample, "input_ids")
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if outside.size:
        raise UserError(
            f"input_ids[{outside[0]}] = {tokens[outside[0]]} is not in the vocabulary of {vocabulary} tokens"
        )
    # Labels select the trained tokens. They are not targets of their own: labels[i] is input_ids[i] or IGNORED_LABEL.
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
        tokens, trained = tokens[real], trained[real]  # padding is left out: rows are packed here
    return Encoded(tokens.astype(np.int32), trained.astype(np.float16))  # 4 + 2 bytes a token


def _integers(sample: Sample, column: str, length: int | None = None) -> np.ndarray:
    raw = _column(sample, column)
    try:
        values = np.asarray(raw if len(raw) else np.zeros(0, np.int64))  # an empty list would be float64
    except (TypeError, ValueError):
        values = np.zeros((0, 0))
    if values.ndim != 1 or values.dtype.kind not in "iu":  # signed or unsigned; not bool, which is "b"
        raise UserError(f"column {column!r} must be a list of integers, found {clip(repr(raw))}")
    if length is not None and len(values) != length:
        raise UserError(f"column {column!r} has {len(values)} entries, input_ids {length}")
    return values


def _column(sample: Sample, column: str) -> Any:
    if column not in sample:
        raise UserError(f"missing column {column!r}; it has {', '.join(map(str, sample)) or 'none'}")
    return sample[column]


def _text(sample: Sample, field: str, option: str) -> str:
    """Return the text of a column, or of a template of columns; `option` is the option that holds `field`."""
    if is_template(field):
        return fill(field, sample)
    value = _column(sample, field)
    if not isinstance(value, str):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        hint = f"; {option}='{{{field}}}' writes numbers as text" if is_number else ""
        raise UserError(f"column {field!r} must be text, found {clip(repr(value))}{hint}")
    return value


def _running_text(sample: Sample, field: str) -> str:
    """Return the text of a column; a list of one text is that text, as ERNIEKit writes samples of stage PT."""
    value = sample.get(field)
    if isinstance(value, list) and len(value) == 1:
        sample = {**sample, field: value[0]}
    return _text(sample, field, "text_field")


def _optional(sample: Sample, field: str | None, option: str) -> str:
    if not field or not all(sample.get(column) is not None for column in columns_in(field)):
        return ""
    return _text(sample, field, option)


def _system(sample: Sample, entry: Dataset) -> str | None:
    return _optional(sample, entry.system_field, "system_field") or entry.system_prompt


def _answer(sample: Sample, entry: Dataset) -> str:
    answer = _text(sample, entry.output_field, "output_field")
    if not answer:
        raise UntrainableSample(f"column {entry.output_field!r} is empty, so nothing is trained")
    return answer
