"""Shared code of all commands: flags, the recipe and its overrides, and error messages without a traceback."""

import ast
import contextlib
import difflib
import errno
import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from jaxtune.command_flags import COMMANDS
from jaxtune.config import foreign, keys, read_recipe, yaml_file
from jaxtune.config.recipe import own_recipes
from jaxtune.config.schema import Config, ModelOptions
from jaxtune.errors import UserError, hide_secrets, printable
from jaxtune.terminal import REFUSED, LogFormatter, without_secrets

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
_SETTING = re.compile(r"--?(?:no)?config\.([^=]+)")


def main(name: str, argv: list[str] | None = None) -> int:
    """Run a command of `command_flags`, importing its module only after its flags and recipe have been read."""
    command, module = COMMANDS[name], f"jaxtune.{name}"

    def body(values: flags.FlagValues, config: Config | None) -> int | None:
        return importlib.import_module(module).run_command(values, config)

    return run(command.define_flags, body, argv, command.with_config, command.recipe, module)


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
    arguments = sys.argv[1:] if argv is None else argv
    values = flags.FlagValues()  # not absl's global flags, so that two commands can run in one process
    define_flags(values)
    if with_config:
        meaning = "recipe: NAME or FILE, optionally with :ARGUMENT; --config.SECTION.OPTION=VALUE changes an option"
        flags.DEFINE_string("config", None, meaning, flag_values=values)
        meaning = "your own Python file, run as a plugin (train.plugins); may be given several times"
        flags.DEFINE_multi_string("plugin", [], meaning, flag_values=values)
        meaning = "system that the YAML file was written for; default: recognised by its keys"
        flags.DEFINE_enum("dialect", None, list(foreign.DIALECTS), meaning, flag_values=values)
    if HELP & set(arguments):
        head = docstring(module) if module else inspect.getdoc(sys.modules[define_flags.__module__])
        return run_guarded(lambda: print(f"{head}\n\n{_flags_help(values)}"))
    return run_guarded(lambda: body(values, _parse(values, arguments, with_config, recipe)))


def run_with_words(
    define_flags: Callable[[flags.FlagValues], None],
    body: Callable[[flags.FlagValues, list[str]], int | None],
    argv: list[str] | None = None,
) -> int:
    """Parse the command line and call `body(flags, words)`, with the words that belong to no flag.

    All words after `--` are among them. The rest is as in `run`, for a command without a config.
    """
    arguments = sys.argv[1:] if argv is None else argv
    values = flags.FlagValues()
    define_flags(values)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if HELP & set(own):
        head = inspect.getdoc(sys.modules[define_flags.__module__])
        return run_guarded(lambda: print(f"{head}\n\n{_flags_help(values)}"))
    return run_guarded(lambda: body(values, _read_flags(values, arguments, with_config=False)[0]))


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


def _parse(
    values: flags.FlagValues,
    arguments: list[str],
    with_config: bool,
    recipe: Callable[[flags.FlagValues], str | None] | None,
) -> Config | None:
    """Parse the flags into `values` and resolve the config, if the command has one."""
    rest, arguments, settings = _read_flags(values, arguments, with_config)
    # Other systems take the config without a flag: train config.yaml
    suffixes = (".yaml", ".yml", ".py", ".json")
    positional = [word for word in rest if with_config and pathlib.Path(word.partition(":")[0]).suffix in suffixes]
    if rest != positional:
        stray = next(word for word in rest if word not in positional)
        meant = f"config={stray}" if with_config and stray.partition(":")[0] in own_recipes() else "name=value"
        raise UserError(f"{stray!r} does not belong to a flag; write --{meant}")
    if not with_config:
        return None
    recipes = [argument for argument in arguments if re.match("--?config(=|$)", argument)] + positional
    if len(recipes) > 1:
        raise UserError(f"{' and '.join(recipes)}: one recipe at a time; a recipe may import another one")
    named = values.config or "".join(positional)
    implied = None if named or recipe is None else recipe(values)
    if implied == "" and not settings and not values.plugin:
        return None
    if not (named or implied):
        raise UserError("--config=... is missing: a recipe, which names the data; --help tells more")
    values["config"].value = named or None  # set for a positional recipe, too
    path, _, argument = (implied, "", "") if implied else named.partition(":")
    overrides = [(key, getattr(values, f"config.{key}")) for key in settings]
    if values.plugin:
        if "train.plugins" in settings:
            raise UserError("--plugin and --config.train.plugins: give only one of the two")
        overrides.append(("train.plugins", repr(tuple(values.plugin))))
    return read_recipe(path, argument or None, values.dialect).resolve_named(overrides, count=_count_parameters)


