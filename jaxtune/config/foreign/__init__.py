"""Translate config files of other systems. Each system has a table `NAME.yaml` in this folder with all its options.

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
later     the unsupported feature; an error unless the value is the default
note      a note for the user

The row `SECTION.*` answers names that users register in a section, which mean something even without a value.
"""

import dataclasses
import difflib
import functools
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtune.config import keys
from jaxtune.config.foreign import axolotl, erniekit, qefficient, surogate, trl, xorl
from jaxtune.config.foreign.axolotl import axolotl_data
from jaxtune.config.foreign.conversions import FILE, NOTE, Options, Settings, Unsupported
from jaxtune.config.foreign.trl import trl_data, trl_objectives
from jaxtune.config.sources import yaml_file
from jaxtune.errors import UserError, shorten
from jaxtune.option_field import Problem

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
    for module in (surogate, xorl, erniekit, qefficient, trl, trl_data, trl_objectives, axolotl, axolotl_data)
    for name, function in module.CONVERSIONS.items()
}
DEFAULT = "jaxtune's default"  # the text of a line whose value needs no setting here
MARKS = {
    "LLaMA-Factory": "finetuning_type cutoff_len neat_packing lora_target quantization_bit "
    "dataset_dir pref_loss pref_beta pref_ftx plot_loss overwrite_cache mask_history",
    "torchtune": "_component_",
    "NeMo": "_target_",
    "LitGPT": "class_path",
    "ms-swift": "tuner_type train_type freeze_vit freeze_llm",
    "verl": "actor_rollout_ref",
}
"""Options, anywhere in a file, that identify a system without a table here."""
_NO_DEFAULT = object()


@dataclass(frozen=True)
class ForeignOption:
    """A row of a table; the module's docstring describes the fields."""

    default: Any = _NO_DEFAULT
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
    later: str = ""
    note: str = ""

    @property
    def sample(self) -> Any:
        """An example value; None if any type is accepted."""
        return self.like if self.default is _NO_DEFAULT or self.default is None else self.default

    @property
    def keys(self) -> list[str]:
        """Our options that get the value."""
        return [self.key] if isinstance(self.key, str) else self.key


@dataclass(frozen=True)
class Line:
    """The translation of one option.

    Attributes:
        option: Its name in the other system.
        value: Its value.
        stated: Whether the file states it; otherwise the value is that system's default.
        settings: Our settings by key.
        text: A note or an error for the user.
        wrong: Whether it is an error.
    """

    option: str
    value: Any
    stated: bool
    settings: Settings
    text: str = ""
    wrong: bool = False

    def __str__(self) -> str:
        became = ", ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        told = "; ".join(part for part in (became, self.text) if part)
        return f"{self.option} = {self.value!r}{'' if self.stated else ' (its default)'} -> {told}"


