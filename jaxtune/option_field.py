"""How an option is declared: a field of a dataclass with its meaning and rules. Needs only the standard library."""

import dataclasses
import re
from typing import Any


def option(default: Any, doc: str, unit: str = "", when: str = "", basic: bool = False) -> Any:
    """Return a dataclass field with the meaning of an option and the rules for its value.

    Args:
        default: The value if the option is not set.
        doc: The meaning of the option, shown to users.
        unit: The unit and interval of a number: "steps [1, inf)", "(0, inf)", "fraction [0, 1)"; or the form of a text,
            which is checked: "regex", "REGEX=FACTOR", "KEY=NAME", "KEY=JSON".
        when: The condition under which it has an effect: a Python expression over options, such as
            "optim.name == 'muon'"; for an option of a list entry, over the options of the same entry.
        basic: Whether `jaxtune options` lists it; with --all it lists the others too.
    """
    unit, bracket, interval = re.fullmatch(r"(.*?) ?([\[(]|$)(.*)", unit).groups()  # type: ignore[union-attr]
    rules = {"doc": doc, "unit": unit, "within": bracket + interval, "when": when, "basic": basic}
    return dataclasses.field(default=default, metadata=rules)


def section(default: Any, when: str) -> Any:
    """Return a field for a section whose options all have this condition, except those that the condition reads."""
    return dataclasses.field(default=default, metadata={"when": when})
