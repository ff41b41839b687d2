"""Prompts: the text or messages before an answer, which is in the data or which a model generates."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.config.schema import ChatOptions, Dataset
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoded, Encoder, Rendered
from jaxtune.data.chat.messages import Message, check_messages, check_tools, clip
from jaxtune.data.formats.dialects import HISTORY, normalise_conversation, read_history
from jaxtune.data.formats.image_messages import PLACEHOLDER, ImageMessages, images_in
from jaxtune.data.formats.templates import fill, is_template
from jaxtune.data.reading import sources
from jaxtune.data.reading.readers import folder_of
from jaxtune.data.reading.skipped_samples import LITTLE, list_skipped
from jaxtune.errors import UserError
from jaxtune.image_layout import ImageRef
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")

Sample = Mapping[str, Any]

_ASKED = ("prompt", "question", "query", "instruction", "conversations", "messages")  # columns of a prompt, best first
_USED = {"system": "system_field", "tools": "tools_field"}  # columns that are used even if no option names them


class Prompt(NamedTuple):
    """A prompt to continue.

    Attributes:
        given: text or messages, as in the data.
        tokens: all tokens before the first one that the model generates.
        sample: all columns of the data.
        begun: the beginning of the answer that is already among the tokens, chat.response_prefix.
        continued: the tokens, if the answer continues their text; empty in a chat, whose answer is a separate text.
        teacher_tokens: the tokens before the answer that a teacher sees instead; empty: it sees the same ones.
        document: the prompt with the answer in the data; None if it is not read.
        messages: of a chat, with its system prompt; empty for a text that is not a message.
        tools: descriptions of the tools of a chat.
        images: the images, in the order of their tokens.
    """

    given: str | list[Message]
    tokens: list[int]
    sample: Sample
    begun: str = ""
    continued: Sequence[int] = ()
    teacher_tokens: Sequence[int] = ()
    document: Encoded | None = None
    messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    images: tuple[ImageRef, ...] = ()


class RowTools(NamedTuple):
    """Tools of a run, which its prompts describe instead of the data's tools.

    Attributes:
        schemas: a sample -> the descriptions of its tools. Raises UserError.
        promptless: whether samples may have no prompt, because an environment writes it.
    """

    schemas: Callable[[Sample], list[Any]]
    promptless: bool


class Prompts:
    """Turns samples into prompts, with a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatOptions,
        texts_are_chat: bool | None = None,
        row_tools: RowTools | None = None,
        images: ImageMessages | None = None,
    ):
        """Read the chat template.

        Args:
            tokenizer: the model's tokenizer.
            chat: the section chat.
            texts_are_chat: whether a text is a message of the user; None: if the tokenizer has a chat template.
            row_tools: the tools of the run; None: the data's tools.
            images: finds the images of messages. A text of a sample with images is a message of the user; without
                <image> in it, they come before it. None: messages with images are refused.
        """
        has_template = bool(tokenizer.chat_template)
        self._texts_are_chat = has_template if texts_are_chat is None else texts_are_chat
        self._template = ChatTemplate(tokenizer, chat=chat) if has_template or texts_are_chat else None
        self._encode, self._begun = Encoder(tokenizer), chat.response_prefix or ""
        self._row_tools, self._images = row_tools, images
        self._found: dict[tuple[Any, ...], Dataset] = {}

    @property
    def turn_end(self) -> str | None:
        """The special token that ends an answer; None without a chat template, or if the template has no such token."""
        return None if self._template is None else self._template.turn_end()

    def __call__(self, entry: Dataset, sample: Sample) -> Prompt:
        """Return the prompt of a sample. Raises UserError if it has none, or one that is neither text nor messages.

        The columns `system` and `tools`, and `input` after an instruction, are used even if the entry names none.
        """
        prompt = self._prompt(self._with_columns(entry, sample), sample)
        if entry.teacher_prompt_field is None:
            return prompt
        of_teacher = dataclasses.replace(entry, prompt_field=entry.teacher_prompt_field)
        return prompt._replace(teacher_tokens=self._prompt(self._with_columns(of_teacher, sample), sample).tokens)

    def _prompt(self, entry: Dataset, sample: Sample) -> Prompt:
        given = prompt_in(entry, sample)
        if not given and self._row_tools is not None and self._row_tools.promptless:
            given = [{"role": "user", "content": ""}]  # as in TRL
        if not given:
            empty = entry.prompt_field in sample
            named = f"column {entry.prompt_field!r} is empty" if empty else f"its columns are {', '.join(sample)}"
            raise UserError(f"it has no prompt; {named}")
        if self._template is None and self._row_tools is not None:
            raise UserError("tools and environments need a chat, and the tokenizer has no template: set chat.template")
        listed = [] if self._images is None else images_in(sample)
        if isinstance(given, str) and not self._texts_are_chat and not listed:
            tokens = self._encode([Rendered(given)])[0].tokens.tolist()
            return Prompt(given, tokens, sample, continued=tokens)
        if self._template is None:
            held = "messages" if not listed else "images"
            raise UserError(f"it holds {held}, and the tokenizer has no chat template: set chat.template")
        if not isinstance(given, str) and given[-1]["role"] == "assistant":
            given = given[:-1]  # the answer in the data
        if isinstance(given, str):
            before = "" if PLACEHOLDER in given else PLACEHOLDER * len(listed)
            messages = [{"role": "user", "content": before + given}]
        else:
            messages = given
        messages, tools = with_system_and_tools(messages, entry, sample, self._images is not None)
        if self._row_tools is not None:
            tools = self._row_tools.schemas(sample) or None
        if self._images is None:
            tokens, images = self._template.prompt(messages, tools), ()
        else:
            rendered = self._images.prompt(self._template, messages, tools, sample)
            tokens, images = self._template.encode(rendered.text), rendered.images
        continued = tokens if self._begun else ()  # a prefix is text that the answer continues
        chat = {"messages": messages, "tools": tools or (), "images": images}
        return Prompt(given, tokens, sample, self._begun, continued, **chat)

    def _with_columns(self, entry: Dataset, sample: Sample) -> Dataset:
        """Return the entry with the columns to use, found once for all samples that fill the same columns."""
        key = entry, *(sample.get(name) is not None for name in _ASKED), *(bool(sample.get(name)) for name in _USED)
        if (found := self._found.get(key)) is not None:
            return found
        if entry.prompt_field is None and (fields := prompt_fields(entry, sample)):
            entry = dataclasses.replace(entry, prompt_field=fields[0][1])
        if entry.input_field == Dataset().input_field and entry.prompt_field != Dataset().instruction_field:
            entry = dataclasses.replace(entry, input_field=None)
        for column, option in _USED.items():
            if getattr(entry, option) is None and sample.get(column):
                entry = dataclasses.replace(entry, **{option: column})
        self._found[key] = entry
        return entry


