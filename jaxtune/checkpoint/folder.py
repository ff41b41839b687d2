"""The checkpoints in a folder: list them, find the newest good one, remove them."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxtune.checkpoint import manifest
from jaxtune.errors import UserError

logger = logging.getLogger("jaxtune")


class AllDamaged(UserError):
    """No checkpoint in a folder agrees with its manifest. The caller knows whose they are, and adds the advice."""


def steps(folder: Path) -> list[int]:
    """Return the steps that have a manifest, ascending."""
    return sorted(step for path in _paths_like(folder, r"\d+") if is_checkpoint(folder, step := int(path.name)))


def is_checkpoint(folder: Path, step: int) -> bool:
    """Whether a checkpoint of `step` exists, that is, has a manifest. `remove` deletes the manifest first."""
    return (folder / str(step) / manifest.MANIFEST).is_file()


def unfinished_steps(folder: Path) -> list[int]:
    """Return the steps that have a folder without a manifest, ascending."""
    return sorted({int(path.name) for path in _paths_like(folder, r"\d+")} - set(steps(folder)))


def find_newest_good(
    folder: Path, step: int | None, verify: Callable[[int], list[str]], whole: bool = True
) -> int | None:
    """Return the newest step whose files agree with its manifest, or `step` if given; None if the folder has none.

    Each damaged checkpoint that is skipped is logged as a warning.

    Args:
        folder: the checkpoints' folder.
        step: the step to take; None: the newest good one.
        verify: returns what `manifest.verify` says of a step's folder.
        whole: whether the checkpoint is read whole: then an unfinished one that is skipped is logged too.

    Raises:
        AllDamaged: all steps are damaged.
        UserError: `step` is missing or damaged.
    """
    available = steps(folder)
    if step is not None and step not in available:
        raise UserError(f"{folder} has no checkpoint of step {step}, only of {available or 'no step'}")
    # Leftovers before a finished checkpoint cost nothing. A later one is training that is lost, and the user should
    # know.
    for unfinished in unfinished_steps(folder):
        if whole and step is None and unfinished > max(available, default=-1):
            logger.warning("checkpoint %d in %s has no %s, so it is not used", unfinished, folder, manifest.MANIFEST)
    for candidate in [step] if step is not None else reversed(available):
        problems = verify(candidate)
        if not problems:
            return candidate
        if not is_checkpoint(folder, candidate):  # a run that saves newer ones has just removed it
            return find_newest_good(folder, step, verify, whole)
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        damage = f"checkpoint {candidate} in {folder} is damaged: {problems[0]}{more}"
        if step is not None:
            raise UserError(f"{damage}; without a step, the newest good one is taken")
        logger.warning("%s; trying an older one", damage)
    if available:
        raise AllDamaged(f"all checkpoints in {folder} are damaged")
    return None


def remove(folder: Path, step: int) -> None:
    """Remove the checkpoint of `step`, if it exists."""
    path = folder / str(step)
    (path / manifest.MANIFEST).unlink(missing_ok=True)  # first: half a folder must not look like a checkpoint
    # A reader or a failed save may still hold files here. Without a manifest the folder is no longer a checkpoint, and
    # the next save tries again to remove it.
    shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the folders that interrupted saves and removals left behind. No save may be in progress."""
    finished = {str(step) for step in steps(folder)}
    # Orbax writes into a folder with this ending and renames it when its arrays are complete.
    for path in _paths_like(folder, r"\d+(\.orbax-checkpoint-tmp.*)?"):
        if path.name not in finished:
            shutil.rmtree(path, ignore_errors=True)


def _paths_like(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name, re.ASCII)]
