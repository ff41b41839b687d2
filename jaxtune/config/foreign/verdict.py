"""What to change in a file of another system that does not run as it is."""

import re

from jaxtune.config.foreign import DIALECTS, ForeignOption, Translation, table
from jaxtune.config.sources import yaml_file
from jaxtune.errors import format_count
from jaxtune.option_field import Problem


def refusal(path: str, translation: Translation) -> str:
    """Return the error for a file with problems: each option in the way, and what to write instead."""
    texts = [f"{problem.text} -> {_remedy(problem, translation.dialect)}" for problem in translation.problems]
    return "\n  ".join([f"{path}: does not run as it is; change {format_count(len(texts), 'option')}:", *texts])


def origins(translation: Translation, written: yaml_file.YamlFile, message: str) -> list[str]:
    """Return the options of the file that set the keys of jaxtune which an error message names, as texts."""
    named = set(re.findall(r"[a-z]\w*(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?)+", message))
    texts = []
    for line in translation.lines:
        if keys := [key for key in line.settings if key in named]:
            at = f"line {written.line(line.option)}: " if line.stated else ""
            theirs = "" if line.stated else f", by default in {DIALECTS[translation.dialect]},"
            texts.append(f"{at}{line.option} = {line.value!r}{theirs} sets {', '.join(keys)}")
    return texts


def _remedy(problem: Problem, dialect: str) -> str:
    """Return what to write instead of an option's value."""
    (option,), row = problem.keys, _row(problem.keys[0], dialect)
    if row is None:
        nearest = re.search(r"; nearest: ([\w.]+)$", problem.text)
        return f"write {nearest[1]}, or remove it" if nearest else "remove it"
    if "; supported are " in problem.text:
        return "write one of these"
    if ": expected " in problem.text:
        return "write such a value"
    if " already sets " in problem.text or ": contradicts " in problem.text:
        return f"remove one of the two, such as {option}"
    if row.later and row.default is not ForeignOption().default:
        return f"remove it: its default, {row.default!r}, is supported"
    return "write what is supported, or remove it"


def _row(option: str, dialect: str) -> ForeignOption | None:
    """Return the row of an option, or of an option in an entry of a list: datasets[0].type."""
    entry = re.fullmatch(r"(.+?)\[\d+\]\.(.+)", option)
    if entry is None:
        return table(dialect).get(option)
    outer = table(dialect).get(entry[1])
    return None if outer is None else outer.of.get(entry[2])