def read_prompts(
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    chat: ChatOptions,
    most_tokens: int,
    skip: bool,
    add_answer: Callable[[Dataset, Sample, Prompt], Prompt] | None = None,
    row_tools: RowTools | None = None,
    images: ImageMessages | None = None,
    most_patches: int | None = None,
) -> list[Prompt]:
    """Read all prompts of data.datasets into memory, without prompts of more than `most_tokens` tokens.

    Args:
        entries: the entries of data.datasets.
        tokenizer: the model's tokenizer.
        chat: the section chat.
        most_tokens: the most tokens of a prompt, also of the teacher's; longer ones are left out and counted.
        skip: whether to leave out bad samples and samples without a prompt (data.on_bad_row='skip').
        add_answer: adds the answer in the data (`formats.answer_reader`); None: it is not read.
        row_tools: the tools of the run; None: the data's tools.
        images: as in `Prompts`.
        most_patches: the most patches of a prompt's images; prompts with more are left out and counted.

    Raises:
        UserError: a sample is bad and `skip` is False; no prompt is left.
    """
    kept, longer, over, uncut = [], 0, 0, 0
    prompts, bad = Prompts(tokenizer, chat, row_tools=row_tools, images=images), []

    def report(error: UserError) -> None:
        if not skip:
            raise error
        bad.append(str(error))

    for entry in entries:
        for where, sample in sources.open_source(entry).read(report):
            if images is not None:
                images.folder = folder_of(where)
            try:
                prompt = prompts(entry, sample)
                prompt = prompt if add_answer is None else add_answer(entry, sample, prompt)
            except UserError as error:
                report(UserError(f"{where}: {error}"))
                continue
            most = most_tokens
            if entry.max_prompt_tokens is not None and prompt.images:  # an image is never cut
                most = min(most, entry.max_prompt_tokens)
            elif entry.max_prompt_tokens is not None:
                prompt = prompt._replace(tokens=prompt.tokens[-entry.max_prompt_tokens :])  # the end is kept
            length = max(len(prompt.tokens), len(prompt.teacher_tokens))
            longer, uncut = longer + (length > most_tokens), uncut + (most < length <= most_tokens)
            seen = most_patches is None or sum(image.patches for image in prompt.images) <= most_patches
            over += length <= most and not seen
            kept += [prompt] if length <= most and seen else []
    larger = f", {uncut:,} with images of more than max_prompt_tokens" if uncut else ""
    larger += f", {over:,} of more than vision.patches_per_row={most_patches} patches" if over else ""
    log.info(f"data: {len(kept):,} prompts; {longer:,} too long{larger}, {len(bad):,} bad samples skipped")
    if not kept:
        raise UserError(
            f"data: no prompt of at most {most_tokens} tokens is left (data.seq_len less rollout.max_new_tokens); "
            + (f"the first problem: {bad[0]}" if bad else f"{longer} are longer{larger}")
        )
    _warn_left_out(len(kept), longer + uncut + over, bad, most_tokens)
    return kept


