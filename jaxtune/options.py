"""List every option with its type, default, unit, range, precondition and meaning.

    python -m jaxtune.options [PATTERN]
    python -m jaxtune.options --from=FILE.yaml [--dialect=surogate|xorl|erniekit|qefficient|trl|axolotl]

PATTERN is a regular expression; only options whose key or meaning contains a match are shown. If the output is not a
terminal, columns are separated by tabs. --from shows what becomes of a config that was written for another system,
which its options tell, or --dialect.
"""

import inspect
import re
import sys

import rich.box
import rich.console
import rich.table
import rich.text

from jaxtune.command import guarded
from jaxtune.config import foreign, keys, yaml_file
from jaxtune.config.loading import refuse
from jaxtune.config.recipe import read_recipe, recipe_file
from jaxtune.config.rules import in_words
from jaxtune.errors import UserError

HEADS = ("option", "type", "default", "unit", "range", "only when", "meaning")


def main(argv: list[str] | None = None) -> int:
    """Prints the options; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _main(arguments))


def find(pattern: str) -> list[keys.Option]:
    """The options whose key or meaning contains a match of the regular expression, ignoring case.

    Raises:
        UserError: Not a regular expression, or nothing matches.
    """
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"{pattern!r} is not a regular expression: {error}") from error
    found = [option for option in keys.options().values() if regex.search(option.key) or regex.search(option.doc)]
    if not found:
        raise UserError(f"{pattern!r}: {keys.no_such_option(pattern)}")
    return found


def _main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        print(inspect.cleandoc(__doc__ or ""))
        return
    flags = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    if "--from" in flags and flags.keys() <= {"--from", "--dialect"}:
        _translate(flags["--from"], flags.get("--dialect"))
        return
    if len(arguments) > 1:
        raise UserError(f"one pattern at most, not {len(arguments)}: {' '.join(arguments)}")
    found = find(arguments[0] if arguments else "")
    twice = () if arguments else ("data.eval_datasets[i].",)
    rows = [_row(option) for option in found if not option.key.startswith(twice)]
    if not sys.stdout.isatty():
        print("\n".join(map("\t".join, rows)))
        return
    table = rich.table.Table(*HEADS, box=rich.box.SIMPLE_HEAD)
    if twice:
        table.caption = "data.eval_datasets[i] has the options of data.datasets[i]."
    for row in rows:
        table.add_row(*map(rich.text.Text, row))  # Text: the brackets of a key are not markup
    rich.console.Console().print(table)


def _translate(path: str, dialect: str | None) -> None:
    """Prints what becomes of another system's config. Raises UserError, after that, if it cannot be translated."""
    if dialect is not None and dialect not in foreign.DIALECTS:
        raise UserError(f"--dialect={dialect}: there are {', '.join(foreign.DIALECTS)}")
    file = recipe_file(path)
    written = yaml_file.read(file, path)
    dialect = dialect or foreign.recognise(written.values, path)
    if dialect is None:
        systems = ", ".join(foreign.DIALECTS.values())
        raise UserError(f"{path}: its options are not those of {systems}; --dialect=NAME reads it as one all the same")
    translation = foreign.translate(written, dialect)
    print("\n".join(translation.notes(path)))
    refuse(path, translation.problems)
    for line in read_recipe(path, dialect=dialect).resolve().opening_lines[len(translation.notes(path)) :]:
        print(line)


def _row(option: keys.Option) -> tuple[str, ...]:
    rules = in_words(option.within), " and ".join(option.when)
    return option.key, keys.describe(option.annotation), repr(option.default), option.unit, *rules, option.doc


if __name__ == "__main__":
    sys.exit(main())