@dataclass(frozen=True)
class Translation:
    """A file translated to our options.

    Attributes:
        dialect: The system that the file was written for.
        lines: The translation of each option.
        defaults: Our settings, by key, for that system's defaults.
        stated: Our settings, by key, for values in the file; these override `defaults`.
        problems: Errors in the file.
    """

    dialect: str
    lines: tuple[Line, ...]
    defaults: Settings
    stated: Settings
    problems: list[Problem]

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the header and each line, for the user."""
        lines = (f"  {shorten(str(line))}" for line in self.lines)
        return (f"{name}: a config of {DIALECTS[self.dialect]}, translated as follows:", *lines)


@functools.cache
def table(dialect: str) -> dict[str, ForeignOption]:
    """Return all options of a system by dotted name."""
    return _read_table(yaml_file.read(pathlib.Path(__file__).with_name(f"{dialect}.yaml"), dialect).values)


def _read_table(rows: Mapping[str, Any]) -> dict[str, ForeignOption]:
    return {name: ForeignOption(**{**row, "of": _read_table(row.get("of", {}))}) for name, row in rows.items()}


def recognise(values: Mapping[str, Any], name: str) -> str | None:
    """Return the system that has most of these options; None if it is jaxtune or no known system.

    Raises:
        UserError: Several systems match equally, or the system is not supported.
    """
    ours = sum(keys.lookup(key) is not None for key, _ in keys.flatten_options(values))
    # An empty section, such as `train:`, counts as ours too.
    ours += sum(not value and keys.is_section(name) for name, value in values.items())
    known = {dialect: sum(option in table(dialect) for option in _flat(values, table(dialect))) for dialect in DIALECTS}
    matches = [dialect for dialect, count in known.items() if count == max(known.values())]
    if "base" not in values and 2 * ours < len(list(keys.flatten_options(values))):  # most of the options are not ours
        _refuse_other_systems(values, name)
    if "base" in values or known[matches[0]] <= ours:
        return None
    if len(matches) > 1:  # such as Axolotl and TRL, which share names of transformers' TrainingArguments
        first, last = matches[:-1], matches[-1]
        systems = f"{', '.join(DIALECTS[dialect] for dialect in first)} and {DIALECTS[last]}"
        raise UserError(f"{name}: {systems} have these options; choose one with --dialect={matches[0]}")
    return matches[0]


def translate(written: yaml_file.YamlFile, dialect: str) -> Translation:
    """Translate every option of a file, and the defaults of its system, to our options."""
    lines = list(_lines(written.values, table(dialect), DIALECTS[dialect]))
    lines += _contradictions(lines, written)
    lines += _exclusions(written, table(dialect), {line.option for line in lines if line.wrong})
    lines += _repeats(written)
    problems = []
    # A conversion that reads several options fails once per option: blame the options that the file states.
    blamed = {line.text for line in lines if line.wrong and line.stated}
    for line in lines:
        if line.wrong and (line.stated or line.text not in blamed):
            at = f"line {written.line(line.option)}: " if line.stated else ""
            problems.append(Problem((line.option,), f"{at}{line.option} = {line.value!r}: {line.text}"))
    given = [(line.stated, key, value) for line in lines for key, value in line.settings.items()]
    stated = _gather_entries(
        {key: value for said, key, value in given if said or ("[" in key and value != _default(key))}
    )
    defaults = {key: value for said, key, value in given if not said and "[" not in key}
    return Translation(dialect, tuple(_worth_showing(lines)), defaults, stated, problems)


def translate_flag(name: str, value: Any) -> tuple[str, Settings] | None:
    """Return (the system, our settings) of a flag that another system has.

    None: no system has it, or its value sets nothing here, or our nearest option to the name is among the settings.
    """
    answers = []
    for dialect, system in DIALECTS.items():
        if name in table(dialect):
            lines = translate(yaml_file.YamlFile({name: value}, {}), dialect).lines
            answers += [(system, line.settings) for line in lines if line.option == name and line.settings]
    nearest = None if "." in name else keys.nearest_option(name)
    if nearest is not None and any(nearest.key in settings for _, settings in answers):
        return None
    return answers[0] if answers else None


def _refuse_other_systems(values: Mapping[str, Any], name: str) -> None:
    """Raise UserError for a config of a system without a table here."""
    for system, marks in MARKS.items():
        if mark := next((option for option in _names(values) if option in marks.split()), None):
            example = (
                f"`jaxtune options {mark}` names ours"
                if keys.nearest_option(mark)
                else "`jaxtune options --all` lists them"
            )
            raise UserError(
                f"{name}: a config of {system} (it has {mark}), which is not supported; "
                f"use jaxtune's options ({example}); --dialect=NAME reads a config of {', '.join(DIALECTS.values())}"
            )


def _names(values: Any) -> Iterator[str]:
    """Yield all keys of nested mappings and lists."""
    if isinstance(values, Mapping):
        yield from values
    for value in values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ():
        yield from _names(value)


def _flat(values: Mapping[str, Any], table: Mapping[str, ForeignOption], prefix: str = "") -> dict[str, Any]:
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
        flat |= _flat(value or {}, table, f"{option}.")
    return flat


def _lines(
    values: Mapping[str, Any],
    table: Mapping[str, ForeignOption],
    system: str,
    theirs: str = "",
    ours: str = "",
    file: Mapping[str, Any] | None = None,
) -> Iterator[Line]:
    """Yield a line for each option that is given or has a default.

    Args:
        values: The options of a file, or of a list entry.
        table: The table of the options.
        system: The name of the system, for errors.
        theirs: Prefix of their option names, for a list entry.
        ours: Prefix of our keys, for a list entry.
        file: The options of the file, for a list entry.
    """
    from_file = _flat(values, table)
    options = {name: row.default for name, row in table.items() if row.default is not _NO_DEFAULT}
    # Values of a wrong type: each gets an error line, and conversions do not see them.
    odd = {name for name, value in from_file.items() if name in table and not _fits(value, table[name])}
    options |= {name: value for name, value in from_file.items() if value is not None and name not in odd}
    options |= {name: True for name in from_file if name in table and table[name].present}  # even as `name: null`
    faults: dict[str, str | None] = {}
    options |= {} if file is None else {FILE: file}
    for name, row in table.items():
        value = True if row.present else from_file.get(name, options.get(name))
        if row.entries and isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            for i, entry in enumerate(value):
                yield from _lines(entry, row.of, f"{system}'s {name}", f"{name}[{i}].", f"{row.entries}[{i}].", options)
        elif name in odd:
            sample = next(iter(row.values), None) if row.sample is None else row.sample
            yield Line(f"{theirs}{name}", value, True, {}, f"expected a value such as {sample!r}", wrong=True)
        # A default without a meaning here is not shown.
        elif name in from_file or (name in options and not (row.reason or row.later)):
            settings, text, wrong = _translate_value(row, value, options)
            if wrong and row.convert:
                if text not in faults:
                    faults[text] = _find_fault(text, options, from_file, table)
                if faults[text] not in (None, name):  # one error, at the option that causes it
                    text, wrong = f"see {faults[text]}", False
            settings = {f"{ours}{key}": setting for key, setting in settings.items()}
            yield Line(f"{theirs}{name}", value, name in from_file, settings, text, wrong)
    # Users of several systems also write our own names: lora_rank for lora.rank, which is lora_r there.
    by_name = {key.replace(".", "_"): name for name, row in table.items() for key in row.keys}
    by_name |= {name: name for name in table if not name.endswith(".*")}
    for name in (name for name in from_file if name not in table):
        nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)  # a prefix lowers the ratio below 0.6
        text = f"no such option of {system}" + (f"; nearest: {by_name[nearest[0]]}" if nearest else "")
        off = _is_off(from_file[name])
        text = f"left out: the table of {system} lacks it, and its value switches nothing on" if off else text
        if own := table.get(f"{name.rpartition('.')[0]}.*"):
            text, off = f"not supported yet: {own.later}", False
        yield Line(f"{theirs}{name}", from_file[name], True, {}, text, wrong=not off)


def _is_off(value: Any) -> bool:
    """Whether a value of any option switches nothing on: null, false, 0, nothing, or a section of such values."""
    return all(map(_is_off, value.values())) if isinstance(value, Mapping) else not value


def _find_fault(
    text: str, options: Options, from_file: Mapping[str, Any], table: Mapping[str, ForeignOption]
) -> str | None:
    """Return the option of the file that causes an error of a conversion, which several options share.

    Without the option its conversion has no such error. One that the error names comes first, then one that causes it
    without the others. None: no single option does.
    """
    failing = [
        name
        for name, row in table.items()
        if name in from_file and row.convert and _translate_value(row, from_file[name], options)[1] == text
    ]

    def fails_without(name: str, others: list[str]) -> bool:
        defaults = {other: table[other].default for other in others if table[other].default is not _NO_DEFAULT}
        changed = {other: value for other, value in options.items() if other not in others} | defaults
        return _translate_value(table[name], options.get(name), changed)[1] == text

    causes = [name for name in failing if not fails_without(name, [name])]
    named = [name for name in causes if re.search(rf"\b{re.escape(name)}\b", text)]
    alone = [name for name in causes if fails_without(name, [other for other in failing if other != name])]
    return next(iter([*named, *alone, *causes]), None)


def _fits(value: Any, row: ForeignOption) -> bool:
    """Whether a value has the type of the row's sample, and is finite if it is a number.

    A list fits too if each of its items sets its own options.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return False
    # A whole number may be written as 1.0, a float as 1, and YAML reads an unquoted 4.51 as a number, not as text.
    kinds = {bool: bool, int: (int, float), float: (int, float), str: (str, int, float), list: (list, str), dict: dict}
    if row.values and isinstance(value, list):
        switches = not row.key and all(isinstance(here, Mapping | None) for here in row.values.values())
        return switches and all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, kinds.get(type(row.sample), object))


