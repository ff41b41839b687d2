"""JSON of other programs and of users: damage or a value of the wrong type becomes one message."""

import dataclasses
import json
import sys
import typing
from pathlib import Path
from typing import Any, TypeVar

from jaxtune.errors import UserError

T = TypeVar("T")


def as_text(value: Any) -> str | None:
    """Return a value that JSON has no form for as text; bytes, which are of images in a table, are left out."""
    return None if isinstance(value, bytes) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises UserError, which names the file and the problem."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}; it must hold an object")
    return value


def read_fields(path: Path, kind: type[T]) -> T:
    """Read a dataclass from a JSON file with its fields; their annotations are plain types or dict[str, plain type].

    A field with a default may be absent: files of older versions lack it. Raises UserError as `read_json`, and for a
    field that is absent or has another type.
    """
    types, fields = typing.get_type_hints(kind), dataclasses.fields(typing.cast(Any, kind))
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    values = defaults | read_json(path)
    for field in fields:
        if field.name not in values or not _is(values[field.name], types[field.name]):
            value = f"{json.dumps(values[field.name]):.60}" if field.name in values else "absent"
            raise UserError(f"{path} is damaged: {field.name} is {value}")
    return kind(**{field.name: values[field.name] for field in fields})


def _is(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(inner, typing.get_args(kind)[1]) for inner in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return type(value) is kind
