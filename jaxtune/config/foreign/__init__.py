"""Config files of other systems, translated: a table a system, `NAME.yaml` beside this file, lists all of its options.

    warmup_ratio: {default: 0.0, key: optim.warmup_ratio}

default   the value of that system where a file does not give one; absent: there is none
key       the option here that gets the value, or a list of them; data.datasets[i].x: that of every dataset
values    the value here by that there (null: stays as it is by default), or several by their keys
others    with values: other ones are taken as they are; without it they are not there yet
convert   the function that reads it, together with other options: of the system's module beside its table
like      a value of its kind, where there is no default to tell what convert can read
entries   it is a list of datasets: the list here; of: the table of an entry
present   it has no value: what counts is that it is there
reason    why it has no meaning here, and what happens instead
later     what is not there yet: an error, unless the value is the default
note      what its user should know
"""

import dataclasses
import difflib
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtune.config import keys, yaml_file
from jaxtune.config.foreign import axolotl, erniekit, qefficient, surogate, trl, xorl
from jaxtune.config.foreign.conversions import NotYet, Options, Settings
from jaxtune.config.option_rules import Problem
from jaxtune.errors import UserError, shortened

DIALECTS = {
    "surogate": "Surogate",
    "xorl": "XORL",
    "erniekit": "ERNIEKit",
    "qefficient": "QEfficient",
    "trl": "TRL",
    "axolotl": "Axolotl",
}
CONVERSIONS: dict[str, Callable[[Options], Settings]] = {
    name: function
    for module in (surogate, xorl, erniekit, qefficient, trl, axolotl)
    for name, function in module.CONVERSIONS.items()
}
MARKS = {
    "LLaMA-Factory": "finetuning_type cutoff_len neat_packing lora_target quantization_bit preprocessing_num_workers "
    "dataset_dir pref_loss pref_beta pref_ftx plot_loss overwrite_cache mask_history",
    "torchtune": "_component_",
    "NeMo": "_target_",
    "LitGPT": "class_path",
    "ms-swift": "tuner_type train_type freeze_vit freeze_llm",
    "verl": "actor_rollout_ref",
}
"""Options, wherever in a file, by which it is one of a system that has no table here."""
_NO_DEFAULT = object()


@dataclass(frozen=True)
class Option:
    """A row of a table; the module's docstring says what its fields are."""

    default: Any = _NO_DEFAULT
    key: str | list[str] = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    others: bool = False
    convert: str = ""
    like: Any = None
    entries: str = ""
    of: Mapping[str, "Option"] = field(default_factory=dict)
    present: bool = False
    reason: str = ""
    later: str = ""
    note: str = ""

    @property
    def sample(self) -> Any:
        """A value of its kind; None: any will do."""
        return self.like if self.default is _NO_DEFAULT or self.default is None else self.default

    @property
    def keys(self) -> list[str]:
        """The options here that get the value."""
        return [self.key] if isinstance(self.key, str) else self.key


@dataclass(frozen=True)
class Line:
    """What became of an option: settings by their keys here, or a text."""

    option: str
    value: Any
    stated: bool  # by the file; otherwise the value is the default of that system
    settings: Settings
    text: str = ""
    wrong: bool = False

    def __str__(self) -> str:
        became = ", ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        told = "; ".join(part for part in (became, self.text) if part)
        return f"{self.option} = {self.value!r}{'' if self.stated else ' (its default)'} -> {told}"


@dataclass(frozen=True)
class Translation:
    """A file in our options: what became of each, in `lines`, and the settings that this makes, by key.

    Attributes:
        dialect: The system that it was written for.
        defaults: That system's defaults.
        stated: What the file says, which comes on top of them.
    """

    dialect: str
    lines: tuple[Line, ...]
    defaults: Settings
    stated: Settings
    problems: list[Problem]

    def notes(self, name: str) -> tuple[str, ...]:
        """Every line, for the user."""
        lines = (f"  {shortened(str(line))}" for line in self.lines)
        return (f"{name}: a config of {DIALECTS[self.dialect]}; what became of it:", *lines)


@functools.cache
def table(dialect: str) -> dict[str, Option]:
    """All options of a system by their dotted names."""
    return _read_table(yaml_file.read(pathlib.Path(__file__).with_name(f"{dialect}.yaml"), dialect).values)


