"""Trust in the code that a config names.

Code that a command line or a recipe names is run. A run's folder may come from somebody else, so commands that read the
folder (--run, --model) do not run code that only its config.json names.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxtune.config.recipe import code_to_evaluate
from jaxtune.config.schema import Config
from jaxtune.errors import UserError, printable
from jaxtune.host.run_folder import RunFolder
from jaxtune.weights.base import Base, read_base


def with_plugins(config: Config, plugins: Sequence[str]) -> Config:
    """Return the config with only these plugins."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, plugins=tuple(plugins)))


def with_tower(config: Config, patches: int) -> Config:
    """Return a config whose model has its vision tower, with a vision.patches_per_row unless it has one.

    Raises:
        UserError: the model was made from random weights without a tower, or what was trained cannot be told from what
            would have been trained with the tower.
    """
    if config.vision.patches_per_row is not None:
        return config
    if config.model.from_scratch:
        reason = "was trained from random weights without vision.patches_per_row, so it has no vision tower"
        raise UserError(f"the prompt has an image, and the model {reason}")
    by_name = config.lora.enabled and config.lora.target_modules != "all-linear"
    if by_name or config.mtp.weight:
        option = f"lora.target_modules={config.lora.target_modules!r}" if by_name else f"mtp.weight={config.mtp.weight}"
        raise UserError(
            f"the prompt has an image, and the run was trained on texts, with {option}: ask its export instead "
            "(jaxtune export, then --model=EXPORT)"
        )
    return dataclasses.replace(config, vision=dataclasses.replace(config.vision, patches_per_row=patches))


def base_of_run(folder: RunFolder, plugins: Sequence[str], patches: int | None = None) -> tuple[Config, Base]:
    """Return the config of a run and its base model, running only the plugins that the command names.

    patches: as in `with_tower`; None: as the run was trained.

    Raises:
        UserError: As `read_base`; the message adds that plugins of the run were not run, if it has any.
    """
    saved = folder.read_config()
    config = with_plugins(saved, plugins)
    config = config if patches is None else with_tower(config, patches)
    try:
        return config, read_base(config)
    except UserError as error:
        if not (left_out := [name for name in saved.train.plugins if name not in plugins]):
            raise
        names, first = printable(", ".join(left_out)), printable(left_out[0])
        text = f"{folder.path} names plugins ({names}), and plugins of a run are not run unless you name them"
        raise UserError(f"{error}; {text}: if one is the model's family, --plugin={first}") from error


def config_to_evaluate(config: Config, run: str, reads_data: bool) -> Config:
    """Return a run's config, with its plugins only if the command line names them.

    Raises:
        UserError: `reads_data`, and the validation data or the rewards need code that only config.json names.
    """
    typed = {said.key for said in config.said if said.by == "command line"}
    trusted_config = with_plugins(config, config.train.plugins if "train.plugins" in typed else ())
    named = {key: value for key, value in code_to_evaluate(config).items() if key not in typed}
    if reads_data and (needed := list(named)):
        where = f"--run={run}: {needed[0]} = {named[needed[0]]!r}"
        trusted = f"if you trust it, --config={Path(run) / 'config.json'} names it"
        raise UserError(f"{where} is code, and code that only a run's folder names is not run; {trusted}")
    return trusted_config
