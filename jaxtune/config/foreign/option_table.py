"""The options of other systems. Each system has a table `NAME.yaml` in this folder, with a row for each of its options.

    warmup_ratio: {default: 0.0, key: optim.warmup_ratio}

default   the default value in that system; absent if it has none
key       our option that gets the value, or a list of options; data.datasets[i].x sets x of every dataset
values    our value for each of their values (null: our default), or several settings by key
others    with `values`: pass other values through unchanged; without it, other values are unsupported
convert   the function that translates it, possibly together with other options, in a Python module of the system
like      an example value, if there is no default that shows the type that `convert` can read
entries   our list of datasets that this list of datasets becomes; `of` is the table of an entry
not_with  options that this one contradicts, unless one of the two is off (false, 0) or auto
same_as   another name of this option: the two contradict each other only if their values differ
no_null   why an explicit null, which has a meaning there, is an error here
present   the option has no value: only its presence counts
reason    why it has no meaning here, and what happens instead
elsewhere with `reason`: the translation of another option includes it
later     the unsupported feature; an error unless the value is the default
note      a note for the user

The row `SECTION.*` answers names that users register in a section, which mean something even without a value.
"""

import functools
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtune.config.sources import yaml_file

DIALECTS = {
    "surogate": "Surogate",
    "xorl": "XORL",
    "erniekit": "ERNIEKit",
    "qefficient": "QEfficient",
    "trl": "TRL",
    "axolotl": "Axolotl",
}

NO_DEFAULT = object()


@dataclass(frozen=True)
class ForeignOption:
    """A row of a table; the module's docstring describes the fields."""

    default: Any = NO_DEFAULT
    key: str | list[str] = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    others: bool = False
    convert: str = ""
    like: Any = None
    entries: str = ""
    of: Mapping[str, "ForeignOption"] = field(default_factory=dict)
    not_with: list[str] = field(default_factory=list)
    same_as: str = ""
    no_null: str = ""
    present: bool = False
    reason: str = ""
    elsewhere: bool = False
    later: str = ""
    note: str = ""

    @property
    def sample(self) -> Any:
        """An example value; None if any type is accepted."""
        return self.like if self.default is NO_DEFAULT or self.default is None else self.default

    @property
    def keys(self) -> list[str]:
        """Our options that get the value."""
        return [self.key] if isinstance(self.key, str) else self.key


@functools.cache
def table(dialect: str) -> dict[str, ForeignOption]:
    """Return all options of a system by dotted name."""
    return _read_table(yaml_file.read(pathlib.Path(__file__).with_name(f"{dialect}.yaml"), dialect).values)


def _read_table(rows: Mapping[str, Any]) -> dict[str, ForeignOption]:
    return {name: ForeignOption(**{**row, "of": _read_table(row.get("of", {}))}) for name, row in rows.items()}


def flatten(values: Mapping[str, Any], table: Mapping[str, ForeignOption], prefix: str = "") -> dict[str, Any]:
    """Return options by their dotted names in the table; unknown options keep their value, nested or not."""
    flat = {}
    for name, value in values.items():
        option = f"{prefix}{name}"
        inner = any(known.startswith(f"{option}.") for known in table)
        if inner and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = dict.fromkeys(value)  # [tensorboard] equals `tensorboard:` without options below it
        if not inner or not isinstance(value, Mapping | None):
            flat[option] = value
            continue
        if option in table:
            flat[option] = value if value is None else True  # the section itself is an option too, which is on
        flat |= flatten(value or {}, table, f"{option}.")
    return flat