def _translate_value(row: ForeignOption, value: Any, options: Mapping[str, Any]) -> tuple[Settings, str, bool]:
    """Translate one value to (settings, text, whether it is an error)."""
    if row.reason:
        return {}, row.reason, False
    if value is None and row.no_null:
        return {}, f"not supported yet: {row.no_null}", True
    if row.entries:
        return ({}, "expected a list of datasets with a path each", True) if value else ({}, "none", False)
    if row.later:
        # An empty value, such as false, asks for nothing, unless the default is another one.
        empty = not value and row.default in (None, _NO_DEFAULT)
        same = value is None or value == row.default or empty
        return (
            {},
            "not supported yet, and not used by this value" if same else f"not supported yet: {row.later}",
            not same,
        )
    if row.convert and (value is not None or row.default is not _NO_DEFAULT):
        try:
            settings = dict(CONVERSIONS[row.convert](options))
            note = settings.pop(NOTE, row.note)  # not a setting
            return settings, note or ("" if settings else DEFAULT), False
        except Unsupported as error:
            return {}, f"not supported yet: {error}", True
    settings = {}
    for item in value if row.values and isinstance(value, list) else [value]:
        word = str(item).lower() if isinstance(item, bool) else str(item)  # `true` in the table, True in Python
        if item is not None and row.values and word not in row.values and not row.others:
            return {}, f"not supported yet; supported are {', '.join(row.values)}", True
        ours = row.values.get(word, item)
        several = word in row.values and isinstance(ours, Mapping)
        settings |= ours if several else dict.fromkeys(row.keys, ours) if ours is not None else {}
    return settings, row.note or ("" if settings else DEFAULT), False


