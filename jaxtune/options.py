"""List every option with its type, default, unit, range, precondition and meaning.

    python -m jaxtune.options [PATTERN]
    python -m jaxtune.options --from=FILE.yaml [--dialect=surogate|xorl|erniekit|qefficient|trl|axolotl]

PATTERN is a regular expression; only options whose key or meaning contains a match are shown. Each option is a line
`KEY: TYPE = DEFAULT (UNIT, RANGE)`, then its meaning and its precondition, indented. --from shows what becomes of a
config that was written for another system, which its options tell, or --dialect.
"""

import inspect
import re
import shutil
import sys
import textwrap
from functools import partial

from jaxtune.command import guarded
from jaxtune.config import foreign, keys, yaml_file
from jaxtune.config.loading import refuse
from jaxtune.config.option_rules import in_words
from jaxtune.config.recipe import read_recipe, recipe_file
from jaxtune.errors import UserError

WIDTH = 100  # of lines that do not go to a terminal


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
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    for option in found:
        if not option.key.startswith(twice):
            print(_described(option, width))
    if twice:
        print("data.eval_datasets[i] has the options of data.datasets[i].")


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


def _described(option: keys.Option, width: int) -> str:
    limits = ", ".join(filter(None, (option.unit, in_words(option.within))))
    head = f"{option.key}: {keys.describe(option.annotation)} = {option.default!r}" + (f" ({limits})" if limits else "")
    lines = [head, f"    {option.doc}"]
    if option.when:
        lines.append(f"    only when {' and '.join(option.when)}")
    fill = partial(textwrap.fill, width=width, subsequent_indent=" " * 6, break_long_words=False)
    return "\n".join(map(fill, lines))


if __name__ == "__main__":
    sys.exit(main())
