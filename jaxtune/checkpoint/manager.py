"""Saving, restoring and retiring the checkpoints of a run.

A checkpoint is the folder `<folder>/<step>`: arrays written by Orbax, `host.json`, and the manifest, which is written
last and makes it one. Without a manifest it is the remains of a save that did not end, and the next save removes it.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from jaxtune.checkpoint import manifest, structure
from jaxtune.errors import UserError

logger = logging.getLogger("jaxtune")

HOST_FILE = "host.json"


@dataclass(frozen=True)
class Restored:
    """A checkpoint as it was saved."""

    step: int
    state: PyTree[jax.Array]
    host: dict[str, Any]


class CheckpointManager:
    """The checkpoints in `folder`, of which the newest `keep_last` verified ones are kept.

    With several processes all of them call the same methods in the same order on one shared folder. Each writes its own
    shards; process 0 alone writes `host.json` and the manifest, verifies, deletes, and decides which step is restored.
    Nothing is deleted before the first save, so a reader does not disturb a run.
    """

    def __init__(self, folder: Path, keep_last: int = 2):
        if keep_last < 1:
            raise UserError(f"ckpt.keep_last is {keep_last}; at least 1 checkpoint must be kept")
        logging.getLogger("absl").addFilter(_not_orbax_noise)
        self._folder = Path(folder).absolute()
        self._keep_last = keep_last
        self._verified: set[int] = set()  # saved or verified by this run: what keep_last counts
        self._pending: tuple[int, Future[None]] | None = None
        self._failure: str | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """Steps with a manifest, ascending."""
        if not self._folder.is_dir():
            return []
        numbered = (path for path in self._folder.iterdir() if path.name.isdecimal())
        return sorted(int(path.name) for path in numbered if (path / manifest.MANIFEST).is_file())

    def save(self, step: int, state: PyTree[jax.Array], host: dict[str, Any]) -> None:
        """Saves in the background: returns once the arrays are copied, so `state` may be donated afterwards.

        `host` holds JSON values; process 0's is kept. Waits for the save before it. A step that this run saved or
        restored is not written again. A save that fails is a warning, and the next one tries again: see `wait`.
        """
        self.wait()
        arrays, text = structure.leaves_by_name(state), json.dumps(host, indent=1)
        if _from_process_0(step in self._verified):
            return
        try:
            if jax.process_index() == 0:
                self._delete(step)  # damaged, or of a run that went back further than this
                self._remove_unfinished()
            response = ocp.save_async(str(self._folder / str(step)), arrays)
        except Exception as error:  # whatever the storage raises: training is worth more than one checkpoint
            self._fail(step, error)
        else:
            self._pending = step, self._background.submit(self._commit, step, response, text)

    def wait(self, final: bool = False) -> None:
        """Waits for the save under way, if any; a failed one is a warning.

        Raises:
            UserError: `final`, and the last save failed.
        """
        if self._pending is not None:
            step, done = self._pending
            self._pending = None
            try:
                done.result()
                self._failure = None
            except Exception as error:
                self._fail(step, error, warn=not final)
        if final and self._failure is not None:
            raise UserError(self._failure)

    def restore(self, abstract_state: PyTree[jax.ShapeDtypeStruct], step: int | None = None) -> Restored | None:
        """The newest good checkpoint, or `step`; None if there is no checkpoint.

        Every file is verified. A damaged newest checkpoint is skipped with a warning. The arrays go straight to the
        shardings of `abstract_state`, whatever mesh they were saved from.

        Raises:
            UserError: `step` is missing or damaged, all checkpoints are damaged, or a parameter of `abstract_state`
                is missing, unknown, or of another shape or dtype.
        """
        self.wait()
        chosen = self._choose(step)
        if chosen is None:
            return None
        path = self._folder / str(chosen)
        wanted = structure.leaves_by_name(abstract_state)
        structure.check(path, ocp.metadata(str(path)).metadata, wanted)
        arrays = ocp.load(str(path), wanted)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])
        self._verified = {chosen}
        return Restored(chosen, state, self._read_host(chosen))

    def host(self, step: int | None = None) -> dict[str, Any] | None:
        """`host` of the newest checkpoint, or of `step`, without its arrays, which are neither read nor verified.

        None if there is no checkpoint. Raises UserError as `restore` does.
        """
        self.wait()
        chosen = self._choose(step, only=(HOST_FILE,))
        return None if chosen is None else self._read_host(chosen)

    def _choose(self, step: int | None, only: Iterable[str] | None = None) -> int | None:
        """The step to read, the same on all processes."""
        nothing, failed = -1, -2
        failure = None
        chosen = nothing
        if jax.process_index() == 0:
            try:
                good = self._newest_good(step, only)
                chosen = nothing if good is None else good
            except UserError as error:
                failure, chosen = error, failed
        chosen = _from_process_0(chosen)
        if chosen == failed:
            raise failure or UserError("no checkpoint can be restored: process 0 says why")
        return None if chosen == nothing else chosen

    def _newest_good(self, step: int | None, only: Iterable[str] | None) -> int | None:
        steps = self.steps()
        if step is not None and step not in steps:
            raise UserError(f"{self._folder} has no checkpoint of step {step}, only of {steps or 'no step'}")
        for candidate in [step] if step is not None else reversed(steps):
            problems = manifest.verify(self._folder / str(candidate), only)
            if not problems:
                return candidate
            more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
            damage = f"checkpoint {candidate} in {self._folder} is damaged: {problems[0]}{more}"
            if step is not None:
                raise UserError(f"{damage}; ckpt.resume='auto' takes the newest good one")
            logger.warning("%s; trying the one before it", damage)
        if steps:
            raise UserError(f"all checkpoints in {self._folder} are damaged; to start afresh, remove them")
        return None

    def _read_host(self, step: int) -> dict[str, Any]:
        return json.loads((self._folder / str(step) / HOST_FILE).read_text(encoding="utf-8"))

    def _commit(self, step: int, response: ocp.AsyncResponse[None], host: str) -> None:
        """Waits until all processes have written, then makes the folder a checkpoint. Runs in the background."""
        primary = jax.process_index() == 0
        try:
            response.result()
            if primary:
                path = self._folder / str(step)
                (path / HOST_FILE).write_text(host, encoding="utf-8")
                manifest.write(path)
        except BaseException:
            if primary:
                self._remove_unfinished()  # a full disk is in the way of more than checkpoints
            raise
        self._verified.add(step)
        if primary:
            self._retire()

    def _retire(self) -> None:
        """Deletes what the newest `keep_last` verified checkpoints make superfluous.

        Until there are that many, older unverified ones stay. Unverified ones that are newer than the step restored
        are damaged, or the future of a run that was taken back to an earlier step.
        """
        kept = sorted(self._verified)[-self._keep_last :]
        for step in self.steps():
            if step not in kept and (step > kept[0] or len(kept) == self._keep_last):
                self._delete(step)

    def _delete(self, step: int) -> None:
        path = self._folder / str(step)
        (path / manifest.MANIFEST).unlink(missing_ok=True)  # first: half a folder is not a checkpoint
        if path.exists():
            shutil.rmtree(path)

    def _remove_unfinished(self) -> None:
        finished = {str(step) for step in self.steps()}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name not in finished and re.fullmatch(r"\d+(\.orbax-checkpoint-tmp.*)?", path.name):
                shutil.rmtree(path, ignore_errors=True)  # a failed save may still be writing; the next one tries again

    def _fail(self, step: int, error: Exception, warn: bool = True) -> None:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        self._failure = f"checkpoint {step} was not saved in {self._folder}: {reason}"
        if warn:
            logger.warning("%s; training goes on, the next save tries again", self._failure)


def _not_orbax_noise(record: logging.LogRecord) -> bool:
    """Orbax logs 30 lines a save, and a traceback from each of its threads for an error that it raises as well."""
    return "orbax" not in record.pathname or (record.levelno > logging.INFO and not record.exc_info)


def _from_process_0(value: int) -> int:
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