def _contradictions(lines: list[Line], written: yaml_file.YamlFile) -> list[Line]:
    """Return a line for each option whose settings contradict an earlier option."""
    errors, seen = [], {}
    for line in lines:
        for key, value in line.settings.items() if line.stated else ():
            first, before = seen.setdefault(key, (line.option, value))
            if before != value:
                text = f"{first} (line {written.line(first)}) already sets {key} to {before!r}"
                errors.append(Line(line.option, line.value, True, {}, text, wrong=True))
    return errors


def _exclusions(
    written: yaml_file.YamlFile, table: Mapping[str, ForeignOption], wrong: Collection[str]
) -> Iterator[Line]:
    """Yield an error for each option of the file that contradicts another one (`not_with`, `same_as`).

    The options `wrong` have an error already.
    """
    flat = _flat(written.values, table).items()
    values = {name: value for name, value in flat if value and value != "auto" and name not in wrong}
    for name, row in table.items():
        differs = row.same_as and values.get(name) != values.get(row.same_as)
        for other in (*row.not_with, row.same_as) if differs else row.not_with:
            if name in values and other in values:
                text = f"contradicts {other} = {values[other]!r} (line {written.line(other)})"
                yield Line(name, values[name], True, {}, text, wrong=True)


def _repeats(written: yaml_file.YamlFile) -> Iterator[Line]:
    """Yield a note for each key that is written twice: PyYAML, with which these systems read files, takes the last."""
    for name, (first, last) in written.repeated.items():
        value: Any = written.values
        for part in re.findall(r"[^.\[\]]+", name):
            value = (
                value[int(part)] if isinstance(value, list) else value.get(part) if isinstance(value, dict) else None
            )
        yield Line(name, value, True, {}, f"written twice, in lines {first} and {last}; the last counts")


def _gather_entries(settings: Settings) -> Settings:
    """Collect settings of list entries into lists: data.datasets[0].path, and data.datasets[i].x for every entry."""
    gathered = {key: value for key, value in settings.items() if "[" not in key}
    gathered |= {key: [dict(entry) for entry in value] for key, value in gathered.items() if keys.has_entries(key)}
    for key, value in settings.items():
        if match := re.fullmatch(r"(.*)\[(\d+)\]\.(.*)", key):
            entries = gathered.setdefault(match[1], [])
            entries += [{} for _ in range(int(match[2]) + 1 - len(entries))]  # settings may come in any order
            entries[int(match[2])][match[3]] = value
    for key, value in settings.items():
        if "[i]" in key:
            for entry in (*gathered.get("data.datasets", ()), *gathered.get("data.eval_datasets", ())):
                entry.setdefault(key.rpartition(".")[2], value)  # the entry's own value has priority
    return gathered


def _worth_showing(lines: list[Line]) -> Iterator[Line]:
    """Yield lines that the file states, and defaults that differ from ours; equal settings are shown only once."""
    first: list[Line] = []
    # Stated options first, so that a default with equal settings is the one that is dropped.
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
