"""jaxtune COMMAND [FLAGS], the same as python -m jaxtune.COMMAND [FLAGS]."""

import difflib
import importlib
import pathlib
import sys

import jaxtune
from jaxtune import command, command_flags
from jaxtune.errors import UserError

# Each name is a module of this package, or a subpackage with a __main__.
COMMANDS = (
    "train",
    "evaluate",
    "export",
    "generate",
    "prepare",
    "plan",
    "report",
    "options",
    "recipes",
    "cache",
    "launch",
    "doctor",
    "docs",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command named first, or list the commands if none is named. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return command.run_guarded(lambda: _dispatch(arguments[0] if arguments else "help", arguments[1:]))


def _dispatch(name: str, arguments: list[str]) -> int | None:
    if name in ("-h", "--help", "help"):
        print(f"{__doc__}\n")
        for each in COMMANDS:
            print(f"  {each:<10}{command.docstring(module_of(each)).splitlines()[0]}")
        print("\njaxtune COMMAND --help tells more.")
        return None
    if name == "--version":
        print(f"jaxtune {jaxtune.__version__}")
        return None
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"no command {name!r}; " + (f"nearest: {nearest[0]}" if nearest else f"one of {COMMANDS}"))
    if name in command_flags.COMMANDS:
        return command.main(name, arguments)
    return importlib.import_module(module_of(name)).main(arguments)


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"jaxtune.{name}.__main__" if pathlib.Path(__file__).with_name(name).is_dir() else f"jaxtune.{name}"


if __name__ == "__main__":
    sys.exit(main())
