"""jaxtune COMMAND [FLAGS], the same as python -m jaxtune.COMMAND [FLAGS]."""

import ast
import difflib
import importlib.metadata
import importlib.util
import pathlib
import sys

from jaxtune.command import guarded
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
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command named first; without one, lists them. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(f"{__doc__}\n\n" + "\n".join(f"  {name:<10}{_meaning(name)}" for name in COMMANDS))
        print("\njaxtune COMMAND --help tells more.")
        return 0
    if arguments[0] == "--version":
        print(f"jaxtune {importlib.metadata.version('jaxtune')}")
        return 0
    return guarded(lambda: _dispatch(arguments[0], arguments[1:]))


def _dispatch(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(f"no command {name!r}; " + (f"nearest: {nearest[0]}" if nearest else f"one of {COMMANDS}"))
    return importlib.import_module(_module(name)).main(arguments)


def _module(name: str) -> str:
    return f"jaxtune.{name}.__main__" if pathlib.Path(__file__).with_name(name).is_dir() else f"jaxtune.{name}"


def _meaning(name: str) -> str:
    """The first line of a command's docstring, read without importing it (that would load jax)."""
    spec = importlib.util.find_spec(_module(name))
    assert spec is not None and spec.origin is not None
    source = pathlib.Path(spec.origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
