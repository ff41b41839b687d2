"""Read the recipe that a user names: their own file, a recipe that comes with jaxtune, or the config.json of a run.

A recipe is a Python file or a YAML file. In Python, `get_config()` or `get_config(argument)` starts from `new_config()`
and returns it; recipes inherit by import, from jaxtune.recipes or from the recipe's folder. A YAML file sets options by
our keys, on top of an optional `base` recipe, or by the keys of another system (`config.foreign`).
"""

import ast
import contextlib
import dataclasses
import difflib
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxtune.config import foreign, keys
from jaxtune.config.loading import as_dict, from_json, new_config, raise_problems, resolve, with_values
from jaxtune.config.recommended import CountParameters
from jaxtune.config.schema import Config
from jaxtune.config.sources import yaml_file
from jaxtune.config.sources.inheritance import every_key
from jaxtune.errors import UserError, printable
from jaxtune.option_field import Problem

RECIPES = pathlib.Path(__file__).parents[1] / "recipes"


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read.

    Attributes:
        name: The name or path that the user gave.
        config: All options.
        given: Values that a YAML file sets on top of `config`, by key.
        source: "recipe" if it was written for jaxtune, "translation" if for another system.
        notes: Lines for the user, such as the translation of each option of another system's file.
        inherited: Keys of values in `config` that come from another recipe, as in `loading.resolve`.
    """

    name: str
    config: ConfigDict
    given: Mapping[str, Any] = field(default_factory=dict)
    source: Literal["recipe", "translation"] = "recipe"
    notes: tuple[str, ...] = ()
    inherited: frozenset[str] | None = None

    def resolve(
        self,
        overrides: Iterable[tuple[str, Any]] = (),
        by: Literal["command line", "call"] = "command line",
        count: CountParameters | None = None,
    ) -> Config:
        """Return the typed and checked Config (`loading.resolve`)."""
        given = self.source, self.given, self.notes, by, self.inherited
        return resolve(self.config, self.name, overrides, *given, count)

    def resolve_named(
        self,
        overrides: Iterable[tuple[str, Any]] = (),
        by: Literal["command line", "call"] = "command line",
        count: CountParameters | None = None,
    ) -> Config:
        """Return the Config of a run, which is named after the recipe if train.run_name is unset.

        The name is the same each time, so that ckpt.resume='auto' finds the run again.
        """
        config = self.resolve(overrides, by, count)
        if config.train.run_name is not None:
            return config
        return dataclasses.replace(
            config, train=dataclasses.replace(config.train, run_name=pathlib.Path(self.name).stem)
        )


def own_recipes() -> dict[str, pathlib.Path]:
    """Return the files of the recipes that come with jaxtune, by name."""
    return {file.stem: file for file in sorted(RECIPES.glob("[!_]*.py"))}


def first_line(file: pathlib.Path) -> str:
    """Return the first line of a Python file's docstring, without running the file."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def recipe_file(path: str) -> pathlib.Path:
    """Return the file of a recipe, given its path or its name in jaxtune. Raises UserError if there is none."""
    file = pathlib.Path(path)
    if file.is_file():
        return file.resolve()
    shipped = own_recipes()
    if path in shipped:
        return shipped[path]
    if (file / "checkpoints").is_dir():
        raise UserError(f"recipe {path}: the folder of a run; resume it with --config={file / 'config.json'}")
    if (file / "config.json").is_file():
        raise UserError(f"recipe {path}: a folder; if it is a model, train adapters with --config=qwen_lora:{path}")
    near = difflib.get_close_matches(file.stem, shipped, n=1)
    hint = f"jaxtune has a recipe {near[0]}, which needs no path" if near else f"jaxtune has {', '.join(shipped)}"
    neighbours = [other for other in file.parent.glob("*.py") if "def get_config" in other.read_text(errors="replace")]
    others = ", ".join(sorted(map(str, neighbours)))
    raise UserError(f"recipe {path}: no such file; " + (f"there are {others}; " if others else "") + hint)


