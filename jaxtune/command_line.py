"""Parse the command line of a command: its flags, the recipe, and the options that change it."""

import difflib
import pathlib
import re
from collections.abc import Callable

from absl import flags

from jaxtune.config import foreign, keys, read_recipe
from jaxtune.config.recipe import own_recipes
from jaxtune.config.schema import Config, ModelOptions
from jaxtune.config.sources import yaml_file
from jaxtune.errors import UserError

DIALECTS = list(foreign.DIALECTS)
_SETTING = re.compile(r"--?(?:no)?config\.([^=]+)")


def parse(
    values: flags.FlagValues,
    arguments: list[str],
    with_config: bool,
    recipe: Callable[[flags.FlagValues], str | None] | None,
) -> Config | None:
    """Parse the flags into `values` and resolve the config, if the command has one."""
    rest, arguments, settings = read_flags(values, arguments, with_config)
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


def read_flags(
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
        missing = re.findall(r"^flag --([\w-]+)=None: ", str(error), re.MULTILINE)
        lines = [f"--{name}=... is missing: {values[name].help}" for name in missing]
        raise UserError("\n".join(lines) or str(error)) from error
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
