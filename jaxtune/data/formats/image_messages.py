"""Conversations with images: images found in a sample, and their placeholders expanded to image tokens."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Rendered
from jaxtune.data.chat.messages import Message
from jaxtune.data.chat.sandbox import IMAGE
from jaxtune.data.formats.boxes import Scale, default_scale, fill_boxes
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.images.placeholders import find_placeholder
from jaxtune.errors import UserError, counted
from jaxtune.image_layout import ImageRef
from jaxtune.tokenizer_type import Tokenizer

COLUMNS = ("images", "image")
"""Columns of a sample's images, a list or one image."""

TYPES = ("conversation", "instruction", "preference", "unpaired_preference")
"""Types of samples that may have images."""

_PLACEHOLDER = "<image>"  # of LLaVA, LLaMA-Factory and ms-swift


class ImageMessages:
    """Renders conversations with images."""

    def __init__(self, reader: ImageReader, tokenizer: Tokenizer):
        """Find the texts that stand for an image. Raises UserError if the tokenizer lacks a token for them."""
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
        column `images` or `image`.

        Args:
            template: the chat template.
            messages: the conversation, as `check_messages` returns it if images are allowed.
            tools: the tools.
            sample: the columns of the sample.

        Raises:
            UserError: the numbers of placeholders and images differ, an image cannot be read, or the template writes
                another number of images.
        """
        sources: list[Any] = []
        shown: list[Message] = []
        for message in messages:
            of_parts = iter(message.get("images", ()))
            marks = re.findall(f"{IMAGE}|{_PLACEHOLDER}", message["content"])
            sources += [next(of_parts) if mark == IMAGE else None for mark in marks]
            shown.append({**message, "content": message["content"].replace(_PLACEHOLDER, IMAGE)})
        listed = images_in(sample)
        if (placeholders := sources.count(None)) != len(listed):
            raise UserError(
                f"{counted(placeholders, 'placeholder')} for {counted(len(listed), 'image')}: each image of the column "
                f"{' or '.join(map(repr, COLUMNS))} needs one {_PLACEHOLDER} in a message, where it belongs"
            )
        rest = iter(listed)
        found = [self._reader.find(next(rest) if one is None else one, self.folder) for one in sources]
        if sample.get("objects"):
            sizes = [sizes for _, *sizes in found]
            shown = fill_boxes(shown, sample["objects"], sizes, self._scale, self._vocabulary)
        return self._expand(template.render(shown, tools), tuple(ref for ref, *_ in found))

    def _expand(self, rendered: Rendered, images: Sequence[ImageRef]) -> Rendered:
        """Return a text in which each placeholder is the tokens of an image, outside the trained spans."""
        written, text = self._placeholder.written, rendered.text
        if (count := text.count(written)) != len(images):
            raise UserError(
                f"the rendered text has {written} {counted(count, 'time')} for {counted(len(images), 'image')}: the "
                "text of a message may not hold it, and the chat template must write it for each image"
            )
        pieces, holes, start = [], [], 0  # `holes`: (start, end, length of the expanded text) of the placeholders
        for image in images:
            place = text.index(written, start)
            expanded = self._placeholder(image, self._reader.layout)
            pieces += [text[start:place], expanded]
            start = place + len(written)
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


def images_in(sample: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns of a sample. Raises UserError if it has both columns."""
    listed = [sample[column] for column in COLUMNS if sample.get(column)]
    if len(listed) > 1:
        raise UserError(f"both columns {' and '.join(map(repr, COLUMNS))} hold images: leave one out")
    if not listed:
        return []
    return list(listed[0]) if isinstance(listed[0], list | tuple) else listed
