"""jaxtune COMMAND [FLAGS], the same as python -m jaxtune.COMMAND [FLAGS]."""

import difflib
import importlib
import sys

import jaxtune
from jaxtune import command
from jaxtune.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Run the command named first, or list the commands if none is named. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return command.run_guarded(lambda: _dispatch(arguments[0] if arguments else "help", arguments[1:]))


def _dispatch(name: str, arguments: list[str]) -> int | None:
    if name in ("-h", "--help", "help"):
        print(f"{__doc__}\n")
        for each in command.NAMES:
            print(f"  {each:<10}{command.docstring(command.module_of(each)).splitlines()[0]}")
        print("\njaxtune COMMAND --help tells more.")
        return None
    if name == "--version":
        print(f"jaxtune {jaxtune.__version__}")
        return None
    if name not in command.NAMES:
        nearest = difflib.get_close_matches(name, command.NAMES, n=1)
        known = f"nearest: {nearest[0]}" if nearest else f"the commands are {', '.join(command.NAMES)}"
        raise UserError(f"no command {name!r}; {known}")
    from jaxtune.command_flags import COMMANDS  # after --help, which needs none

    if name in COMMANDS:
        return command.main(name, arguments)
    return importlib.import_module(command.module_of(name)).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
