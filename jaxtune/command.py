"""Shared code of all commands: their names, how they run, and error messages without a traceback."""

import ast
import contextlib
import errno
import gc
import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxtune.errors import UserError, hide_secrets, printable
from jaxtune.terminal import REFUSED, LogFormatter, without_secrets

if TYPE_CHECKING:
    from jaxtune.config.schema import Config

# Each name is a module of this package, or a subpackage with a __main__.
NAMES = (
    "train",
    "evaluate",
    "export",
    "generate",
    "prepare",
    "plan",
    "report",
    "options",
    "convert",
    "merge",
    "recipes",
    "cache",
    "launch",
    "doctor",
    "docs",
)
HELP = {"-h", "--help", "-help"}


def main(name: str, argv: list[str] | None = None) -> int:
    """Run a command of `command_flags`, importing its module only after its flags and recipe have been read."""
    from jaxtune.command_flags import COMMANDS  # not needed by `jaxtune --help`, as what `run` imports

    command, module = COMMANDS[name], f"jaxtune.{name}"

    def body(values: flags.FlagValues, config: "Config | None") -> int | None:
        return import_unsearched(module).run_command(values, config)

    return run(command.define_flags, body, argv, command.with_config, command.recipe, module)


def import_unsearched(module: str) -> ModuleType:
    """Import a module, of whose objects the garbage collector then searches none, because they stay until the end.

    Otherwise it would search them during the import (0.3 s for `jaxtune.train`), when programs are traced, and at exit
    (0.6 s).
    """
    if module in sys.modules or not gc.isenabled():
        return importlib.import_module(module)
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def run(
    define_flags: Callable[[flags.FlagValues], None],
    body: Callable[[flags.FlagValues, Any], int | None],
    argv: list[str] | None = None,
    with_config: bool = True,
    recipe: Callable[[flags.FlagValues], str | None] | None = None,
    module: str | None = None,
) -> int:
    """Parse the command line and call `body(flags, config)`.

    Args:
        define_flags: Defines the command's own flags with `absl.flags.DEFINE_*(..., flag_values=values)`.
        body: The command, which may return an exit code; its config is None without `with_config`.
        argv: Arguments without the program's name; None: the arguments of the process.
        with_config: Whether the command takes --config=RECIPE[:ARGUMENT] and --config.SECTION.OPTION=VALUE.
        recipe: Returns the recipe to use if --config is not given, from the flags. It returns None if --config is
            required, or "" if no recipe is needed, and then the config is None.
        module: The module whose docstring heads the output of --help; None: the module of `define_flags`.

    Returns:
        The exit code: 2 after a UserError, which is printed to stderr as `jaxtune: error: ...`.
    """
    from jaxtune import command_line

    arguments = sys.argv[1:] if argv is None else argv
    values = flags.FlagValues()  # not absl's global flags, so that two commands can run in one process
    define_flags(values)
    if with_config:
        meaning = "recipe: NAME or FILE, optionally with :ARGUMENT; --config.SECTION.OPTION=VALUE changes an option"
        flags.DEFINE_string("config", None, meaning, flag_values=values)
        meaning = "your own Python file, run as a plugin (train.plugins); may be given several times"
        flags.DEFINE_multi_string("plugin", [], meaning, flag_values=values)
        meaning = "system that the YAML file was written for; default: recognised by its keys"
        flags.DEFINE_enum("dialect", None, command_line.DIALECTS, meaning, flag_values=values)
    if HELP & set(arguments):
        head = docstring(module) if module else inspect.getdoc(sys.modules[define_flags.__module__])
        return run_guarded(lambda: print(f"{head}\n\n{_flags_help(values)}"))
    return run_guarded(lambda: body(values, command_line.parse(values, arguments, with_config, recipe)))


def run_with_words(
    define_flags: Callable[[flags.FlagValues], None],
    body: Callable[[flags.FlagValues, list[str]], int | None],
    argv: list[str] | None = None,
) -> int:
    """Parse the command line and call `body(flags, words)`, with the words that belong to no flag.

    All words after `--` are among them. The rest is as in `run`, for a command without a config.
    """
    from jaxtune import command_line

    arguments = sys.argv[1:] if argv is None else argv
    values = flags.FlagValues()
    define_flags(values)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if HELP & set(own):
        head = inspect.getdoc(sys.modules[define_flags.__module__])
        return run_guarded(lambda: print(f"{head}\n\n{_flags_help(values)}"))
    return run_guarded(lambda: body(values, command_line.read_flags(values, arguments, with_config=False)[0]))


def module_of(name: str) -> str:
    """Return the module of a command."""
    return f"jaxtune.{name}.__main__" if pathlib.Path(__file__).with_name(name).is_dir() else f"jaxtune.{name}"


def docstring(module: str) -> str:
    """Return the docstring of a module without importing the module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(pathlib.Path(spec.origin).read_text(encoding="utf-8"))) or ""


@contextlib.contextmanager
def _show_warnings() -> Iterator[None]:
    """Show warnings on stderr, unless there is a handler already; `host.process` sets up its own log."""
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    handler.addFilter(without_secrets)
    if not root.handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


@_show_warnings()
def run_guarded(body: Callable[[], int | None]) -> int:
    """Call `body`; turn a UserError or an unusable file into one message on stderr and exit code 2."""
    try:
        code = body() or 0
        sys.stdout.flush()  # so that a failed write is caught here, not while Python shuts down
        return code
    except UserError as error:
        message = str(error)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended; end quietly, as other programs do
        # Python flushes stdout again when it exits, which must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.filename is None and not full:
            raise
        message = hide_secrets(f"{error.filename or 'writing'}: {error.strerror}")
        if full:
            message += (
                ". Finished checkpoints are intact: free some space; --config=RUN/config.json resumes from the last one"
            )
    except KeyboardInterrupt:
        print("jaxtune: interrupted", file=sys.stderr)
        return 130
    shown = "\n".join(map(printable, message.split("\n")))  # a message may quote files that others wrote
    print(f"jaxtune: error: {shown}", file=sys.stderr)
    return REFUSED


def _flags_help(values: flags.FlagValues) -> str:
    lines = []
    for name in values:
        flag = values[name]
        default = "" if flag.default in (None, "", []) or flag.boolean else f" (default: {flag.default})"
        lines.append(f"  --{name}: {flag.help.splitlines()[0].rstrip(';')}{default}")
    return "\n".join(["Flags:", *lines])
