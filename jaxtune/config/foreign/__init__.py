"""Translate config files of other systems, whose options `option_table` describes, to ours."""

import dataclasses
import difflib
import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config import keys
from jaxtune.config.foreign import axolotl, erniekit, qefficient, surogate, trl, xorl
from jaxtune.config.foreign.axolotl import axolotl_data
from jaxtune.config.foreign.contradictions import find_contradictions
from jaxtune.config.foreign.conversions import FILE, NOTE, Options, Settings, Unsupported
from jaxtune.config.foreign.option_table import DIALECTS, NO_DEFAULT, ForeignOption, flatten, table
from jaxtune.config.foreign.recognition import MARKS, recognise
from jaxtune.config.foreign.translation import Line, Mistake, Translation
from jaxtune.config.foreign.trl import trl_data, trl_objectives
from jaxtune.config.sources import yaml_file

_MODULES = (surogate, xorl, erniekit, qefficient, trl, trl_data, trl_objectives, axolotl, axolotl_data)
_FUNCTIONS = ChainMap(*map(vars, _MODULES))
"""The functions that rows name under `convert`, which take all options and return settings."""
_OR_REMOVE = "write what is supported, or remove it"


def translate(written: yaml_file.YamlFile, dialect: str) -> Translation:
    """Translate every option of a file, and the defaults of its system, to our options."""
    lines = list(_lines(written.values, table(dialect), DIALECTS[dialect]))
    lines += find_contradictions(lines, written, table(dialect))
    problems = []
    # A conversion that reads several options fails once per option: blame the options that the file states.
    blamed = {line.text for line in lines if line.wrong and line.stated}
    for line in lines:
        if line.wrong and (line.stated or line.text not in blamed):
            at = f"line {written.line(line.option)}: " if line.stated else ""
            text = f"{at}{line.option} = {line.value!r}: {line.text}"
            problems.append(Mistake((line.option,), text, remedy=line.remedy))
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
    from_file = flatten(values, table)
    options = {name: row.default for name, row in table.items() if row.default is not NO_DEFAULT}
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
            text = f"expected a value such as {sample!r}"
            yield Line(f"{theirs}{name}", value, True, {}, text, remedy="write such a value")
        # A default without a meaning here is not shown.
        elif name in from_file or (name in options and not (row.reason or row.later)):
            try:
                settings, text, remedy = _translate_value(row, value, options)
            except Unsupported as error:
                settings, text, remedy = {}, f"not supported yet: {error}", _OR_REMOVE
                if text not in faults:
                    faults[text] = _find_fault(error, options, from_file, table)
                if faults[text] not in (None, name):  # one error, at the option that causes it
                    text, remedy = f"see {faults[text]}", ""
            settings = {f"{ours}{key}": setting for key, setting in settings.items()}
            yield Line(f"{theirs}{name}", value, name in from_file, settings, text, remedy, row.elsewhere)
    # Users of several systems also write our own names: lora_rank for lora.rank, which is lora_r there.
    by_name = {key.replace(".", "_"): name for name, row in table.items() for key in row.keys}
    by_name |= {name: name for name in table if not name.endswith(".*")}
    for name in (name for name in from_file if name not in table):
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)  # a prefix lowers the ratio below 0.6
        nearest = by_name[near[0]] if near else ""
        text = f"no such option of {system}" + (f"; nearest: {nearest}" if near else "")
        remedy = f"write {nearest}, or remove it" if near else "remove it"
        if own := table.get(f"{name.rpartition('.')[0]}.*"):
            text, remedy = f"not supported yet: {own.later}", "remove it"
        elif _is_off(from_file[name]):
            text, remedy = f"left out: the table of {system} lacks it, and its value switches nothing on", ""
        yield Line(f"{theirs}{name}", from_file[name], True, {}, text, remedy)


def _is_off(value: Any) -> bool:
    """Whether a value of any option switches nothing on: null, false, 0, nothing, or a section of such values."""
    return all(map(_is_off, value.values())) if isinstance(value, Mapping) else not value


def _find_fault(
    error: Unsupported, options: Options, from_file: Mapping[str, Any], table: Mapping[str, ForeignOption]
) -> str | None:
    """Return the option of the file that causes an error of a conversion, which several options share.

    Without the option its conversion has no such error. One that the error names comes first, then one that causes it
    without the others. None: no single option does.
    """
    if error.option in from_file:
        return error.option

    def fails(name: str, without: list[str]) -> bool:
        defaults = {other: table[other].default for other in without if table[other].default is not NO_DEFAULT}
        try:
            _FUNCTIONS[table[name].convert]({n: v for n, v in options.items() if n not in without} | defaults)
        except Unsupported as other:
            return str(other) == str(error)
        return False

    failing = [name for name, row in table.items() if name in from_file and row.convert and fails(name, [])]
    causes = [name for name in failing if not fails(name, [name])]
    alone = [name for name in causes if fails(name, [other for other in failing if other != name])]
    return next(iter([*alone, *causes]), None)


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


def _translate_value(row: ForeignOption, value: Any, options: Mapping[str, Any]) -> tuple[Settings, str, str]:
    """Translate one value to (settings, text, what to write instead if it is an error). Raises Unsupported."""
    if row.reason:
        return {}, row.reason, ""
    if value is None and row.no_null:
        return {}, f"not supported yet: {row.no_null}", _OR_REMOVE
    if row.entries:
        return ({}, "expected a list of datasets with a path each", "write such a value") if value else ({}, "none", "")
    if row.later:
        # An empty value, such as false, asks for nothing, unless the default is another one.
        empty = not value and row.default in (None, NO_DEFAULT)
        if value is None or value == row.default or empty:
            return {}, "not supported yet, and not used by this value", ""
        stated = row.default is not NO_DEFAULT
        remedy = f"remove it: its default, {row.default!r}, is supported" if stated else _OR_REMOVE
        return {}, f"not supported yet: {row.later}", remedy
    if row.convert and (value is not None or row.default is not NO_DEFAULT):
        settings = dict(_FUNCTIONS[row.convert](options))
        return settings, settings.pop(NOTE, row.note), ""
    settings = {}
    for item in value if row.values and isinstance(value, list) else [value]:
        word = str(item).lower() if isinstance(item, bool) else str(item)  # `true` in the table, True in Python
        if item is not None and row.values and word not in row.values and not row.others:
            return {}, f"not supported yet; supported are {', '.join(row.values)}", "write one of these"
        ours = row.values.get(word, item)
        several = word in row.values and isinstance(ours, Mapping)
        settings |= ours if several else dict.fromkeys(row.keys, ours) if ours is not None else {}
    return settings, row.note, ""


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
            yield dataclasses.replace(line, settings={}, text=f"together with {same}", elsewhere=True)
        elif line.stated or (same is None and any(value != _default(key) for key, value in line.settings.items())):
            first.append(line)
            yield line


def _default(key: str) -> Any:
    option = keys.lookup(key)
    return None if option is None else option.default
