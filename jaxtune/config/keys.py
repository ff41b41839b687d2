"""Every option as one flat list of dotted keys, and the nearest of them to a mistyped one."""

import ast
import dataclasses
import difflib
import functools
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Union

from jaxtune.config.schema import READ_BY_TYPE, Config, Dataset


@dataclass(frozen=True)
class Option:
    """One option. Options of list entries have `[i]` in their key: `data.datasets[i].path`."""

    key: str
    annotation: Any
    default: Any
    unit: str
    doc: str
    within: str  # the interval of a number, "" for all
    when: tuple[str, ...]  # expressions that must all hold for it to have an effect


@functools.cache
def options() -> dict[str, Option]:
    """Every option by its key, in the order of the schema."""
    return {option.key: option for option in _options_of(Config, "")}


def lookup(key: str) -> Option | None:
    """The option that a key means, with indices as a user writes them (`data.datasets[1].path`), or None."""
    return options().get(_general(key))


def nearest(key: str) -> Option | None:
    """The option whose key is most like an unknown one, or None when nothing is; its key keeps the index of `key`."""
    general = _general(key)

    def likeness(candidate: str) -> tuple[float, float]:
        # The whole key tells the section apart, its last part finds an option written under the wrong section.
        return _ratio(general, candidate), _ratio(general.rpartition(".")[2], candidate.rpartition(".")[2])

    scores = {candidate: likeness(candidate) for candidate in options()}
    best = max(scores, key=lambda candidate: sum(scores[candidate]))
    if max(scores[best]) < 0.6:
        return None
    index = re.search(r"\[\d+\]", key)
    return dataclasses.replace(options()[best], key=best.replace("[i]", index[0]) if index else best)


def no_such_option(key: str) -> str:
    """What is wrong with an unknown key, and what would be right."""
    general = _general(key)
    if members := [member for member in options() if member.startswith(f"{general}.")]:
        return f"a section, not an option; its options: {', '.join(members)}"
    option = nearest(key)
    if option is None:
        return "no such option; python -m jaxtune.options lists them"
    return f"no such option; nearest: {option.key}: {describe(option.annotation)} ({option.doc})"


def entry_type(annotation: Any) -> Any | None:
    """The dataclass of the entries where an option is a list of sections, else None."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments and dataclasses.is_dataclass(arguments[0]) else None


def describe(annotation: Any) -> str:
    """A type as it is shown to a user: `int | None`, `'bf16' | 'fp32'`, `tuple[str, ...]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in arguments)
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin is tuple:
        return f"tuple[{describe(arguments[0])}, ...]"
    return "None" if annotation is types.NoneType else annotation.__name__


def names(expression: str) -> list[str]:
    """The options that an expression over options reads, dotted as they are written there."""
    nodes = ast.walk(ast.parse(expression, mode="eval"))
    found = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]


def _options_of(section: Any, prefix: str, outer: tuple[str, ...] = ()) -> list[Option]:
    found = []
    annotations = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key, annotation = prefix + field.name, annotations[field.name]
        conditions = (*outer, field.metadata["when"]) if field.metadata.get("when") else outer
        if dataclasses.is_dataclass(annotation):
            found += _options_of(annotation, f"{key}.", conditions)
            continue
        if not field.metadata:
            continue  # what a Config remembers besides its options
        types = [repr(type_) for type_, read in READ_BY_TYPE.items() if field.name in (*read[0], *read[1])]
        if section is Dataset and types:
            conditions = (f"type in ({', '.join([repr('auto'), *types])})", *conditions)
        when = tuple(condition for condition in conditions if key not in names(condition))
        unit, doc, within = (field.metadata[name] for name in ("unit", "doc", "within"))
        found.append(Option(key, annotation, field.default, unit, doc, within, when))
        if entry := entry_type(annotation):
            found += _options_of(entry, f"{key}[i].")
    return found


def _general(key: str) -> str:
    return re.sub(r"\[\d+\]", "[i]", key)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(a=a, b=b, autojunk=False).ratio()
