"""Check messages, and convert them to the form that chat templates expect."""

import json
import re
from typing import Any

from jaxtune.data.chat.sandbox import IMAGE, MARKS
from jaxtune.errors import UserError

Message = dict[str, Any]

NO_IMAGES = "images are read with vision.patches_per_row only; data.on_bad_row='skip' leaves such samples out"

UNSEEN = ("train", "loss_scale", "images")
"""Keys of a message that chat templates do not get: about its training, and the sources of its images."""

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of content parts that are images."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_HOLDS_MARK = "holds one of the Unicode noncharacters U+FDD0 to U+FDD4"

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(raw: Any, images: bool = False) -> list[Message]:
    """Convert {role, content} messages to the form that templates expect; `dialects` reads other layouts.

    Text parts are joined. Tool arguments given as JSON strings become objects (most templates would encode them twice).
    Keys about the message's training become `train` and `loss_scale`: `train` (Axolotl) and `loss` (ms-swift) are true
    or false, `weight` (OpenAI) is 0 for false, `loss_scale` (ms-swift) is the weight.

    Args:
        raw: the messages.
        images: whether contents may have images: then each becomes the character IMAGE in the text, and `images` of
            the message lists what the sample says of each; {"index"}: number of the image in another column; None: the
            next image in another column.

    Raises:
        UserError: not a list of such objects, an unknown role, or content that is not text, such as an image.
    """
    if not isinstance(raw, list) or not raw:
        raise UserError(f"expected a list of {{role, content}} messages, found {clip(repr(raw))}")
    return [_check_message(message, i, images) for i, message in enumerate(raw)]


def check_tools(raw: Any) -> list[Any] | None:
    """Return tool descriptions as a list, from a list or its JSON text; None if the list is empty."""
    tools = _from_json(raw, "tools") if isinstance(raw, str) and raw else raw
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"tools must be a list of descriptions, found {clip(repr(raw))}")
    return tools


def _check_message(raw: Any, i: int, images: bool) -> Message:
    if not isinstance(raw, dict):
        raise UserError(f"message {i}: expected an object {{role, content}}, found {clip(repr(raw))}")
    # Arrow gives every message all the fields that any message has, with None for a field that a message lacks.
    message = {key: value for key, value in raw.items() if value is not None}
    if message.get("role") not in ROLES:
        raise UserError(f"message {i}: unknown role {message.get('role')!r}; known are {', '.join(ROLES)}")
    if message.get("images"):  # of Ollama, where an image has no place in the text
        reason = "put each image into the content, as a part of type 'image'" if images else NO_IMAGES
        raise UserError(f"message {i} ({message['role']}): it has the key 'images': {reason}")
    content = message.get("content")
    sources: list[Any] = []
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    elif images and isinstance(content, list) and all(map(_is_text_or_image, content)):
        content, sources = _with_images(content, i)
    if isinstance(content, list) and (kind := next(filter(None, map(_kind_of_image, content)), None)):
        reason = "only text and images are supported" if images else NO_IMAGES
        raise UserError(f"message {i} ({message['role']}): content has a part of type {kind!r}: {reason}")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise UserError(f"message {i} ({message['role']}): content must be text, found {clip(repr(content))}")
    if not sources and any(mark in content for mark in MARKS):
        raise UserError(f"message {i}: {_HOLDS_MARK}")
    message["content"] = content  # None, and a list of parts, became text
    if images:
        message["images"] = sources
    _check_training(message, i)
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise UserError(f"message {i}: tool_calls must be a list, found {clip(repr(message['tool_calls']))}")
        message["tool_calls"] = [_check_tool_call(call, i) for call in message["tool_calls"]]
    return message


def _check_training(message: Message, i: int) -> None:
    """Convert the keys about a message's training to `train` and `loss_scale`."""
    weight, scale = message.pop("weight", 1), message.get("loss_scale", 1)
    train = message.pop("loss", message.get("train"))
    right = weight in (0, 1) and isinstance(train, bool | None) and isinstance(scale, int | float) and 0 <= scale < 1e4
    if not right:
        raise UserError(
            f"message {i}: weight {weight!r}, train or loss {train!r}, loss_scale {scale!r}; "
            "weight must be 0 or 1, train true or false, loss_scale a number from 0 on"
        )
    if not (weight and scale):
        train = False
    if train is not None:
        message["train"] = train


def _is_text_or_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in (*_TEXT_PARTS, *IMAGE_PARTS)


def _with_images(parts: list[dict[str, Any]], i: int) -> tuple[str, list[Any]]:
    """Return the text of content parts with a mark for each image, and what the parts say of the images."""
    texts, sources = [], []
    for part in parts:
        if part["type"] in IMAGE_PARTS:
            texts.append(IMAGE)
            named = (part.get(key) for key in ("image", "image_url", "url", "path"))
            index = None if part.get("index") is None else {"index": part["index"]}
            sources.append(next((value for value in named if value is not None), index))
        else:
            texts.append(str(part.get("text") or ""))
            if any(mark in texts[-1] for mark in MARKS):
                raise UserError(f"message {i}: {_HOLDS_MARK}")
    return "".join(texts), sources


def _kind_of_image(part: Any) -> str | None:
    """Return the type of a content part that is an image or a video, as templates and APIs name it; else None."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if kind in (*IMAGE_PARTS, "video") else None


def _check_tool_call(call: Any, i: int) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"message {i}: a tool call needs a function with a name, found {clip(repr(call))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = {**function, "arguments": _from_json(arguments, f"message {i}: arguments of {function['name']}")}
    return {"type": "function", **call, "function": function} if "function" in call else function


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text."""

    def encode_arguments(call: Any) -> Any:
        if "function" in call:
            return call | {"function": encode_arguments(call["function"])}
        return call | {"arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}

    return [
        message | {"tool_calls": [encode_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{what}: not JSON: {error}") from None


def split_parts(content: str) -> str | list[dict[str, str]]:
    """Return a content with images as the parts that templates take, as Hugging Face writes them; a text unchanged."""
    if IMAGE not in content:
        return content
    pieces = re.split(f"({IMAGE})", content)
    return [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces if piece]


def clip(text: str, limit: int = 80) -> str:
    """Return the beginning of a text, short enough for an error message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
