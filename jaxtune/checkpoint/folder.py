"""The checkpoints in a folder: list them, find the newest good one, remove them."""

import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxtune.checkpoint import manifest
from jaxtune.errors import UserError

logger = logging.getLogger("jaxtune")


def steps(folder: Path) -> list[int]:
    """Steps that have a manifest, ascending."""
    return sorted(step for path in _numbered(folder, r"\d+") if is_checkpoint(folder, step := int(path.name)))


def is_checkpoint(folder: Path, step: int) -> bool:
    """Whether the checkpoint of `step` is there. `remove` takes away its manifest before any other file."""
    return (folder / str(step) / manifest.MANIFEST).is_file()


def newest_good(folder: Path, step: int | None, only: Iterable[str] | None) -> int | None:
    """The newest step whose files agree with its manifest, or `step` if given; None if there are no steps.

    `only` limits the check to the files that it names. Each damaged or unfinished checkpoint that is passed over is
    logged as a warning.

    Raises:
        UserError: `step` is missing or damaged, or all steps are.
    """
    found = steps(folder)
    if step is not None and step not in found:
        raise UserError(f"{folder} has no checkpoint of step {step}, only of {found or 'no step'}")
    for unfinished in sorted({int(path.name) for path in _numbered(folder, r"\d+")} - set(found)):
        if only is None and step is None and unfinished > max(found, default=-1):
            logger.warning("checkpoint %d in %s has no %s, so it is not used", unfinished, folder, manifest.MANIFEST)
    for candidate in [step] if step is not None else reversed(found):
        problems = manifest.verify(folder / str(candidate), only)
        if not problems:
            return candidate
        if not is_checkpoint(folder, candidate):  # a run that saves newer ones has just removed it
            return newest_good(folder, step, only)
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        damage = f"checkpoint {candidate} in {folder} is damaged: {problems[0]}{more}"
        if step is not None:
            raise UserError(f"{damage}; ckpt.resume='auto' takes the newest good one")
        logger.warning("%s; trying the one before it", damage)
    if found:
        raise UserError(f"all checkpoints in {folder} are damaged; to start afresh, remove them")
    return None


def remove(folder: Path, step: int) -> None:
    """Removes the checkpoint of `step`, if there is one."""
    path = folder / str(step)
    (path / manifest.MANIFEST).unlink(missing_ok=True)  # first: half a folder must not look like a checkpoint
    # A reader or a failed save may still hold files here. Without a manifest the folder is not a checkpoint any more,
    # and the next save tries again to remove it.
    shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what interrupted saves and removals have left behind. No save may be under way."""
    finished = {str(step) for step in steps(folder)}
    for path in _numbered(folder, r"\d+(\.orbax-checkpoint-tmp.*)?"):
        if path.name not in finished:
            shutil.rmtree(path, ignore_errors=True)


def _numbered(folder: Path, pattern: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name, re.ASCII)]
