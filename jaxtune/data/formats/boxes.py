"""Boxes of objects in images, which ms-swift's placeholders <ref-object> and <bbox> put into messages."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from jaxtune.data.chat.messages import Message, clip
from jaxtune.data.chat.sandbox import MARKS
from jaxtune.errors import UserError, format_count

_REFERENCE, _BOX = "<ref-object>", "<bbox>"
_PIXELS = ("qwen2_5_vl",)  # families that are trained on pixels of the resized image; others on thousandths

Scale = Literal["norm1000", "none"]
"""vision.norm_bbox."""


def default_scale(family: str) -> Scale:
    """Return the scale of boxes on which a family was trained, as ms-swift chooses it."""
    return "none" if family in _PIXELS else "norm1000"


def fill_boxes(
    messages: Sequence[Message], objects: Any, sizes: Sequence[Any], scale: Scale, vocabulary: Collection[str]
) -> list[Message]:
    """Return the messages with the names and boxes of objects in place of their placeholders.

    Args:
        messages: the messages.
        objects: {"ref": names, "bbox": boxes, "bbox_type": "real" or "norm1", "image_id": image of each box}, or its
            JSON. A box is [x1, y1, x2, y2] or a point [x, y], in pixels of the image as it is stored, or in shares of
            its sides (norm1).
        sizes: (height and width, height and width after preprocessing) of each image.
        scale: norm1000: boxes are written in thousandths of the sides; none: in pixels after preprocessing.
        vocabulary: the tokens of the tokenizer; Qwen's tokens around names and boxes are written if it has them.

    Raises:
        UserError: the objects have another form, or another number than there are placeholders.
    """
    objects = _read_objects(objects)
    names, boxes = objects.get("ref") or [], objects.get("bbox") or []
    for name in map(str, names):
        if _BOX in name or any(mark in name for mark in MARKS):
            raise UserError(
                f"objects: a ref may not hold {_BOX} or a noncharacter U+FDD0 to U+FDD4: {clip(repr(name))}"
            )
    images = [*(objects.get("image_id") or []), *[0] * len(boxes)]
    kind = objects.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise UserError(f"objects: bbox_type {kind!r} is not 'real' or 'norm1'")
    written = [_scaled(box, image, sizes, kind, scale) for box, image in zip(boxes, images)]
    values = {_REFERENCE: list(map(str, names)), _BOX: written}
    for placeholder, listed in values.items():
        count = sum(message["content"].count(placeholder) for message in messages)
        if count not in (0, len(listed)):  # without any, the objects are not used
            raise UserError(f"{format_count(count, 'placeholder')} {placeholder} for {len(listed)} in column 'objects'")
    of_qwen = {
        _REFERENCE: ("<|object_ref_start|>", "<|object_ref_end|>"),
        _BOX: ("<|box_start|>", "<|box_end|>"),
    }
    filled = list(messages)
    for placeholder, (before, after) in of_qwen.items():
        if before not in vocabulary:
            before, after = ("", "") if placeholder == _REFERENCE else ("[", "]")
        rest = iter(values[placeholder])
        filled = [
            message | {"content": _fill(message["content"], placeholder, before, after, rest)} for message in filled
        ]
    return filled


def _fill(text: str, placeholder: str, before: str, after: str, values: Iterator[str]) -> str:
    first, *others = text.split(placeholder)
    return first + "".join(f"{before}{next(values)}{after}{other}" for other in others)


def _read_objects(objects: Any) -> dict[str, Any]:
    if isinstance(objects, str):
        try:
            objects = json.loads(objects)
        except ValueError:
            objects = None
    if not isinstance(objects, dict):
        raise UserError('column \'objects\' must be {"ref": [...], "bbox": [[x1, y1, x2, y2], ...]}')
    for key in ("ref", "bbox", "image_id"):
        if not isinstance(objects.get(key), list | None):
            raise UserError(f"objects: {key} must be a list, found {clip(repr(objects[key]))}")
    return objects


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # NaN is not


def _scaled(box: Any, image: Any, sizes: Sequence[Any], kind: str, scale: Scale) -> str:
    """Return a box as text: (x1,y1),(x2,y2)."""
    if not (isinstance(box, list) and len(box) in (2, 4) and all(map(_is_number, box))):
        raise UserError(f"objects: a box is [x1, y1, x2, y2] or [x, y], found {clip(repr(box))}")
    if not isinstance(image, int) or not 0 <= image < len(sizes):
        raise UserError(f"objects: image_id {image!r}, and the sample has {format_count(len(sizes), 'image')}")
    (height, width), (new_height, new_width) = sizes[image]
    if kind == "norm1":
        height = width = 1
    if scale == "norm1000":
        new_height = new_width = 1000
    points = zip(box[::2], box[1::2])
    return ",".join(f"({round(x / width * new_width)},{round(y / height * new_height)})" for x, y in points)
