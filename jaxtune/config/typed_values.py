"""Turn texts and plain values into the typed sections of a Config."""

import ast
import contextlib
import dataclasses
import math
import re
import types
import typing
import warnings
from collections.abc import Iterable
from typing import Any, Literal, Union

from ml_collections import ConfigDict

from jaxtune.config import keys, option_rules
from jaxtune.config.schema import Config
from jaxtune.config.sources import in_memory
from jaxtune.errors import UserError
from jaxtune.option_field import Problem

NON_OPTION_FIELDS = ("said", "notes")  # fields of Config
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
# Pairs of options for the same thing. If both are set, the second takes effect, unless it is only inherited: then a
# first one that is set nearer to the user replaces it.
INSTEAD_OF = {
    "train.epochs": "train.max_steps",
    "data.validation_split": "data.eval_datasets",
    "optim.warmup_ratio": "optim.warmup_steps",
    "optim.final_lr_fraction": "optim.min_lr",
    "optim.layerwise_lr_decay_bound": "optim.layerwise_lr_decay",
}


def to_plain(value: Any) -> Any:
    """Convert ConfigDicts to dicts, tuples to lists, and datasets in memory to their names, recursively."""
    if in_memory.is_dataset(value):
        return in_memory.add(value)
    if isinstance(value, ConfigDict | dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_entries(key: str, value: Any) -> Any:
    """Return the entries of a list of sections; a single entry counts as a list, and a path as an entry.

    Raises:
        UserError: The list holds samples instead of entries.
    """
    several = [] if value is None else [value] if isinstance(value, str | dict) else value
    if not isinstance(several, list | tuple):
        return value
    if names := _columns(several):
        shown = ", ".join(names)
        raise UserError(
            f"{key}: a list of samples (their keys are {shown}): wrap it in datasets.Dataset.from_list(...); an entry "
            "for a file has a path"
        )
    return [{"path": entry} if isinstance(entry, str) else entry for entry in several]


def _columns(entries: Iterable[Any]) -> list[str]:
    """Return the keys of dicts that are samples: dicts without a path, with a key that is unlike an option; else []."""
    names: dict[str, None] = {}
    for entry in entries:
        if not isinstance(entry, dict) or "path" in entry:
            return []
        names |= dict.fromkeys(map(str, entry))
    return [] if all(map(keys.is_like_one_of_an_entry, names)) else list(names)


def set_value(values: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Set one option in the nested values, or return the problem.

    The list index after the last entry appends one; a higher index is an error.
    """
    if keys.lookup(key) is None:
        return unknown_option(key, value)
    *parents, name = re.findall(r"\w+", key)
    node: Any = values
    for i, parent in enumerate(parents):
        if isinstance(node, list):
            if int(parent) == len(node):
                node.append({})
            elif int(parent) > len(node):
                fault = f"{'.'.join(parents[:i])} has no entry {parent}; [{len(node)}] is the next one"
                return Problem((key,), f"{key} = {value!r}: {fault}")
            node = node[int(parent)]
        elif isinstance(node, dict):
            node = node.setdefault(parent, {})
    if isinstance(node, dict):  # otherwise it is not a section, which `build` reports
        node[name] = value
    return None


def build(section: Any, values: Any, prefix: str, problems: list[Problem]) -> Any:
    """Build a section's dataclass from a mapping; add wrong values to `problems` and use their defaults instead."""
    if not isinstance(values, dict):
        key = prefix.removesuffix(".")
        problems.append(Problem((key,), f"{key} = {values!r}: expected a section ({section.__doc__})"))
        return section()
    annotations = typing.get_type_hints(section)
    fields = {}
    for name, value in values.items():
        key, annotation = f"{prefix}{name}", annotations.get(name)
        if annotation is None or (section is Config and name in NON_OPTION_FIELDS):
            problems.append(unknown_option(key, value))
        elif dataclasses.is_dataclass(annotation):
            fields[name] = build(annotation, value, f"{key}.", problems)
        elif (entry := keys.entry_type(annotation)) and isinstance(value, list):
            fields[name] = tuple(build(entry, item, f"{key}[{i}].", problems) for i, item in enumerate(value))
        else:
            rule = section.__dataclass_fields__[name]
            if value is None and _is_unset(key, rule.default):
                continue
            if value == -1 and annotation == int | None and not option_rules.in_interval(-1, rule.metadata["within"]):
                value = None  # other toolkits write -1 for a count that is not set
            try:
                fields[name] = _convert(option_rules.entries_of(value, rule.metadata["unit"]), annotation)
            except TypeError:
                meaning = rule.metadata["doc"]
                expected = {bool: "True or False", bool | None: "True, False or None"}.get(annotation)
                expected = expected or keys.describe(annotation)
                if _is_infinite_or_nan(value):
                    expected = f"a finite {expected}"
                elif isinstance(value, str) and annotation == tuple[str, ...]:
                    expected += f" such as {_as_list(value, rule.metadata['unit'])!r}"
                near = keys.nearest_value(key, value, annotation)
                hint = f"; nearest: {near}" if near else ""
                problems.append(Problem((key,), f"{key} = {value!r}: expected {expected} ({meaning}){hint}"))
    return section(**fields)


def _as_list(text: str, unit: str) -> tuple[str, ...]:
    """Return the list of texts that a text may mean: its parts at commas if each looks like an entry of the option."""
    within = re.fullmatch(r"[\[({](.*)[\])}]", text)
    parts = tuple(part.strip(" '\"") for part in (within[1] if within else text).split(","))
    return parts if "=" in unit and all("=" in part for part in parts) else (text,)


def _is_unset(key: str, default: Any) -> bool:
    """Whether None means "not set" for an option whose type lacks None.

    That holds if its default is 0 or (), or if another option can replace it (INSTEAD_OF).
    """
    return (default is not False and default in (0, ())) or key in INSTEAD_OF


def _is_infinite_or_nan(value: Any) -> bool:
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _convert(value: Any, annotation: Any) -> Any:
    """Convert a value to the annotated type: only ints to float, and lists to tuples.

    Raises:
        TypeError: The value has another type, or is not a finite number.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        for member in arguments:
            with contextlib.suppress(TypeError):
                return _convert(value, member)
    elif origin is Literal:
        if any(type(value) is type(allowed) and value == allowed for allowed in arguments):
            return value
        if value is False and "off" in arguments:  # YAML 1.1, which PyYAML reads, has `off` as false
            return "off"
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(item, arguments[0]) for item in value)
    elif annotation is float:
        # type(), not isinstance: a bool is an int in Python.
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is annotation:
        return value
    raise TypeError


_WORD = r"([\w.*=/:~-]+|<[^<>,]+>)"  # a name, path, pattern, or special token


def from_text(text: str, annotation: Any) -> Any:
    """Parse a command-line text for an option of this type; return the text itself if it does not fit.

    Accepts common notations: yes and no, lists without quotes (q_proj,v_proj), \\n for a newline.
    """
    if text == "None":
        return None
    if annotation in (bool, bool | None) and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if keys.entry_type(annotation) is not None:
        with contextlib.suppress(ValueError, SyntaxError):
            if isinstance(literal := _read_literal(text), list | tuple | dict):
                return literal
        return text.split(",") if re.fullmatch(f"{_WORD}(,{_WORD})*", text) else text
    # For a union such as str | tuple[str, ...], a comma makes a list; without one the text stays a text.
    several = "," in text and tuple[str, ...] in typing.get_args(annotation)
    if re.fullmatch(f"{_WORD}(,{_WORD})*", text) and (several or _is_list_of_words(annotation)):
        return tuple(text.split(","))
    try:
        literal = _read_literal({"true": "True", "false": "False"}.get(text, text))
        # A quoted string keeps its quotes: the shell already removed its own pair, so these belong to the value.
        if isinstance(literal, dict) and annotation == tuple[str, ...]:
            return literal  # entries such as REGEX=FACTOR, or refused
        if not isinstance(literal, str):
            return _convert(literal, annotation)
    except (ValueError, SyntaxError, TypeError):
        pass
    # Safe for regular expressions too: backslash-n and a newline match the same.
    return re.sub(r"(?<!\\)\\([nt])", lambda escape: {"n": "\n", "t": "\t"}[escape[1]], text)


def _read_literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # regular expressions have escapes that Python warns of
        return ast.literal_eval(text)


def _is_list_of_words(annotation: Any) -> bool:
    """Whether a type is a tuple of texts, or of the names that a Literal allows."""
    if typing.get_origin(annotation) is not tuple:
        return False
    member = typing.get_args(annotation)[0]
    return member is str or typing.get_origin(member) is Literal


def unknown_option(key: str, value: Any) -> Problem:
    """Return the problem of an unknown key, with the nearest option."""
    nearest = keys.nearest_option(key)
    return Problem((key, nearest.key) if nearest else (key,), f"{key} = {value!r}: {keys.no_such_option(key)}")