def load_recipe(path: str, argument: str | None = None) -> ConfigDict:
    """Return the ConfigDict from a recipe's `get_config()`, or from a run's config.json.

    Args:
        path: The file, or the name of a recipe that comes with jaxtune.
        argument: Passed to get_config(); None: it is called without arguments.

    Raises:
        UserError: No such recipe, or an error in it; the message names the line in the recipe.
    """
    recipe = read_recipe(path, argument)
    return with_values(recipe.config, recipe.given) if recipe.given else recipe.config


def read_recipe(
    path: str, argument: str | None = None, dialect: str | None = None, above: tuple[pathlib.Path, ...] = ()
) -> Recipe:
    """Read a recipe by path or name.

    Args:
        path: The file, or the name of a recipe that comes with jaxtune.
        argument: Passed to get_config(); None: it is called without arguments.
        dialect: The system that a YAML file was written for; None: recognise it by its keys.
        above: YAML files whose `base` leads to this one, to detect cycles.

    Raises:
        UserError: No such recipe, or an error in it; the message names the line in the recipe.
    """
    file = recipe_file(path)
    if file.suffix in (".yaml", ".yml"):
        if argument is not None:
            raise UserError(f"recipe {path}: a YAML file takes no argument; write base: NAME:{argument} in it")
        return _from_yaml(path, file, dialect, above)
    if dialect is not None:
        raise UserError(f"--dialect={dialect}: has no effect: {path} is not a YAML file")
    if file.suffix == ".json":
        saved = from_json(file.read_text(encoding="utf-8"), path)
        code = ", ".join(code_in(saved).values())
        notes = (f"{path} names Python code, which is run: {printable(code)}",) if code else ()
        return Recipe(path, ConfigDict(as_dict(saved), type_safe=False), notes=notes)
    if file.suffix != ".py":
        raise UserError(
            f"recipe {path}: a recipe is a Python file with get_config(), a YAML file, or the config.json of a run"
        )
    return Recipe(path, _from_python(path, file, argument))


def code_in(config: Config) -> dict[str, str]:
    """Return the Python files and functions that a config names, by option, except functions of jaxtune's recipes."""
    rewards = [name for name in config.rollout.rewards if not name.startswith("jaxtune.recipes.")]
    tools = [name for name in config.rollout.tools if not name.startswith("jaxtune.recipes.")]
    code = {"train.plugins": ",".join(config.train.plugins), "rollout.rewards": ",".join(rewards)}
    code |= {"rollout.tools": ",".join(tools), "rollout.environment": config.rollout.environment or ""}
    code |= {f"{key}.function": entry.function or "" for key, entry in config.entries()}
    return {key: named for key, named in code.items() if named}


def code_to_evaluate(config: Config) -> dict[str, str]:
    """Return the code that an evaluation runs in addition to plugins: rewards, and functions of its data."""
    functions = ("rollout.rewards", "rollout.tools", "rollout.environment")
    used = (*functions, "data.eval_datasets" if config.data.eval_datasets else "data.datasets")
    return {key: named for key, named in code_in(config).items() if key.startswith(used)}


def _from_python(path: str, file: pathlib.Path, argument: str | None) -> ConfigDict:
    try:
        with _importable(file.parent):
            get_config = runpy.run_path(str(file)).get("get_config")
            if get_config is None:
                raise UserError("has no function get_config()")
            config = get_config() if argument is None else get_config(argument)
    except Exception as error:
        raise UserError(f"recipe {_locate(path, file.parent, error)}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"recipe {path}: get_config() returned {type(config).__name__}; "
            "it must start from jaxtune.config.new_config() and return that"
        )
    return config


