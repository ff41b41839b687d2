"""List options with their type, default, unit, range, precondition and meaning.

    python -m jaxtune.options [--all | PATTERN]
    python -m jaxtune.options --json-schema
    python -m jaxtune.options --from=FILE.yaml [--dialect=surogate|xorl|erniekit|qefficient|trl|axolotl]

Without an argument the basic options are listed, with --all every option. PATTERN is a regular expression: all options
whose key or meaning contains a match are listed. Each option is a line `KEY: TYPE = DEFAULT (UNIT, RANGE)`, then its
meaning and its precondition, indented. --json-schema prints a JSON Schema, by which editors complete YAML recipes.
--from shows the translation of a config that was written for another system, and at the end whether the file runs as it
is, or which lines to change. --dialect names the system; by default its options identify it.
"""

import json
import re
import shutil
import sys
import textwrap
from functools import partial

from absl import flags

from jaxtune.command import run_with_words
from jaxtune.config import foreign, keys
from jaxtune.config.option_rules import describe_interval
from jaxtune.config.recipe import read_recipe, recipe_file
from jaxtune.config.sources import yaml_file
from jaxtune.errors import UserError
from jaxtune.reference.json_schema import json_schema

WIDTH = 100  # width of lines if the output is not a terminal


def main(argv: list[str] | None = None) -> int:
    """Print the options; return the exit code."""
    return run_with_words(_define_flags, _main, argv)


def find(pattern: str) -> list[keys.Option]:
    """Return the options whose key or meaning contains a match of the regular expression, ignoring case.

    Raises:
        UserError: The pattern is not a regular expression, or nothing matches.
    """
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}") from error
    matches = [option for option in keys.options().values() if regex.search(option.key) or regex.search(option.doc)]
    if not matches:
        raise UserError(f"{pattern!r}: {keys.no_such_option(pattern)}")
    return matches


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("all", False, "list every option", flag_values=values)
    flags.DEFINE_bool("json-schema", False, "print a JSON Schema of all options", flag_values=values)
    flags.DEFINE_string("from", None, "config of another system, to translate", flag_values=values)
    flags.DEFINE_string("dialect", None, "system that --from was written for", flag_values=values)


def _main(values: flags.FlagValues, words: list[str]) -> None:
    tasks = [*words, *(f"--{name}" for name in ("all", "json-schema", "from") if values[name].value)]
    if len(tasks) > 1:
        raise UserError(f"one pattern at most, not {len(tasks)}: {' '.join(tasks)}")
    if values["from"].value == "":
        raise UserError("--from=FILE.yaml: the file is missing")
    if values["from"].value is not None:
        _translate(values["from"].value, values.dialect)
    elif values.dialect is not None:
        raise UserError("--dialect belongs to --from=FILE.yaml")
    elif values["json-schema"].value:
        print(json.dumps(json_schema(), indent=1))
    else:
        _list(*words, every=values.all)


def _list(pattern: str = "", every: bool = False) -> None:
    """Print the options that match a pattern; without one, the basic options or all of them."""
    # Without a pattern, options of evaluation datasets would repeat those of the training datasets.
    repeated = () if pattern else ("data.eval_datasets[i].",)
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    matches = find(pattern)
    for option in matches:
        if not option.key.startswith(repeated) and (pattern or every or option.basic):
            print(_describe(option, width))
    if repeated:
        print("data.eval_datasets[i] has the options of data.datasets[i].")
    if not pattern and not every:
        print(f"These are the basic options of {len(matches)}; --all lists all of them, PATTERN searches them.")


def _translate(path: str, dialect: str | None) -> None:
    """Print the translation of another system's config. Raises UserError afterwards if it cannot be translated."""
    if dialect is not None and dialect not in foreign.DIALECTS:
        raise UserError(f"--dialect={dialect}: not one of {', '.join(foreign.DIALECTS)}")
    file = recipe_file(path)
    written = yaml_file.read(file, path)
    dialect = dialect or foreign.recognise(written.values, path)
    if dialect is None:
        systems = ", ".join(foreign.DIALECTS.values())
        raise UserError(f"{path}: its options match none of {systems}; --dialect=NAME reads it as one anyway")
    translation = foreign.translate(written, dialect)
    print("\n".join(translation.notes(path)))
    if translation.problems:
        raise UserError(translation.refusal(path))
    try:
        config = read_recipe(path, dialect=dialect).resolve()
    except UserError as error:
        raise UserError("\n  ".join([str(error), *translation.origins(written, str(error))])) from error
    for line in config.startup_notes[len(translation.notes(path)) :]:
        print(line)
    command = "train" if config.data.datasets else "evaluate"  # ERNIEKit's files may hold evaluation data only
    print(f"{path} runs as it is: jaxtune {command} {path}")


def _describe(option: keys.Option, width: int) -> str:
    limits = ", ".join(filter(None, (option.unit, describe_interval(option.within))))
    head = f"{option.key}: {keys.describe(option.annotation)} = {option.default!r}" + (f" ({limits})" if limits else "")
    lines = [head, f"    {option.doc}"]
    if option.when:
        lines.append(f"    only when {' and '.join(option.when)}")
    fill = partial(textwrap.fill, width=width, subsequent_indent=" " * 6, break_long_words=False)
    return "\n".join(map(fill, lines))


if __name__ == "__main__":
    sys.exit(main())
