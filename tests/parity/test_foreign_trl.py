"""The table of TRL's options has the names and defaults of TRL and transformers themselves."""

import dataclasses

import pytest

from jaxtune.config import foreign
from jaxtune.config.foreign import ForeignOption

# Options with different defaults in TRL's commands.
OF_A_COMMAND = {"learning_rate", "loss_type", "train_sampling_strategy"}


def fields(*classes: type) -> dict[str, object]:
    found = {}
    for field in (field for one in classes for field in dataclasses.fields(one)):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.setdefault(field.name, made)
    return found


def test_names_and_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

    of_sft = fields(trl.ScriptArguments, trl.ModelConfig, trl.SFTConfig, DatasetMixtureConfig)
    theirs = of_sft | {name: value for name, value in fields(trl.DPOConfig).items() if name not in of_sft}
    table = foreign.table("trl")
    assert theirs.keys() <= table.keys()  # which has older names, and those of other commands and projects, too
    said = {name: row.default for name, row in table.items() if row.default is not ForeignOption().default}
    said = {name: default for name, default in said.items() if name in theirs}
    assert {name: said[name] for name in said.keys() - OF_A_COMMAND} == {
        name: theirs[name] for name in said.keys() - OF_A_COMMAND
    }
    entry = table["datasets"].of
    assert entry.keys() == fields(DatasetConfig).keys()
    assert trl.SFTConfig.learning_rate == 2e-5 and trl.DPOConfig.learning_rate == 1e-6
    assert trl.SFTConfig.loss_type == "nll"
