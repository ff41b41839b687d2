"""Shared helpers of the modules that translate options of other systems.

Each conversion function gets all options of its file, or of a list entry in it and of its file (under FILE).
"""

import json
import re
from collections.abc import Mapping
from typing import Any

Settings = dict[str, Any]
Options = Mapping[str, Any]
FILE = "(file)"
"""The options of a list entry have those of the file under this name."""
NOTE = "(note)"
"""A conversion's text for the user, among its settings; otherwise it is the row's note."""


class Unsupported(Exception):
    """A feature that is not supported yet, named by the text.

    `option` is the one at fault, if it is read only because of another one, which would be blamed for it.
    """

    def __init__(self, text: str, option: str = ""):
        super().__init__(text)
        self.option = option


def names_of(value: Any) -> list[str]:
    """Return a name, a list of names or None as a list."""
    return [value] if isinstance(value, str) else [str(name) for name in value or ()]


def is_file(path: Any) -> bool:
    """Whether a path names a file of samples, which has no splits, not a folder or a dataset on the hub."""
    return isinstance(path, str) and re.search(r"\.(jsonl?|csv|tsv|txt|parquet|arrow)(\.\w+)?$", path) is not None


def message_key_mappings(pairs: Mapping[str, str]) -> Settings:
    """Return the setting for message keys that have other names in the data; `pairs` maps our key to theirs."""
    return {"message_property_mappings": tuple(f"{ours}={theirs}" for ours, theirs in pairs.items() if ours != theirs)}


def model_overrides(entries: Mapping[str, Any]) -> Settings:
    """Return the setting for overridden entries of config.json."""
    texts = [f"{name}={json.dumps(value, default=str)}" for name, value in entries.items()]
    return {"model.overrides": texts} if texts else {}


def images_of(seq_len: int) -> Settings:
    """Images in rows that have room for the patches of as many image tokens as a row has tokens, 4 to a token."""
    return {"vision.patches_per_row": 4 * seq_len}


def word_of(strategy: Any) -> Any:
    """Return a strategy; YAML reads an unquoted `no` as false."""
    return "no" if strategy is False else strategy  # YAML 1.1, which PyYAML reads


def pairs_of(most: int, longer: str) -> Settings:
    """Return the settings for two answers of at most `most` tokens each, which share a row here.

    TRL's limit is for each answer with its prompt. Longer ones are cut by DPOTrainer and KTOTrainer, and left out by
    RewardTrainer (trl 1.16, trainer/dpo_trainer.py, kto_trainer.py, reward_trainer.py).
    """
    settings: Settings = {"data.seq_len": 2 * most, "data.datasets[i].max_tokens": most}
    return settings if longer == "delete" else settings | {"data.datasets[i].longer": longer}


def strategy_of(value: Any) -> str:
    """Return a strategy of transformers ("steps", "epoch", "no"), checked."""
    word = word_of(value)
    if word not in ("steps", "epoch", "no"):
        raise Unsupported("the strategies are steps, epoch and no")
    return word


def saves_of(strategy: Any, steps: int) -> Settings:
    """Return the checkpoint settings for a strategy and its steps."""
    # With `no`, transformers' Trainer saves nothing by itself, not even at the end.
    by = {"steps": {"ckpt.save_steps": steps}, "epoch": {"ckpt.save_epochs": 1.0}, "no": {"ckpt.at_end": False}}
    return {"ckpt.save_steps": 0} | by[strategy_of(strategy)]


def lines_of(strategy: Any, steps: int) -> Settings:
    """Return the progress-line settings for a strategy and its steps."""
    word = word_of(strategy)
    if word not in ("steps", "no"):
        raise Unsupported("progress lines by epoch; use 'steps' or 'no'; metrics.jsonl has every step")
    return {"log.every": steps if word == "steps" else 0}
