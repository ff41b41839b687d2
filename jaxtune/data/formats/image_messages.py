"""Conversations with images: images found in a sample, and their placeholders expanded to image tokens."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Rendered
from jaxtune.data.chat.messages import IMAGE_PARTS, Message
from jaxtune.data.chat.sandbox import IMAGE
from jaxtune.data.formats.boxes import Scale, default_scale, fill_boxes
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.images.placeholders import find_placeholder
from jaxtune.errors import UserError, format_count
from jaxtune.image_layout import ImageRef
from jaxtune.tokenizer_type import Tokenizer

COLUMNS = ("images", "image")
"""Columns of a sample's images, a list or one image."""

TYPES = ("conversation", "instruction", "preference", "unpaired_preference")
"""Types of samples that may have images."""

PLACEHOLDER = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift


class ImageMessages:
    """Renders conversations with images."""

    def __init__(self, reader: ImageReader, tokenizer: Tokenizer):
        """Find the family's text of an image. Raises UserError if the tokenizer lacks a token for them."""
        self._reader, self._vocabulary = reader, tokenizer.get_vocab()
        self._scale: Scale = reader.norm_bbox or default_scale(reader.family)
        self._placeholder = find_placeholder(reader.family, tokenizer, reader.layout)
        self.folder = ""
        """The folder, or URL of a folder, of relative paths in the sample."""

    def render(
        self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None, sample: Mapping[str, Any]
    ) -> Rendered:
        """Render a conversation as `ChatTemplate.render` does, with the tokens of its images, which are context.

        An image is a part of a message, or a placeholder <image> in its text; what neither names is in the sample's
        column `images` or `image`. In a sample without any image, <image> is text.

        Args:
            template: the chat template.
            messages: the conversation, as `check_messages` returns it if images are allowed.
            tools: the tools.
            sample: the columns of the sample.

        Raises:
            UserError: the numbers of placeholders and images differ, an image cannot be read, or the template writes
                another number of images.
        """
        return self._render(lambda shown: template.render(shown, tools), messages, sample)

    def prompt(
        self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None, sample: Mapping[str, Any]
    ) -> Rendered:
        """Render the prompt of the assistant's next message; arguments and errors as in `render`."""
        return self._render(lambda shown: Rendered(template.text(shown, tools, answered=False)), messages, sample)

    def _render(
        self, write: Callable[[list[Message]], Rendered], messages: list[Message], sample: Mapping[str, Any]
    ) -> Rendered:
        listed = images_in(sample)
        sources: list[Any] = []
        shown: list[Message] = []
        for message in messages if listed or any(message.get("images") for message in messages) else ():
            of_parts = iter(message.get("images", ()))
            marks = re.findall(f"{IMAGE}|{PLACEHOLDER}", message["content"])
            sources += [next(of_parts) if mark == IMAGE else None for mark in marks]
            shown.append({**message, "content": message["content"].replace(PLACEHOLDER, IMAGE)})
        shown = shown or messages
        chosen = [_index(source, len(listed)) for source in sources]
        unchosen = [image for i, image in enumerate(listed) if i not in chosen]
        if (placeholders := sources.count(None)) != len(unchosen):
            raise UserError(
                f"{format_count(placeholders, 'placeholder')} for {format_count(len(unchosen), 'image')}: each image "
                f"of the column {' or '.join(map(repr, COLUMNS))} needs one {PLACEHOLDER} in a message"
            )
        rest = iter(unchosen)
        sources = [source if i is None else listed[i] for source, i in zip(sources, chosen)]
        found = [self._reader.find(next(rest) if one is None else one, self.folder) for one in sources]
        if sample.get("objects"):
            sizes = [sizes for _, *sizes in found]
            shown = fill_boxes(shown, sample["objects"], sizes, self._scale, self._vocabulary)
        try:
            rendered = write(shown)
        except UserError as error:
            if not found:
                raise
            hint = "the sample has images, which only a template of a model that sees can write: leave chat.template"
            raise type(error)(f"{error}; {hint} unset to take the model's own") from error
        return self._expand(rendered, tuple(ref for ref, *_ in found))

    def _expand(self, rendered: Rendered, images: Sequence[ImageRef]) -> Rendered:
        """Return a text in which each placeholder is the tokens of an image, outside the trained spans."""
        written, text = self._placeholder.written, rendered.text
        if (count := text.count(written)) != len(images):
            raise UserError(
                f"the rendered text has {written} {format_count(count, 'time')} for "
                f"{format_count(len(images), 'image')}: the text of a message may not hold "
                "it, and the chat template must write it for each image"
            )
        # `holes`: (start, end, length of the expanded text) of the placeholders, with the texts around them.
        pieces, holes, start = [], [], 0
        before, after = self._placeholder.around
        for image in images:
            place = text.index(written, start)
            expanded = self._placeholder(image, self._reader.layout)
            pieces += [text[start:place], expanded]
            start = place + len(written)
            if text.endswith(before, 0, place) and text.startswith(after, start):
                holes.append((place - len(before), start + len(after), len(before) + len(expanded) + len(after)))
            else:
                holes.append((place, start, len(expanded)))
        weights = rendered.weights or [1.0] * len(rendered.spans or ())
        weighted = [(span, weight) for span, weight in zip(rendered.spans or (), weights)]
        for place, end, length in reversed(holes):
            shift = length - (end - place)
            weighted = [
                (piece, weight)
                for (first, last), weight in weighted
                for piece in ((first, min(last, place)), (max(first, end) + shift, last + shift))
                if piece[0] < piece[1]
            ]
        weights = None if rendered.weights is None else tuple(weight for _, weight in weighted)
        spans = None if rendered.spans is None else tuple(span for span, _ in weighted)
        text = "".join([*pieces, text[start:]])
        return dataclasses.replace(rendered, text=text, spans=spans, weights=weights, images=tuple(images))


def _index(source: Any, count: int) -> int | None:
    """Return which of `count` listed images a part of a message selects; None: it selects none by its number."""
    if not isinstance(source, dict) or source.keys() != {"index"}:
        return None
    index = source["index"]
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise UserError(f"an image has index {index!r}, and the sample lists {format_count(count, 'image')}, from 0")
    return index


def holds_image(message: Message) -> bool:
    """Return whether a message, as the sample has it, holds an image."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return any(part.get("type") in IMAGE_PARTS or PLACEHOLDER in str(part.get("text")) for part in parts)
    return isinstance(content, str) and PLACEHOLDER in content


def has_images(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has images, in a column of images or as parts of messages, which may be JSON text."""
    return any(sample.get(column) for column in COLUMNS) or any(map(_has_image_part, sample.values()))


def _has_image_part(value: Any) -> bool:
    """Return whether a part of a message with an image is somewhere in a value."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    if isinstance(value, dict):
        return value.get("type") in IMAGE_PARTS or any(map(_has_image_part, value.values()))
    return isinstance(value, list) and any(map(_has_image_part, value))


def images_in(sample: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a sample. Raises UserError if it has both columns."""
    listed = [sample[column] for column in COLUMNS if sample.get(column)]
    if len(listed) > 1:
        raise UserError(f"both columns {' and '.join(map(repr, COLUMNS))} hold images: leave one out")
    if not listed:
        return []
    return list(listed[0]) if isinstance(listed[0], list | tuple) else listed