def _read_table(rows: Mapping[str, Any]) -> dict[str, Option]:
    return {name: Option(**{**row, "of": _read_table(row.get("of", {}))}) for name, row in rows.items()}


def recognise(values: Mapping[str, Any], name: str) -> str | None:
    """The system that has most of these options; None if it is this one, or nobody.

    Raises:
        UserError: It could be one or another, or it is one that is not read.
    """
    ours = sum(keys.lookup(key) is not None for key, _ in keys.leaves(values))
    ours += sum(not value and keys.is_section(name) for name, value in values.items())
    known = {dialect: sum(option in table(dialect) for option in _flat(values, table(dialect))) for dialect in DIALECTS}
    found = [dialect for dialect, count in known.items() if count == max(known.values())]
    if "base" not in values and 2 * ours < len(list(keys.leaves(values))):
        _refuse_other_systems(values, name)
    if "base" in values or known[found[0]] <= ours:
        return None
    if len(found) > 1:
        first, last = found[:-1], found[-1]
        systems = f"{', '.join(DIALECTS[dialect] for dialect in first)} and {DIALECTS[last]}"
        raise UserError(f"{name}: {systems} have these options; say which it is with --dialect={found[0]}")
    return found[0]


def translate(written: yaml_file.Written, dialect: str) -> Translation:
    """Every option of a file, and the defaults of its system, in our options."""
    lines = list(_lines(written.values, table(dialect), DIALECTS[dialect]))
    lines += _contradictions(lines)
    problems = []
    for line in lines:
        if line.wrong:
            at = f"line {written.line(line.option)}: " if line.stated else ""
            problems.append(Problem((line.option,), f"{at}{line.option} = {line.value!r}: {line.text}"))
    given = [(line.stated, key, value) for line in lines for key, value in line.settings.items()]
    stated = _gathered({key: value for said, key, value in given if said or ("[" in key and value != _default(key))})
    defaults = {key: value for said, key, value in given if not said and "[" not in key}
    return Translation(dialect, tuple(_worth_showing(lines)), defaults, stated, problems)


def _refuse_other_systems(values: Mapping[str, Any], name: str) -> None:
    """Raises UserError for a config of a system that has no table here."""
    for system, marks in MARKS.items():
        if mark := next((option for option in _names(values) if option in marks.split()), None):
            example = f"`jaxtune options {mark}` names ours" if keys.nearest(mark) else "`jaxtune options` lists them"
            raise UserError(
                f"{name}: a config of {system}, by its {mark}: not read; write it in jaxtune's options ({example}); "
                f"--dialect=NAME reads a config of {', '.join(DIALECTS.values())}"
            )


def _names(values: Any) -> Iterator[str]:
    """All keys, also those of what is in lists."""
    if isinstance(values, Mapping):
        yield from values
    for value in values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ():
        yield from _names(value)


def _flat(values: Mapping[str, Any], table: Mapping[str, Option], prefix: str = "") -> dict[str, Any]:
    """Options by their dotted names in the table; what it does not know keeps its value, nested or not."""
    found = {}
    for name, value in values.items():
        option = f"{prefix}{name}"
        inner = any(known.startswith(f"{option}.") for known in table)
        if inner and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = dict.fromkeys(value)  # [tensorboard] is as tensorboard: with nothing below it
        if not inner or not isinstance(value, Mapping | None):
            found[option] = value
            continue
        if option in table:
            found[option] = value if value is None else True
        found |= _flat(value or {}, table, f"{option}.")
    return found


def _lines(
    values: Mapping[str, Any], table: Mapping[str, Option], system: str, theirs: str = "", ours: str = ""
) -> Iterator[Line]:
    """A line for each option that is given or has a default.

    theirs, ours: what comes before names and keys: of an entry of a list.
    """
    found = _flat(values, table)
    options = {name: row.default for name, row in table.items() if row.default is not _NO_DEFAULT}
    odd = {name for name, value in found.items() if name in table and not _fits(value, table[name])}
    options |= {name: value for name, value in found.items() if value is not None and name not in odd}
    options |= {name: True for name in found if name in table and table[name].present}
    for name, row in table.items():
        value = True if row.present else found.get(name, options.get(name))
        if row.entries and isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for i, entry in enumerate(value):
                yield from _lines(entry, row.of, f"{system}'s {name}", f"{name}[{i}].", f"{row.entries}[{i}].")
        elif name in odd:
            sample = next(iter(row.values), None) if row.sample is None else row.sample
            yield Line(f"{theirs}{name}", value, True, {}, f"expected a value such as {sample!r}", wrong=True)
        elif name in found or (name in options and not (row.reason or row.later)):
            settings, text, wrong = _became(row, value, options)
            settings = {f"{ours}{key}": setting for key, setting in settings.items()}
            yield Line(f"{theirs}{name}", value, name in found, settings, text, wrong)
    for name in (name for name in found if name not in table):
        nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
        text = f"no such option of {system}" + (f"; nearest: {nearest[0]}" if nearest else "")
        yield Line(f"{theirs}{name}", found[name], True, {}, text, wrong=True)