def _read_flags(
    values: flags.FlagValues, arguments: list[str], with_config: bool
) -> tuple[list[str], list[str], list[str]]:
    """Parse the flags into `values`.

    Returns:
        The words that belong to no flag; the arguments, with those from flag files; the keys of --config.KEY.
    """
    values.set_gnu_getopt(True)
    try:
        arguments = values.read_flags_from_files(arguments, force_gnu=True)
        settings = _define_settings(values, arguments) if with_config else []
        _, *words = values(["jaxtune", *arguments])
    except flags.UnrecognizedFlagError as error:
        suggestion = _suggestion(error.flagname, values, with_config, arguments)
        raise UserError(f"--{error.flagname}: no such flag; {suggestion}") from error
    except (flags.Error, ValueError) as error:
        missing = re.fullmatch(r"flag --([\w-]+)=None: .*", str(error))
        raise UserError(f"--{missing[1]}=... is missing; --help tells more" if missing else str(error)) from error
    return words, arguments, settings


def _count_parameters(model: ModelOptions) -> int:
    from jaxtune.weights.architecture import count_parameters  # imports jax, which other configs need not wait for

    return count_parameters(model)


def _define_settings(values: flags.FlagValues, arguments: list[str]) -> list[str]:
    """Define a text flag for each --config.KEY in the arguments, even an unknown one; `resolve` checks them later."""
    given = [match[1] for argument in arguments if (match := _SETTING.match(argument))]
    settings = list(dict.fromkeys(given))
    for key in settings:
        option = keys.lookup(key) or keys.nearest_option(key)
        is_bool = option is not None and option.annotation is bool
        as_text = flags.ArgumentParser(), flags.ArgumentSerializer()  # `resolve` parses the values
        flags.DEFINE_flag(flags.Flag(*as_text, f"config.{key}", None, f"option {key}", boolean=is_bool), values)
    return settings


def _suggestion(name: str, values: flags.FlagValues, with_config: bool, arguments: list[str]) -> str:
    """Return a hint at the flag or option with the nearest name, or at what another system's flag is here."""
    if with_config and keys.lookup(name) is None and (meant := _of_other_system(name, arguments)):
        return meant
    command_flags = [flag for flag in values if not flag.startswith("config.")]
    near = difflib.get_close_matches(name, command_flags, n=1, cutoff=0.7)
    if near:
        return f"nearest: --{near[0]}"
    option = keys.nearest_option(name) if with_config else None
    return f"nearest: --config.{option.key}" if option else "--help lists them"


def _of_other_system(name: str, arguments: list[str]) -> str | None:
    """Return our flags for a flag that another system has, such as XORL's `--train.lr 2e-5`; None if none has it."""
    # The argument itself, up to its value, which may be the next argument; a flag without a value switches on.
    index = next(i for i, argument in enumerate(arguments) if argument.lstrip("-").partition("=")[0] == name)
    _, equals, text = arguments[index].partition("=")
    if not equals:
        following = arguments[index + 1 : index + 2]
        text = "true" if not following or following[0].startswith("--") else following[0]
    if (translated := foreign.translate_flag(name, yaml_file.parse_value(text))) is None:
        return None
    system, settings = translated
    ours = " ".join(f"--config.{key.replace('[i]', '[0]')}={value}" for key, value in settings.items())
    return f"{system}'s option is here {ours}"


def _flags_help(values: flags.FlagValues) -> str:
    lines = []
    for name in values:
        flag = values[name]
        default = "" if flag.default in (None, "", []) or flag.boolean else f" (default: {flag.default})"
        lines.append(f"  --{name}: {flag.help.splitlines()[0].rstrip(';')}{default}")
    return "\n".join(["Flags:", *lines])
