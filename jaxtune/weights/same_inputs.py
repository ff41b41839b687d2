"""The data and the weights that each process of a run reads from its own host: they must be the same on all hosts."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from jaxtune import hf
from jaxtune.checkpoint.fingerprint import hash_sample
from jaxtune.config.schema import Config
from jaxtune.hf import peft
from jaxtune.parallel import multihost
from jaxtune.weights.model import Model


def check_same_inputs(
    data: Mapping[str, str], eval_data: Mapping[str, str], models: Mapping[str, tuple[Model, Config]]
) -> None:
    """Check that all processes read the same data and weights; every process must call it.

    Otherwise each would cut its rows out of other documents, or read its shards from another model.

    Args:
        data: hashes of the content of data, by the option that names it.
        eval_data: hashes of validation data, by the name of its datasets.
        models: models with the config that declares them, by the option that names them.

    Raises:
        UserError: in every process, if they differ.
    """
    if jax.process_count() == 1:
        return
    keys = {**data, **{f"validation data {name}".rstrip(): key for name, key in eval_data.items()}}
    facts = {option: f"content {key[:12]}" for option, key in keys.items()}
    for option, (model, config) in models.items():
        for name, files in _files(model, config).items():
            facts[f"{option}{name}"] = f"content {_hash(files)[:12]}"  # not the folder: caches of the hub may differ
    multihost.agree(facts, "put the same files on all hosts, or read them from storage that all hosts share")


def _files(model: Model, config: Config) -> dict[str, list[Path]]:
    """Return the files that describe a model and its adapters, and the files of their weights.

    Other files of a folder are left out: what a host has downloaded before may differ.
    """
    weights = [] if config.model.from_scratch else hf.weight_files(model.folder)
    files = {"": [model.folders.config / "config.json", *weights]}
    adapters = {"lora.path": config.lora.path}
    if config.preference.reference != "start":
        adapters["preference.reference"] = config.preference.reference
    for option, name in adapters.items():
        if name is not None and config.lora.enabled:
            folder = hf.resolve(name, holds=peft.CONFIG)
            saved = [folder / peft.CONFIG, folder / peft.WEIGHTS]
            files[f", {option}"] = [file for file in saved if file.is_file()]  # a missing one is refused elsewhere
        elif name is not None:
            folder = hf.resolve(name)
            files[f", {option}"] = [folder / "config.json", *hf.weight_files(folder)]
    return files


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{hash_sample(file)}\0".encode())
    return digest.hexdigest()
