"""Rules for single options: the interval of a number, the form of a text, and the condition for an effect."""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

from jaxtune.config import keys
from jaxtune.config.schema import Config, Dataset
from jaxtune.errors import format_count
from jaxtune.option_field import Problem


def find_broken_rules(config: Config) -> Iterator[Problem]:
    """Yield a problem for each number outside its interval, text of a wrong form, and changed option without effect."""
    for key, option, section in every_option(config):
        value = getattr(section, option.key.rpartition(".")[2])
        if isinstance(value, int | float) and not in_interval(value, option.within):
            yield Problem((key,), f"{key} = {value!r}: must be {describe_interval(option.within)}")
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts):
            yield Problem((key,), f"{key} = {value!r}: holds a NUL character; take it out")
        if wrong := find_format_error(value, option.unit):
            yield Problem((key,), f"{key} = {value!r}: {wrong}")
        # Conditions of list entries are over options of the same entry, others over the whole config.
        scope, prefix = (section, f"{key.rpartition('.')[0]}.") if "[" in key else (config, "")
        # Judge 'auto' entries as the type that the task requires.
        if isinstance(scope, Dataset) and scope.type == "auto" and config.sample_type is not None:
            scope = dataclasses.replace(scope, type=config.sample_type)
        for condition in option.when if value != option.default else ():
            # eval is safe: the expression comes from the schema, and its names are only options.
            if not eval(condition, {"__builtins__": {}}, vars(scope)):
                others = keys.names_in_expression(condition)
                now = ", ".join(f"{name} {_brief(operator.attrgetter(name)(scope))}" for name in others)
                text = f"{key} = {value!r}: has no effect: it is read only when {condition}, and {now}"
                yield Problem((key, *(prefix + name for name in others)), text, moot=True)
                break


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return f"has {format_count(len(value), 'entry', 'entries')}" if value else "is empty"
    return f"= {value!r}"


def every_option(config: Config) -> Iterator[tuple[str, keys.Option, Any]]:
    """Yield (key, option, section or list entry that holds it); keys contain the indices of entries."""
    for option in keys.options().values():
        outer, bracket, inner = option.key.partition("[i].")
        if not bracket:
            yield option.key, option, operator.attrgetter(outer.rpartition(".")[0])(config)
            continue
        for i, entry in enumerate(operator.attrgetter(outer)(config)):
            yield f"{outer}[{i}].{inner}", option, entry


def non_default_options(config: Config) -> dict[str, Any]:
    """Return options that differ from the defaults, by key, including lists of sections and their entries' options."""
    values = (
        (key, option, getattr(section, option.key.rpartition(".")[2])) for key, option, section in every_option(config)
    )
    return {key: value for key, option, value in values if value != option.default}


def in_interval(value: float, within: str) -> bool:
    """Whether a number lies in an interval such as "[0, 1)"; "" means all numbers."""
    if not within:
        return True
    low, high = bounds(within)
    above = value >= low if within[0] == "[" else value > low
    return above and (value <= high if within[-1] == "]" else value < high)


def find_format_error(value: Any, unit: str) -> str | None:
    """Return the fault of a text with unit "regex", or of a list with unit "REGEX=FACTOR" or similar; None if valid."""
    if unit == "regex" and isinstance(value, str):
        return _not_a_regex(value)
    for entry in value if unit == "KEY=NAME" else ():
        if not re.fullmatch(r"[^=]+=.+", entry):
            return f"{entry!r} is not 'KEY=NAME', such as 'role=speaker'"
    for entry in value if unit == "KEY=JSON" else ():
        if wrong := _not_json(entry):
            return wrong
    for entry in value if unit == "NAME=NUMBER" else ():
        if not re.fullmatch(r"\w+=-?\d*\.?\d+(e-?\d+)?", entry):
            return f"{entry!r} is not 'NAME=NUMBER', such as 'length=-0.5'"
    for entry in value if unit == "REGEX=FACTOR" else ():
        pattern, _, factor = entry.rpartition("=")
        if not pattern or not _is_factor(factor):
            return f"{entry!r} is not 'REGEX=FACTOR' with a factor of 0 or more, such as 'embed_tokens=0.1'"
        if wrong := _not_a_regex(pattern):
            return wrong
    return None


def entries_of(value: Any, unit: str) -> Any:
    """Return a dict as the entries of an option whose unit is "REGEX=FACTOR" or similar; other values unchanged."""
    if not isinstance(value, dict) or "=" not in unit:
        return value
    text = json.dumps if unit == "KEY=JSON" else str
    return [f"{key}={text(of)}" for key, of in value.items()]


def _not_a_regex(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"not a regular expression: {error}"


def _not_json(entry: str) -> str | None:
    key, equals, text = entry.partition("=")
    if not (key and equals and text):
        return f"{entry!r} is not 'KEY=JSON', such as 'rope_theta=1e6'"
    try:
        json.loads(text)
    except ValueError:
        return f"{entry!r}: {text!r} is not JSON; a text needs quotes: '{key}=\"...\"'"


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def describe_interval(within: str) -> str:
    """Return an interval in words, for the user: "at least 0 and below 1"; "" for all numbers."""
    if not within:
        return ""
    low, high = bounds(within)
    if within[0] + within[-1] == "[]":
        return f"from {low:g} to {high:g}"
    words = f"{'at least' if within[0] == '[' else 'above'} {low:g}"
    return words if math.isinf(high) else f"{words} and {'at most' if within[-1] == ']' else 'below'} {high:g}"


def bounds(within: str) -> tuple[float, float]:
    """Return the ends of an interval such as "[0, 1)"."""
    low, high = within[1:-1].split(",")
    return float(low), float(high)
