"""How an option is declared, with its meaning and rules, and what a check reports. Needs only the standard library."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

# The `config.schema.Config` that checks read. It is composed of the sections of all rooms, so these cannot import it.
Config = Any


def option(
    default: Any,
    doc: str,
    unit: str = "",
    when: str = "",
    basic: bool = False,
    of_prompts: bool = True,
    also: str = "",
) -> Any:
    """Return a dataclass field with the meaning of an option and the rules for its value.

    Args:
        default: The value if the option is not set.
        doc: The meaning of the option, shown to users.
        unit: The unit and interval of a number: "steps [1, inf)", "(0, inf)", "fraction [0, 1)"; or the form of a text,
            which is checked: "regex", "REGEX=FACTOR", "KEY=NAME", "KEY=JSON".
        when: The condition under which it has an effect: a Python expression over options, such as
            "optim.name == 'muon'"; for an option of a list entry, over the options of the same entry.
        basic: Whether `jaxtune options` lists it; with --all it lists the others too.
        of_prompts: Whether a run that samples answers (`Config.samples`) reads it: its samples are prompts.
        also: Its names in TRL, Axolotl, LLaMA-Factory, Unsloth and transformers, for messages about unknown options.
            Similar names need no entry.
    """
    unit, bracket, interval = re.fullmatch(r"(.*?) ?([\[(]|$)(.*)", unit).groups()  # type: ignore[union-attr]
    rules = {"doc": doc, "unit": unit, "within": bracket + interval, "when": when}
    return dataclasses.field(default=default, metadata=rules | {"basic": basic, "of_prompts": of_prompts, "also": also})


def among(key: str, names: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Return the shorter form of a condition: the option has a value of `names`, or it has none of `others`."""
    few, equal, within = (names, "==", "in") if len(names) <= len(others) else (others, "!=", "not in")
    return f"{key} {equal} {few[0]!r}" if len(few) == 1 else f"{key} {within} {few}"


def section(default: Any, when: str) -> Any:
    """Return a field for a section whose options all have this condition, except those that the condition reads."""
    return dataclasses.field(default=default, metadata={"when": when})


@dataclass(frozen=True)
class Problem:
    """One line of an error message.

    Attributes:
        keys: The options concerned, with the one to change first.
        text: The line.
        moot: The option only has no effect: a note to the user, or an error if they typed it themselves.
    """

    keys: tuple[str, ...]
    text: str
    moot: bool = False


def problem(config: Config, key: str, reason: str, *others: str, moot: bool = False) -> Problem:
    """Return the problem of an option; `others`: the options that it contradicts."""
    return Problem((key, *others), f"{key} = {value_of(config, key)!r}: {reason}", moot)


def value_of(config: Config, key: str) -> Any:
    """Return the value of an option; its key may hold an index: `data.datasets[1].path`."""
    value: Any = config
    for name in re.findall(r"\w+", key):
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return value