def _fits(value: Any, row: Option) -> bool:
    """Whether a value is of the kind of the row's sample, and a finite number if it is a number.

    A list fits too if each of its values sets options of its own.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return False
    kinds = {bool: bool, int: (int, float), float: (int, float), str: (str, int, float), list: (list, str), dict: dict}
    if row.values and isinstance(value, list):
        switches = not row.key and all(isinstance(here, Mapping | None) for here in row.values.values())
        return switches and all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, kinds.get(type(row.sample), object))


def _became(row: Option, value: Any, options: Mapping[str, Any]) -> tuple[Settings, str, bool]:
    """(settings, text, whether that is an error)."""
    if row.reason:
        return {}, row.reason, False
    if row.entries:
        return ({}, "expected a list of datasets with a path each", True) if value else ({}, "none", False)
    if row.later:
        same = value is None or value == row.default
        return {}, "not there yet, and this is as without it" if same else f"not there yet: {row.later}", not same
    if row.convert and (value is not None or row.default is not _NO_DEFAULT):
        try:
            settings = CONVERSIONS[row.convert](options)
            return settings, row.note or ("" if settings else "as it is here by default"), False
        except NotYet as error:
            return {}, f"not there yet: {error}", True
    settings = {}
    for item in value if row.values and isinstance(value, list) else [value]:
        word = str(item).lower() if isinstance(item, bool) else str(item)
        if item is not None and row.values and word not in row.values and not row.others:
            return {}, f"not there yet; there are {', '.join(row.values)}", True
        here = row.values.get(word, item)
        several = word in row.values and isinstance(here, Mapping)
        settings |= here if several else dict.fromkeys(row.keys, here) if here is not None else {}
    return settings, row.note or ("" if settings else "as it is here by default"), False


def _contradictions(lines: list[Line]) -> list[Line]:
    """A line for each option whose settings are others than those of an option before it."""
    found, said = [], {}
    for line in lines:
        for key, value in line.settings.items() if line.stated else ():
            first, before = said.setdefault(key, (line.option, value))
            if before != value:
                found.append(Line(line.option, line.value, True, {}, f"{key} is {before!r} by {first}", wrong=True))
    return found


def _gathered(settings: Settings) -> Settings:
    """Settings of list entries as lists: data.datasets[0].path, and data.datasets[i].x, which all of them get."""
    found = {key: value for key, value in settings.items() if "[" not in key}
    found |= {key: [dict(entry) for entry in value] for key, value in found.items() if keys.has_entries(key)}
    for key, value in settings.items():
        if match := re.fullmatch(r"(.*)\[(\d+)\]\.(.*)", key):
            entries = found.setdefault(match[1], [])
            entries += [{} for _ in range(int(match[2]) + 1 - len(entries))]
            entries[int(match[2])][match[3]] = value
    for key, value in settings.items():
        if "[i]" in key:
            for entry in (*found.get("data.datasets", ()), *found.get("data.eval_datasets", ())):
                entry.setdefault(key.rpartition(".")[2], value)
    return found


def _worth_showing(lines: list[Line]) -> Iterator[Line]:
    """What the file states, and defaults of its system that are others than ours. Settings are shown once."""
    first: list[Line] = []
    for line in sorted(lines, key=lambda line: not line.stated):
        same = next((other.option for other in first if line.settings and other.settings == line.settings), None)
        if line.stated and same is not None:
            yield dataclasses.replace(line, settings={}, text=f"together with {same}")
        elif line.stated or (same is None and any(value != _default(key) for key, value in line.settings.items())):
            first.append(line)
            yield line


def _default(key: str) -> Any:
    option = keys.lookup(key)
    return None if option is None else option.default
