"""Plugins: Python files of the user that take part in a run (`train.plugins`, --plugin=FILE.py).

The names that a plugin defines decide what it does. Callbacks, all optional:

    on_step(run, step, metrics)       after each step, when its metrics are known (the next step runs meanwhile)
    on_evaluate(run, step, metrics)   after each evaluation
    on_save(run, step, folder)        when a checkpoint is started; it is written while training continues
    on_epoch(run, step, epoch)        after the step that ends a pass over the data
    on_end(run, step)                 when the run is finished, before its model is exported

Replacements for parts of jaxtune; at most one plugin of a run may define each:

    objective(config) -> jaxtune.objectives.objective.Objective
    optimizer_rule(config) -> jaxtune.optim.rules.Rule
    MODEL_TYPE, read_spec, NAMES, IGNORABLE: a family, as the files of jaxtune.models.families are

A custom data format is a function too, but it is named with its data: data.datasets[i].function.
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
    """The run as the callbacks of one plugin see it; they always get the same object.

    Attributes:
        config: The options of the run.
        folder: The run folder.
        state: The plugin's own JSON, saved in checkpoints.
        is_main: Whether this process writes the run's files. Callbacks are called in all processes.
        ending: Why the plugin wants the run to end; "" if it does not.
    """

    config: Config
    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    is_main: bool = field(default_factory=multihost.is_main)
    ending: str = ""

    def end(self, reason: str) -> None:
        """Finish the run after its next step, as if that was the last one: it is evaluated, saved and exported."""
        self.ending = self.ending or reason


@dataclass(frozen=True)
class Plugin:
    """A plugin file that was executed."""

    name: str  # as train.plugins has it
    module: ModuleType

    @property
    def file(self) -> Path:
        """The path of the plugin."""
        return Path(self.name).expanduser()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the plugin. Raises UserError, with the line in its file, if the function fails."""
        try:
            return getattr(self.module, function)(*arguments)
        except UserError:
            raise
        except Exception as error:  # the file is the user's program: it can fail in any way
            at = user_files.raised_at(error, self.file)
            raise UserError(f"{OPTION}: {at}: {function} fails: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run's plugins.

    Attributes:
        plugins: in the order of train.plugins.
        runs: the object that each plugin's callbacks get.
    """

    plugins: Sequence[Plugin] = ()
    runs: Sequence[PluginRun] = ()

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a callback in all plugins that have it, in the order of train.plugins."""
        for plugin, run in zip(self.plugins, self.runs, strict=True):
            if hasattr(plugin.module, name):
                plugin.call(name, run, *arguments)

    @property
    def ending(self) -> str:
        """Why a plugin wants the run to end; "" if none does."""
        return next((run.ending for run in self.runs if run.ending), "")

    def states(self) -> dict[str, Any]:
        """The state of each plugin, by the plugin's name. Raises UserError if a state is not JSON."""
        states = {}
        for plugin, run in zip(self.plugins, self.runs, strict=True):
            try:
                states[plugin.name] = json.loads(json.dumps(run.state))
            except (TypeError, ValueError) as error:
                text = f"run.state must be JSON, so that a checkpoint can hold it: {error}"
                raise UserError(f"{OPTION}: {plugin.file}: {text}") from error
        return states


def load(config: Config) -> tuple[Plugin, ...]:
    """The plugins of a config, in order. A file is executed once, and again after it has changed.

    A model family among them is registered in jaxtune.models.families.

    Raises:
        UserError: A file is missing or fails; it defines nothing that is used, or a function that cannot be called as
            above; two plugins define the same replacement.
    """
    plugins = tuple(_load(name, content) for name, content in content_hashes(config).items())
    FAMILIES.update(
        {plugin.module.MODEL_TYPE: plugin.module for plugin in plugins if hasattr(plugin.module, "MODEL_TYPE")}
    )
    for name in REPLACEMENTS:
        names = [plugin.name for plugin in plugins if hasattr(plugin.module, name)]
        if len(names) > 1:
            raise UserError(f"{OPTION}: {' and '.join(names)} define {name}; only one of them may")
    return plugins


def callbacks(config: Config, folder: Path, states: Mapping[str, Any]) -> Callbacks:
    """The callbacks of a run in `folder`; states: of the plugins, from a checkpoint."""
    plugins = load(config)
    return Callbacks(plugins, [PluginRun(config, folder, dict(states.get(plugin.name, {}))) for plugin in plugins])


def plugin_objective(config: Config) -> Objective | None:
    """The objective of a plugin, if one defines it. Raises UserError if the plugin returns another type."""
    return _call_factory(config, "objective", Objective)


def plugin_rule(config: Config) -> Rule | None:
    """The optimizer rule of a plugin, if one defines it. Raises UserError if the plugin returns another type."""
    return _call_factory(config, "optimizer_rule", Rule)


def _call_factory(config: Config, name: str, kind: type[T]) -> T | None:
    for plugin in load(config):
        if hasattr(plugin.module, name):
            made = plugin.call(name, config)
            if not isinstance(made, kind):
                raise UserError(f"{OPTION}: {plugin.file}: {name} must return a {kind.__name__}, not {made!r}")
            return made
    return None


def content_hashes(config: Config) -> dict[str, str]:
    """A hash of each plugin's file. Raises UserError if a file is missing."""
    return {name: user_files.fingerprint(f"{name}:plugin", OPTION) for name in config.train.plugins}


@functools.cache
def _load(name: str, content: str) -> Plugin:
    """Execute a plugin file. `content`, its hash, is part of the cache key: a changed file is executed again."""
    plugin = Plugin(name, user_files.module_of(f"{name}:plugin", OPTION))
    known = {**CALLBACKS, **REPLACEMENTS}
    used = [function for function in known if hasattr(plugin.module, function)]
    if misnamed := [f for f in vars(plugin.module) if f.startswith("on_") and f not in CALLBACKS]:
        raise UserError(
            f"{OPTION}: {plugin.file}: {misnamed[0]} is not a callback; the callbacks are: {', '.join(CALLBACKS)}"
        )
    for function in used:
        _check_callable(plugin, function, known[function])
    if hasattr(plugin.module, "MODEL_TYPE"):
        if missing := [part for part in FAMILY if not hasattr(plugin.module, part)]:
            raise UserError(f"{OPTION}: {plugin.file}: a family (MODEL_TYPE) must define {missing[0]} too")
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
