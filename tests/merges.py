"""Models and adapters to merge: the variants of one model."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny import write_model_folder

UNTIED = {"tie_word_embeddings": False}


def write_variants(home: Path, count: int = 2, **sizes) -> tuple[Path, list[Path]]:
    """Write a base and models that differ from it by random numbers; return their folders."""
    base = write_model_folder(home / "base", **sizes)
    return base, [write_variant(base, home / f"model-{seed}", seed) for seed in range(1, count + 1)]


def write_variant(base: Path, folder: Path, seed: int) -> Path:
    """Write a model that differs from another one by random numbers."""
    shutil.copytree(base, folder)
    rng = np.random.default_rng(seed)

    def changed(value: np.ndarray) -> np.ndarray:
        return (value + 0.02 * rng.standard_normal(value.shape)).astype(value.dtype)

    save(folder, {name: changed(value) for name, value in load(base).items()})
    return folder


def load(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder with one file."""
    return load_file(folder / "model.safetensors")


def save(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Replace the tensors of a folder."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def set_config(folder: Path, **entries) -> None:
    """Change entries of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
