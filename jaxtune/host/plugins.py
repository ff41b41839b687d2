"""Plugins: Python files of the user's own that take part in a run (`train.plugins`, --plugin=FILE.py).

A plugin is used by the names in it. Callbacks, each of which may be left out:

    on_step(run, step, metrics)       after each step, once its metrics are known, which is while the next one runs
    on_evaluate(run, step, metrics)   after each evaluation
    on_save(run, step, folder)        once a checkpoint is asked for, which is written while training goes on
    on_epoch(run, step, epoch)        after the step that ends a pass over the data
    on_end(run, step)                 once the run is finished, before its model is exported

What takes the place of something here; one plugin of a run alone may have it:

    objective(config) -> jaxtune.objectives.objective.Objective
    optimizer_rule(config) -> jaxtune.optim.rules.Rule
    MODEL_TYPE, read_spec, NAMES, IGNORABLE: a family, as the files of jaxtune.models.families are

A form of data of one's own is a function too, named where the data is: data.datasets[i].function.
"""

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from jaxtune.config.schema import Config
from jaxtune.data.reading import user_files
from jaxtune.errors import UserError
from jaxtune.models.families import FAMILIES
from jaxtune.objectives.objective import Objective
from jaxtune.optim.rules import Rule
from jaxtune.parallel import multihost

T = TypeVar("T")
OPTION = "train.plugins"
CALLBACKS = {
    "on_step": ("run", "step", "metrics"),
    "on_evaluate": ("run", "step", "metrics"),
    "on_save": ("run", "step", "folder"),
    "on_epoch": ("run", "step", "epoch"),
    "on_end": ("run", "step"),
}
REPLACEMENTS = {"objective": ("config",), "optimizer_rule": ("config",)}
FAMILY = ("read_spec", "NAMES", "IGNORABLE")


@dataclass
class PluginRun:
    """What callbacks of one plugin are given of the run, always the same object.

    Attributes:
        config: The options of the run.
        folder: Of the run.
        state: JSON of the plugin's own, which checkpoints hold.
        is_main: Whether this process is the one that writes the run's files; with several, all call the callbacks.
    """

    config: Config
    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    is_main: bool = field(default_factory=multihost.is_main)
    ending: str = ""

    def end(self, reason: str) -> None:
        """Finishes the run after its next step, as if it was the last: it is evaluated, saved and exported."""
        self.ending = self.ending or reason


@dataclass(frozen=True)
class Plugin:
    """A plugin file that has been run."""

    name: str  # as train.plugins has it
    module: ModuleType

    @property
    def file(self) -> Path:
        """Where it is."""
        return Path(self.name).expanduser()

    def call(self, function: str, *arguments: Any) -> Any:
        """What a function of the plugin returns. Raises UserError, with the line in its file, if it fails."""
        try:
            return getattr(self.module, function)(*arguments)
        except UserError:
            raise
        except Exception as error:  # the file is the user's program: it can fail in any way
            at = user_files.raised_at(error, self.file)
            raise UserError(f"{OPTION}: {at}: {function} fails: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run's plugins; `runs` are what each of them is given."""

    plugins: Sequence[Plugin] = ()
    runs: Sequence[PluginRun] = ()

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a callback of all plugins that have it, in the order of train.plugins."""
        for plugin, run in zip(self.plugins, self.runs, strict=True):
            if hasattr(plugin.module, name):
                plugin.call(name, run, *arguments)

    @property
    def ending(self) -> str:
        """Why a plugin wants the run to end; "" if none does."""
        return next((run.ending for run in self.runs if run.ending), "")

    def states(self) -> dict[str, Any]:
        """What each plugin keeps, by its name. Raises UserError where that is not JSON."""
        found = {}
        for plugin, run in zip(self.plugins, self.runs, strict=True):
            try:
                found[plugin.name] = json.loads(json.dumps(run.state))
            except (TypeError, ValueError) as error:
                text = f"run.state must be JSON, so that a checkpoint can hold it: {error}"
                raise UserError(f"{OPTION}: {plugin.file}: {text}") from error
        return found


def load(config: Config) -> tuple[Plugin, ...]:
    """The plugins of a config, in their order. A file is run once, and again once it has changed.

    A family among them is one of jaxtune.models.families from then on.

    Raises:
        UserError: A file is not there, fails, has nothing that is used, or a function that cannot be called as above;
            two have what only one may have.
    """
    found = tuple(_load(name, content) for name, content in contents(config).items())
    FAMILIES.update(
        {plugin.module.MODEL_TYPE: plugin.module for plugin in found if hasattr(plugin.module, "MODEL_TYPE")}
    )
    for name in REPLACEMENTS:
        having = [plugin.name for plugin in found if hasattr(plugin.module, name)]
        if len(having) > 1:
            raise UserError(f"{OPTION}: {' and '.join(having)} have {name}, of which a run has one")
    return found


def callbacks(config: Config, folder: Path, states: Mapping[str, Any]) -> Callbacks:
    """The callbacks of a run in `folder`; `states` is what a checkpoint holds of them."""
    plugins = load(config)
    return Callbacks(plugins, [PluginRun(config, folder, dict(states.get(plugin.name, {}))) for plugin in plugins])


def own_objective(config: Config) -> Objective | None:
    """The objective of a plugin, if one has it. Raises UserError where it returns something else."""
    return _made(config, "objective", Objective)


def own_rule(config: Config) -> Rule | None:
    """The optimizer's rule of a plugin, if one has it. Raises UserError where it returns something else."""
    return _made(config, "optimizer_rule", Rule)


def _made(config: Config, name: str, kind: type[T]) -> T | None:
    for plugin in load(config):
        if hasattr(plugin.module, name):
            made = plugin.call(name, config)
            if not isinstance(made, kind):
                raise UserError(f"{OPTION}: {plugin.file}: {name} must return a {kind.__name__}, not {made!r}")
            return made
    return None


def contents(config: Config) -> dict[str, str]:
    """A hash of each plugin's file. Raises UserError where one is not there."""
    return {name: user_files.fingerprint(f"{name}:plugin", OPTION) for name in config.train.plugins}


@functools.cache
def _load(name: str, content: str) -> Plugin:
    """`content` is its hash, so that a file that has changed is run again."""
    plugin = Plugin(name, user_files.module_of(f"{name}:plugin", OPTION))
    known = {**CALLBACKS, **REPLACEMENTS}
    used = [function for function in known if hasattr(plugin.module, function)]
    if misnamed := [f for f in vars(plugin.module) if f.startswith("on_") and f not in CALLBACKS]:
        raise UserError(f"{OPTION}: {plugin.file}: {misnamed[0]} is no callback; these are: {', '.join(CALLBACKS)}")
    for function in used:
        _check_callable(plugin, function, known[function])
    if hasattr(plugin.module, "MODEL_TYPE"):
        if missing := [part for part in FAMILY if not hasattr(plugin.module, part)]:
            raise UserError(f"{OPTION}: {plugin.file}: a family (MODEL_TYPE) has {missing[0]} too")
    elif not used:
        raise UserError(
            f"{OPTION}: {plugin.file} has nothing that is used: {', '.join(known)} or a family (MODEL_TYPE)"
        )
    return plugin


def _check_callable(plugin: Plugin, function: str, arguments: Sequence[str]) -> None:
    try:
        inspect.signature(getattr(plugin.module, function)).bind(*arguments)
    except TypeError as error:
        text = f"{function} must be a function of ({', '.join(arguments)}): {error}"
        raise UserError(f"{OPTION}: {plugin.file}: {text}") from error
