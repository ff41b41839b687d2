"""Code that a config names: whose it is decides whether it is run.

What a command line or a recipe names is run. A run's folder may be somebody else's: what only its config.json names is
not run by commands that read the folder (--run, --model).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtune.config.recipe import code_to_evaluate
from jaxtune.config.schema import Config
from jaxtune.errors import UserError, printable
from jaxtune.host.run_folder import RunFolder
from jaxtune.weights.model import Base, read_base


def with_plugins(config: Config, plugins: Sequence[str]) -> Config:
    """The config with these plugins only."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, plugins=tuple(plugins)))


def base_of_run(folder: RunFolder, plugins: Sequence[str]) -> tuple[Config, Base]:
    """The config of a run and the model that it starts from.

    Of plugins, those that the command names are run, no others.

    Raises:
        UserError: as `read_base`; it says so if a plugin of the run may be what is missing.
    """
    saved = folder.read_config()
    config = with_plugins(saved, plugins)
    try:
        return config, read_base(config)
    except UserError as error:
        if not (left_out := [name for name in saved.train.plugins if name not in plugins]):
            raise
        names, first = printable(", ".join(left_out)), printable(left_out[0])
        text = f"{folder.path} names plugins ({names}), and plugins of a run are not run unless you name them"
        raise UserError(f"{error}; {text}: if one is the model's family, --plugin={first}") from error


def config_to_evaluate(config: Config, run: str, reads_data: bool) -> Config:
    """The config of a run's config.json without its plugins, except for those that the command line names.

    Raises:
        UserError: the validation data or the rewards need code, and `reads_data`.
    """
    typed = {said.key for said in config.said if said.by == "command line"}
    found = with_plugins(config, config.train.plugins if "train.plugins" in typed else ())
    named = {key: value for key, value in code_to_evaluate(config).items() if key not in typed}
    if reads_data and (needed := list(named)):
        where = f"--run={run}: {needed[0]} = {named[needed[0]]!r}"
        trusted = f"if you trust it, --config={Path(run) / 'config.json'} names it"
        raise UserError(f"{where} is code, and code that only a run's folder names is not run; {trusted}")
    return found
