"""Saving, restoring and retiring the checkpoints of a run.

A checkpoint is the folder `<folder>/<step>`: arrays written by Orbax, `host.json`, and the manifest, which is written
last and makes it one. Without a manifest it is the remains of a save that did not end, and the next save removes it.
"""

import json
import logging
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from jaxtune.checkpoint import folder as checkpoint_folder
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
    shards; process 0 alone writes `host.json` and the manifest, verifies, removes, and decides which step is restored.
    Nothing is removed before the first save, so a reader does not disturb a run.
    """

    def __init__(self, folder: Path, keep_last: int = 2):
        if keep_last < 1:
            raise UserError(f"ckpt.keep_last is {keep_last}; at least 1 checkpoint must be kept")
        logging.getLogger("absl").addFilter(_not_orbax_noise)
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _not_tensorstore_noise
        self._folder = Path(folder).absolute()
        self._keep_last = keep_last
        self._verified: set[int] = set()  # kept ones that this run saved or restored: what keep_last counts
        self._pending: tuple[int, Future[None]] | None = None
        self._failure: str | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending; their files are not verified here."""
        return checkpoint_folder.steps(self._folder)

    def save(self, step: int, state: PyTree[jax.Array], host: dict[str, Any]) -> None:
        """Saves in the background: returns once the arrays are copied, so `state` may be donated afterwards.

        `host` holds JSON values; process 0's is kept. Waits for the save before it. A step that this run saved or
        restored is not written again. A save that fails is a warning, and the next one tries again: see `wait`. With
        several processes, a failure in one is found by the others after Orbax's time-out, minutes later.
        """
        self.wait()
        arrays, text = structure.leaves_by_name(state), json.dumps(host, indent=1)
        if _from_process_0(step in self._verified):
            return
        try:
            if jax.process_index() == 0:
                checkpoint_folder.remove(self._folder, step)  # damaged, or of a run that was taken back
                checkpoint_folder.remove_unfinished(self._folder)
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
            try:
                done.result()
                self._failure = None
            except Exception as error:
                self._fail(step, error, warn=not final)
            self._pending = None
        if final and self._failure is not None:
            raise UserError(self._failure)

    def restore(
        self, abstract_state: PyTree[jax.ShapeDtypeStruct], step: int | None = None, part: bool = False
    ) -> Restored | None:
        """The newest good checkpoint, or `step`; None if there is no checkpoint.

        Every file is verified. A damaged newest checkpoint is passed over with a warning. The arrays go straight to the
        shardings of `abstract_state`, whatever mesh they were saved from. With `part` a checkpoint may hold more than
        that, which is not read. A save after this removes newer checkpoints.

        Raises:
            UserError: `step` is missing or damaged, all checkpoints are damaged, or a leaf of `abstract_state` is
                missing, unknown, or of another shape or dtype.
        """
        self.wait()
        chosen = self._choose(step)
        if chosen is None:
            return None
        path = self._folder / str(chosen)
        wanted = structure.leaves_by_name(abstract_state)
        saved = ocp.metadata(str(path)).metadata
        not_wanted = dict.fromkeys(saved.keys() - wanted.keys(), ...) if part else {}
        structure.check(path, {name: leaf for name, leaf in saved.items() if name not in not_wanted}, wanted)
        arrays = ocp.load(str(path), wanted | not_wanted)
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
        """The step to read: process 0 decides, and its failure is a failure everywhere."""
        nothing, failed = -1, -2
        choice, failure = nothing, None
        if jax.process_index() == 0:
            try:
                good = checkpoint_folder.newest_good(self._folder, step, only)
                choice = nothing if good is None else good
            except UserError as error:
                choice, failure = failed, error
        choice = _from_process_0(choice)
        if choice == failed:
            raise failure or UserError(f"no checkpoint in {self._folder} can be restored: process 0 says why")
        return None if choice == nothing else choice

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
                checkpoint_folder.remove_unfinished(self._folder)  # a full disk is in the way of more than checkpoints
            raise
        self._verified = set(sorted(self._verified | {step})[-self._keep_last :])
        if primary:
            self._retire()

    def _retire(self) -> None:
        """Removes what the verified checkpoints make superfluous.

        Older unverified ones stay until there are `keep_last` verified ones. Those newer than the oldest verified one
        are damaged, or the future of a run that was taken back to an earlier step.
        """
        for step in set(self.steps()) - self._verified:
            if step > max(self._verified):
                logger.warning("checkpoint %d is removed: the run was taken back to before it", step)
            if step > min(self._verified) or len(self._verified) == self._keep_last:
                checkpoint_folder.remove(self._folder, step)

    def _fail(self, step: int, error: Exception, warn: bool = True) -> None:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        self._failure = f"checkpoint {step} was not saved in {self._folder}: {reason}"
        if warn:
            logger.warning("%s; training goes on, the next save tries again", self._failure)


def _not_tensorstore_noise(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an exception that nobody caught, but for those of writes that end after the save they belong to failed."""
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        sys.__excepthook__(kind, error, trace)


def _not_orbax_noise(record: logging.LogRecord) -> bool:
    """Orbax logs 30 lines a save, and a traceback from each of its threads for an error that it raises as well."""
    return "orbax" not in record.pathname or (record.levelno > logging.INFO and not record.exc_info)


def _from_process_0(value: int) -> int:
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
