"""Resuming a run: the checkpoint that it goes on from, and what must not have changed since."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.experimental import multihost_utils

from jaxtune.checkpoint import CheckpointManager, fingerprint, verify_fingerprint
from jaxtune.config import from_json, to_json
from jaxtune.config.loading import as_dict
from jaxtune.config.schema import Config
from jaxtune.data import Counts, Feed, PromptFeed
from jaxtune.errors import UserError
from jaxtune.parallel import multihost
from jaxtune.run.folder import RunFolder
from jaxtune.run.model import Model

log = logging.getLogger("jaxtune")

# Options that may differ when a run goes on: they change where and how, never what is computed.
MAY_CHANGE = (
    "attention", "ckpt", "device", "eval", "export", "log", "memory", "mesh", "parallel", "prof", "data.cache_dir",
    "data.cache_only", "data.num_proc", "data.num_workers", "data.prefetch",
    "train.output_dir", "train.run_name", "train.hang_seconds", "train.max_bad_steps", "train.max_steps",
    "train.epochs", "train.micro_batch_size", "train.grad_accum_steps",
)  # fmt: skip


def saved_run(config: Config, folder: RunFolder, checkpoints: CheckpointManager) -> dict | None:
    """What the checkpoint to go on from says, by ckpt.resume; None to start anew.

    Raises UserError where there is nothing to go on from, a run that is not to go on, or one with other options.
    What ckpt.resume='overwrite' removes is still there afterwards: see `begin`.
    """
    if config.ckpt.resume == "never":
        if checkpoints.steps():
            raise UserError(
                f"{folder.path} holds a run and ckpt.resume is 'never'; choose another --config.train.run_name, "
                "or remove what is there with --config.ckpt.resume=overwrite"
            )
        return None
    if config.ckpt.resume == "overwrite":
        for option, path in (("model.path", config.model.path), ("lora.path", config.lora.path)):
            if path is not None and Path(path).resolve().is_relative_to(folder.path.resolve()):
                raise UserError(
                    f"{option}={path} is in {folder.path}, which ckpt.resume='overwrite' removes; give the new run "
                    "another --config.train.run_name"
                )
        return None
    saved = checkpoints.host(None if config.ckpt.resume == "auto" else int(config.ckpt.resume))
    if saved is not None:
        check_unchanged(saved["config"], config, folder)
    return saved


def begin(config: Config, folder: RunFolder, counts: Counts | None) -> None:
    """Makes the folder that of this run, once nothing of its options, model and data can be refused any more.

    With ckpt.resume='overwrite' the checkpoints and the export that are there are removed.
    """
    if multihost.is_main():
        for path in (folder.checkpoints, folder.export) if config.ckpt.resume == "overwrite" else ():
            if path.exists():
                log.info("removing %s, as ckpt.resume='overwrite' says", path)
                shutil.rmtree(path)
        folder.write_records(config, counts)
    multihost_utils.sync_global_devices("the run has begun")


def record(config: Config, model: Model, feed: Feed | PromptFeed) -> dict[str, Any]:
    """What every checkpoint says of its run, for `check_same` to compare."""
    return {
        "config": json.loads(to_json(config)),
        "base": {} if config.model.from_scratch else fingerprint(model.folder),
        "data": feed.documents.key,
        "rows_per_step": feed.rows_per_step,
        "total_steps": feed.total_steps,
    }


def check_same(saved: dict, now: dict, model: Model, feed: Feed | PromptFeed) -> None:
    """Raise UserError unless data, base model and rows a step are those that the checkpoint was trained with."""
    if saved["rows_per_step"] != now["rows_per_step"]:
        raise UserError(
            f"a step was {saved['rows_per_step']} rows and is {now['rows_per_step']} now; choose "
            "train.micro_batch_size * train.grad_accum_steps * (mesh.data * mesh.fsdp) so that it stays the same"
        )
    if not feed.documents.has_key(saved["data"]):
        raise UserError("the training data or the tokenizer changed since the checkpoint; start a new run")
    if now["base"] or saved["base"]:
        verify_fingerprint(model.folder, saved["base"])
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            "the learning-rate schedule was for %d steps and is for %d now",
            *(saved["total_steps"], now["total_steps"]),
        )


def check_unchanged(saved: dict[str, Any], config: Config, folder: RunFolder) -> None:
    """Raise UserError naming each option that a run may not change when it goes on."""
    then, now = as_dict(from_json(json.dumps(saved))), as_dict(config)  # options newer than the run at their defaults
    changed = [f"  {key}: {before!r} then, {after!r} now" for key, before, after in differences(then, now, "")]
    if changed:
        raise UserError(
            "this run was started with other options, so it cannot go on:\n"
            + "\n".join(changed)
            + "\nset them back, start a new run with --config.train.run_name=NAME (from these weights with "
            f"--config.{'lora' if config.lora.enabled else 'model'}.path={folder.export}), or this one anew with "
            "--config.ckpt.resume=overwrite"
        )


def differences(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """(key, before, after) of each option below a key that a run may not change and that differs."""
    if key in MAY_CHANGE or before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    else:
        yield key, before, after
