"""config.json and generation_config.json of a model folder."""

import json
from pathlib import Path
from typing import Any

from jaxtune.hf.folder import read_json


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or nothing where there is none. Raises UserError for a damaged one."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def write_config(source: Path, target: Path, dtype: str) -> None:
    """Copy config.json, with the dtype that the weights beside it are written in."""
    config = read_json(source / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    (target / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n", encoding="utf-8")