def _warn_left_out(kept: int, large: int, bad: Sequence[str], most_tokens: int) -> None:
    """Warn of bad samples, and of large prompts if they are more than a twentieth, as of documents."""
    if bad:
        log.warning("data: %s", list_skipped(bad, len(bad)))
    if large > LITTLE * (kept + large):
        log.warning(
            "data: %d of %d prompts are left out: they have more than %d tokens (data.seq_len less "
            "rollout.max_new_tokens), or larger images than options allow; raise data.seq_len",
            *(large, kept + large, most_tokens),
        )


def prompt_fields(entry: Dataset, sample: Sample) -> list[tuple[str, str]]:
    """Return (option, column) of the prompt and of earlier exchanges; [] if the sample has no known prompt column."""
    if entry.prompt_field is not None:
        return [("prompt_field", entry.prompt_field)]
    answer = entry.output_field if entry.type == "unpaired_preference" else None
    field = next((name for name in _ASKED if sample.get(name) is not None and name != answer), None)
    history = [("", HISTORY)] if isinstance(sample.get(HISTORY), list) else []
    return [] if field is None else [("prompt_field", field), *history]


def prompt_in(entry: Dataset, sample: Sample) -> Any:
    """Return the prompt of a sample, text or messages; None if entry.prompt_field is None: answers begin with it."""
    field = entry.prompt_field
    if field is None:
        return None
    prompt = fill(field, sample) if is_template(field) else value_in(entry, sample, field)
    if isinstance(prompt, str):
        addition = sample.get(entry.input_field) if entry.input_field else None
        prompt = f"{prompt}\n{addition}" if isinstance(addition, str) and addition else prompt
        if isinstance(sample.get(HISTORY), list):
            prompt = [*read_history(sample), {"role": "user", "content": prompt}]
    return prompt


def value_in(entry: Dataset, sample: Sample, column: str) -> Any:
    """Return a column's text or messages, with the keys and roles of OpenAI; messages may be given as JSON text."""
    if column not in sample:
        raise UserError(f"missing column {column!r}; it has {', '.join(map(str, sample)) or 'none'}")
    value = sample[column]
    renamed = dict(pair.split("=", 1) for pair in entry.message_property_mappings)
    messages = [value] if isinstance(value, dict) else _parse_list(value) if isinstance(value, str) else value
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return normalise_conversation(messages, renamed)
    if not isinstance(value, str):
        raise UserError(f"column {column!r} must be text or messages, found {clip(repr(value))}")
    return value


def _parse_list(text: str) -> Any:
    """Parse the JSON of a list; None if the text is not JSON, such as an answer that merely begins with a bracket."""
    try:
        return json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:
        return None


def with_system_and_tools(
    messages: list[dict[str, Any]], entry: Dataset, sample: Sample, images: bool = False
) -> tuple[list[Message], list[Any] | None]:
    """Return the messages with the system prompt of the sample or the entry, and the tools of the sample.

    `images`: as in `check_messages`.
    """
    messages = check_messages(messages, images)
    system = sample.get(entry.system_field) if entry.system_field else None
    if not isinstance(system, str | None):
        raise UserError(f"column {entry.system_field!r} must be text, found {clip(repr(system))}")
    system = system or entry.system_prompt
    if system and messages[0]["role"] != "system":
        messages = [*check_messages([{"role": "system", "content": system}], images), *messages]
    return messages, check_tools(sample.get(entry.tools_field)) if entry.tools_field else None
