"""A JSON Schema of all options, by which editors complete and check YAML recipes."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union

from jaxtune.config.option_rules import bounds
from jaxtune.config.schema import Config

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string", types.NoneType: "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema. It accepts every key with a dot (`optim.learning_rate`), which recipes may also have."""
    base = {"description": "a recipe or file whose values this one changes: NAME, FILE, or either with :ARGUMENT"}
    schema = _section(Config)
    schema["properties"] = {"base": base | {"type": "string"}, **schema["properties"]}
    return {"$schema": DRAFT, "title": "jaxtune recipe", **schema, "patternProperties": {r"\.": {}}}


def _section(section: Any) -> dict[str, Any]:
    annotations = typing.get_type_hints(section)
    properties = {}
    for field in dataclasses.fields(section):
        annotation = annotations[field.name]
        if dataclasses.is_dataclass(annotation):
            properties[field.name] = _section(annotation)
        elif field.metadata:
            properties[field.name] = _option(field, annotation)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _option(field: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    rules = field.metadata
    text = "; ".join(filter(None, (rules["doc"], rules["when"] and f"only when {rules['when']}")))
    return _type(annotation, rules["within"]) | {"description": text, "default": field.default}


def _type(annotation: Any, within: str = "") -> dict[str, Any]:
    """Return the schema of a type; `within`: the interval of its numbers."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(member, within) for member in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and dataclasses.is_dataclass(arguments[0]):
        entry = [_section(arguments[0]), {"type": "string"}]  # a path is an entry, and an entry is a list of one
        return {"anyOf": [{"type": "array", "items": {"anyOf": entry}}, *entry]}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0])}
    if annotation not in (int, float) or not within:
        return {"type": _SCALARS[annotation]} if annotation in _SCALARS else {"type": "object"}
    low, high = bounds(within)
    limits = {"minimum" if within[0] == "[" else "exclusiveMinimum": low}
    limits["maximum" if within[-1] == "]" else "exclusiveMaximum"] = high
    return {"type": _SCALARS[annotation]} | {name: value for name, value in limits.items() if math.isfinite(value)}
