"""What the modules share that read options of other systems together.

Each of their functions gets all options of its file, or of an entry in it.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

Settings = dict[str, Any]
Options = Mapping[str, Any]


class NotYet(Exception):
    """Something that is not there yet; the message says what."""


def names_of(value: Any) -> list[str]:
    """One name, several or none."""
    return [value] if isinstance(value, str) else [str(name) for name in value or ()]


def renamed(pairs: Mapping[str, str]) -> Settings:
    """Keys of messages that have other names in the data; each is named by ours."""
    return {"message_property_mappings": tuple(f"{ours}={theirs}" for ours, theirs in pairs.items() if ours != theirs)}


def overriding(entries: Mapping[str, Any]) -> Settings:
    """Entries of config.json, as JSON."""
    found = [f"{name}={json.dumps(value, default=str)}" for name, value in entries.items()]
    return {"model.overrides": found} if found else {}


def strategy_of(value: Any) -> str:
    """When something is done, as transformers says it."""
    if value not in ("steps", "epoch", "no"):
        raise NotYet("the strategies are steps, epoch and no")
    return value


def saves_of(strategy: Any, steps: int) -> Settings:
    """When checkpoints are saved, by a strategy and its steps."""
    by = {"steps": {"ckpt.save_steps": steps}, "epoch": {"ckpt.save_epochs": 1.0}, "no": {"ckpt.at_end": False}}
    return {"ckpt.save_steps": 0} | by[strategy_of(strategy)]


def lines_of(strategy: str, steps: int) -> Settings:
    """Lines of progress each so many steps, or none."""
    if strategy not in ("steps", "no"):
        raise NotYet("lines of progress by epochs; 'steps' and 'no' are there, and metrics.jsonl has every step")
    return {"log.every": steps if strategy == "steps" else 0}


def conversions_of(names: Mapping[str, Any], system: str) -> dict[str, Callable[[Options], Settings]]:
    """The functions of a module that are named for a system."""
    return {name: function for name, function in list(names.items()) if name.startswith(f"{system}_")}