def _from_yaml(path: str, file: pathlib.Path, dialect: str | None, above: tuple[pathlib.Path, ...]) -> Recipe:
    written = yaml_file.read(file, path)
    if dialect is None and (dialect := _system_of(written, path)) is None:
        _refuse_repeats(written, path)
    # Another system's defaults come first, then the values that the file states.
    if dialect is not None:
        translation = foreign.translate(written, dialect)
        raise_problems(path, translation.problems)
        defaults = with_values(new_config(), translation.defaults)
        return Recipe(path, defaults, translation.stated, "translation", translation.notes(path))
    values = dict(written.values)
    base, given, problems = values.pop("base", None), {}, []
    for key, value in keys.flatten_options(values):
        if keys.lookup(key) is None:
            problems.append(Problem((key,), f"line {written.line(key)}: {key} = {value!r}: {keys.no_such_option(key)}"))
        elif key in given:
            problems.append(Problem((key,), f"line {written.line(key)}: {key} is written twice"))
        given[key] = value
    # No key is an option: the file is probably for an unknown system, so one line says more than a list of errors.
    if problems and len(problems) == len(given):
        systems = " or ".join(foreign.DIALECTS)
        raise UserError(f"{path}: {problems[0].text}; and no options of {systems} either")
    raise_problems(path, problems)
    if base is None:
        return Recipe(path, new_config(), given)
    where = f"{path}, line {written.line('base')}: base = {base!r}"
    if not isinstance(base, str):
        raise UserError(f"{where}: expected a recipe, such as qwen_lora")
    name, _, argument = base.partition(":")
    sibling = pathlib.Path(path).parent / name
    # A file next to this one has priority over a recipe of jaxtune with that name.
    name = str(sibling) if sibling.is_file() else name
    if pathlib.Path(name).resolve() in (file, *above):
        raise UserError(f"{where}: a recipe cannot start from itself")
    below = read_recipe(name, argument or None, above=(file, *above))
    config = with_values(below.config, below.given)
    return Recipe(path, config, given, below.source, below.notes, every_key(config))


def _system_of(written: yaml_file.YamlFile, path: str) -> str | None:
    """Return the system that a file was written for; None: jaxtune. Raises UserError if several may be meant."""
    try:
        return foreign.recognise(written.values, path)
    except UserError:
        _refuse_repeats(written, path)
        raise


def _refuse_repeats(written: yaml_file.YamlFile, path: str) -> None:
    """Raise UserError for a key that is written twice, which other systems allow."""
    for key, (_, line) in written.repeated.items():
        raise UserError(f"{path}, line {line}: {key.rpartition('.')[2]} is written twice")


@contextlib.contextmanager
def _importable(folder: pathlib.Path) -> Iterator[None]:
    """Let recipes in a folder import each other. Unload them afterwards, as another folder may have the same names."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and pathlib.Path(file).parent == folder:
                del sys.modules[name]


def _locate(path: str, folder: pathlib.Path, error: Exception) -> str:
    """Return file, line and text of an error in a recipe, or in a recipe that it imports."""
    frames = traceback.extract_tb(error.__traceback__)
    in_recipe = [frame for frame in frames if pathlib.Path(frame.filename).parent == folder]
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    if not in_recipe:  # raised in the call itself; for example, get_config() takes no argument
        return f"{path}: {error}"
    place, line = f"{in_recipe[-1].filename}, line {in_recipe[-1].lineno}", in_recipe[-1].line or ""
    if isinstance(error, UserError):
        return f"{place}: {error}"
    quoted = re.search(r"""["'](\w+)\\?["']""", str(error))
    if isinstance(error, AttributeError | KeyError) and "ml_collections" in frames[-1].filename and quoted:
        name = quoted[1]
        written = re.search(rf"\w+\.([\w.]*\b{name}\b[\w.]*)", line)  # the whole key: config.optim.NAME
        return f"{place}: {line}\n  {name}: {keys.no_such_option(written[1] if written else name)}"
    return f"{place}: {line}\n  {type(error).__name__}: {error}"
