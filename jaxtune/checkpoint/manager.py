"""Save, restore and remove the checkpoints of a run.

A checkpoint is the folder `<folder>/<step>`: arrays written by Orbax, `host.json`, and the manifest, which is written
last. A folder without a manifest is left over from an interrupted save, and the next save removes it.
"""

import contextlib
import itertools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxtune.checkpoint import folder as checkpoint_folder
from jaxtune.checkpoint import manifest, regroup, structure
from jaxtune.checkpoint.mirror import Mirror
from jaxtune.checkpoint.regroup import Grouping
from jaxtune.errors import UserError
from jaxtune.parallel import multihost

if TYPE_CHECKING:
    from orbax.checkpoint import v1 as ocp

logger = logging.getLogger("jaxtune")

HOST_FILE = "host.json"
FORMAT = 2  # format of HOST_FILE; format 1 had only the content of "host", without a format number
# How long process 0 waits for others that hash their files: in an hour a slow one reads a terabyte.
HASH_SECONDS = 3600
SEEN_SECONDS = 60  # NFS may show a new folder to other hosts this much later
_NUMBERS = itertools.count()  # numbers each time that processes hash files together; equal in all processes


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A restored checkpoint.

    Attributes:
        step: its step.
        state: the arrays, in the shardings of the state that was restored into.
        host: the JSON values saved with it.
    """

    step: int
    state: PyTree[jax.Array]
    host: dict[str, Any]


class CheckpointManager:
    """The checkpoints in `folder`; the newest `keep_last` verified ones are kept.

    Several processes must call the same methods in the same order on one shared folder. Each writes and
    hashes its own shards, and verifies a share of the files. Only process 0 writes `host.json` and the manifest,
    removes, and decides which step to restore. Nothing is removed before the first save, so that a process that only
    reads does not disturb a run. `mirror`, which only process 0 has, is updated after each save. `note`, which may
    raise OSError, is called in process 0 with the step of each checkpoint that is complete.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        mirror: Mirror | None = None,
        note: Callable[[int], None] = lambda step: None,
    ):
        if keep_last < 1:
            raise UserError(f"ckpt.keep_last is {keep_last}; at least 1 checkpoint must be kept")
        logging.getLogger("absl").addFilter(_not_orbax_noise)
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _not_tensorstore_noise
        self._folder = Path(folder).absolute()
        self._keep_last = keep_last
        self._verified: set[int] = set()  # kept steps that this run saved or restored; keep_last limits their number
        self._best: int | None = None  # kept in addition to them
        self._pending: tuple[int, Future[None]] | None = None
        self._failure: str | None = None
        # One thread is enough: `save` waits for the save before it.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._note = note
        self._mirror = mirror
        if mirror is not None:
            mirror.released = self._retire  # a checkpoint is not removed while the mirror copies it

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending; their files are not verified here."""
        return checkpoint_folder.steps(self._folder)

    def save(
        self,
        step: int,
        state: PyTree[jax.Array],
        host: dict[str, Any],
        grouping: Grouping | None = None,
        best: int | None = None,
    ) -> None:
        """Save in the background: return when the arrays are copied, so that `state` may be donated afterwards.

        Waits for the previous save. A step that this run saved or restored is not written again. A failed save is
        logged as a warning, and the next one tries again: see `wait`. If one of several processes
        fails to write, the others notice only by Orbax's time-out, minutes later.

        Args:
            step: the step to save.
            state: the arrays.
            host: JSON values; process 0's are stored.
            grouping: the layers that are stacked in the leaves of each parameter; without it, a leaf is restored only
                under the same path.
            best: a step whose checkpoint is kept in addition to the newest ones.
        """
        self.wait()
        self._best = best
        from orbax.checkpoint import v1 as ocp  # takes long to import: loaded when a checkpoint is written or read

        arrays = structure.leaves_by_name(state)
        # Serialised before the return, so that no later change of `host` reaches the file.
        text = json.dumps({"format": FORMAT, "host": host, "grouping": dict(grouping or {})}, indent=1)
        # All processes must take the same branch: one that returned here would leave the others waiting in Orbax.
        if _from_process_0(step in self._verified):
            return
        number = next(_NUMBERS)  # not in the background, as the order could differ there between processes
        try:
            if jax.process_index() == 0:
                checkpoint_folder.remove(self._folder, step)  # damaged, or from before the run went back to a step
                checkpoint_folder.remove_unfinished(self._folder)
            response = ocp.save_async(str(self._folder / str(step)), arrays)
        except Exception as error:  # any storage error: one failed checkpoint must not end the training
            self._fail(step, error)
        else:
            self._pending = step, self._background.submit(self._commit, step, response, text, number)

    def wait(self, final: bool = False) -> None:
        """Wait for the save in progress, if any; a failure is logged as a warning.

        Raises:
            UserError: the last save failed and `final` is set.
        """
        if self._pending is not None:
            step, done = self._pending
            try:
                done.result()
                # This checkpoint has a newer state, so an earlier failure no longer matters.
                self._failure = None
            except Exception as error:
                self._fail(step, error, warn=not final)
            self._pending = None
        if final and self._failure is not None:
            raise UserError(self._failure)

    def finish(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Complete the save in progress when a run ends with an error: at the exit of Python it would be lost.

        For `ExitStack.push`. A failure of the save is logged as a warning.
        """
        if self._pending is None or error is None or not multihost.can_wait(error):
            return
        try:
            self.wait(final=True)
        except UserError as failure:
            logger.warning(failure)

    def restore(
        self,
        abstract_state: PyTree[jax.ShapeDtypeStruct],
        step: int | None = None,
        part: bool = False,
        grouping: Grouping | None = None,
    ) -> RestoredCheckpoint | None:
        """Restore the newest good checkpoint, or `step`; return None if the folder has no checkpoint.

        Every file is verified. A damaged newest checkpoint is skipped with a warning. If a run removes the checkpoint
        while a single process reads it, another one is chosen. The next save removes checkpoints newer than the
        restored one.

        Args:
            abstract_state: shapes, dtypes and shardings. The arrays are read directly into these shardings, whatever
                mesh they were saved from.
            step: the step to restore; None: the newest good one.
            part: whether the checkpoint may hold more leaves than `abstract_state`; these are not read.
            grouping: the grouping of `abstract_state`, with which layers are found in whatever stacks they were saved.

        Raises:
            UserError: `step` is missing or damaged, all checkpoints are damaged, a newer jaxtune saved this one in
                another format, or a leaf of `abstract_state` is missing, unknown, or of another shape or dtype.
        """
        self.wait()
        while (chosen := self._choose(step)) is not None:
            try:
                state, host = self._read(chosen, abstract_state, part, grouping or {})
            except Exception:  # storage raises different errors when files vanish
                if not self._is_removed(chosen):
                    raise
            else:
                # Storage may return zeros for files that have been removed.
                if not self._is_removed(chosen):
                    self._verified = {chosen}
                    return RestoredCheckpoint(chosen, state, host)
            logger.warning("checkpoint %d was removed while it was read, by a run that saves newer ones", chosen)
        return None

    def _is_removed(self, step: int) -> bool:
        """Whether another process has removed a checkpoint. A run of several processes has the folder to itself."""
        return jax.process_count() == 1 and not checkpoint_folder.is_checkpoint(self._folder, step)

    def _read(
        self, chosen: int, abstract_state: PyTree[jax.ShapeDtypeStruct], part: bool, grouping: Grouping
    ) -> tuple[PyTree[jax.Array], dict[str, Any]]:
        """Return state and host of a checkpoint; arguments and errors are those in `restore`."""
        from orbax.checkpoint import v1 as ocp  # takes long to import: loaded when a checkpoint is written or read

        path = self._folder / str(chosen)
        host, saved_grouping = self._read_host(chosen)
        # Layers can be matched only if both sides name theirs. Otherwise a leaf is compared whole, under its path.
        if not (grouping and saved_grouping):
            grouping = saved_grouping = {}
        wanted, saved = structure.leaves_by_name(abstract_state), ocp.metadata(str(path)).metadata
        wanted_pieces, saved_pieces = regroup.pieces(wanted, grouping), regroup.pieces(saved, saved_grouping)
        structure.check(
            path,
            {name: piece for name, piece in saved_pieces.items() if name in wanted_pieces or not part},
            wanted_pieces,
        )

        def read(leaves: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
            arrays = ocp.load(str(path), dict.fromkeys(saved, ...) | leaves)  # Orbax skips leaves that are ...
            return {name: arrays[name] for name in leaves}

        arrays = regroup.load(read, saved, wanted, saved_pieces, wanted_pieces)
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted]), host

    def host(self, step: int | None = None) -> dict[str, Any] | None:
        """Return `host` of the newest checkpoint, or of `step`; its arrays are neither read nor verified.

        None if the folder has no checkpoint. Raises UserError like `restore`.
        """
        self.wait()
        chosen = self._choose(step, only=(HOST_FILE,))
        return None if chosen is None else self._read_host(chosen)[0]

    def _choose(self, step: int | None, only: Iterable[str] | None = None) -> int | None:
        """Choose the step to read. All processes verify, and process 0 decides; if it fails, all processes raise."""
        # The decision and its failure travel in one broadcast integer, so no process waits for one that has raised.
        nothing, failed = -1, -2
        choice, failure = nothing, None

        def verify(candidate: int) -> list[str]:
            try:
                return self._verify(_from_process_0(candidate), only)
            except RuntimeError as error:  # another process failed, or gave no result
                return [str(error)]

        if jax.process_index() == 0:
            try:
                good = checkpoint_folder.find_newest_good(self._folder, step, verify, whole=only is None)
                choice = nothing if good is None else good
            except UserError as error:
                choice, failure = failed, error
            _from_process_0(nothing)  # the others need not verify another one
        else:
            while (candidate := _from_process_0(nothing)) != nothing:
                self._verify(candidate, only)
        choice = _from_process_0(choice)
        if choice == failed:
            raise failure or UserError(f"no checkpoint in {self._folder} can be restored: see the log of process 0")
        return None if choice == nothing else choice

    def _verify(self, step: int, only: Iterable[str] | None) -> list[str]:
        """Verify this process's share of a checkpoint; process 0 returns what all processes found."""
        share = jax.process_index(), jax.process_count()
        found = multihost.on_each(
            f"checkpoint {next(_NUMBERS)}", lambda: manifest.verify(self._folder / str(step), only, share), HASH_SECONDS
        )
        return sorted({problem for problems in found for problem in problems})

    def _read_host(self, step: int) -> tuple[dict[str, Any], Grouping]:
        """Read the saved `host` and `grouping`. Raises UserError for a checkpoint of a newer jaxtune."""
        path = self._folder / str(step)
        saved = json.loads((path / HOST_FILE).read_text(encoding="utf-8"))
        if "format" not in saved:
            return saved, {}
        if saved["format"] > FORMAT:
            raise UserError(
                f"{path} is in format {saved['format']} of a newer jaxtune; this version reads up to {FORMAT}; "
                "update jaxtune"
            )
        return saved["host"], {name: (local, tuple(layers)) for name, (local, layers) in saved["grouping"].items()}

    def _commit(self, step: int, response: "ocp.AsyncResponse[None]", host: str, number: int) -> None:
        """Wait until all processes have written, then make the folder a checkpoint. Runs in the background.

        `number` is of this use of `multihost.on_each`.
        """
        primary = jax.process_index() == 0
        path = self._folder / str(step)

        def measure() -> dict[str, dict[str, Any]]:
            """Return the manifest's entries of the files that this process wrote."""
            response.result()
            if primary:
                (path / HOST_FILE).write_text(host, encoding="utf-8")
            # Process 0 has just given the folder its name. It hashes what a process does not see in time.
            deadline = time.monotonic() + SEEN_SECONDS
            while not path.is_dir() and time.monotonic() < deadline:
                time.sleep(1)
            return manifest.measure(path, lambda name: _writer(name) == jax.process_index())

        try:
            parts = multihost.on_each(f"checkpoint {number}", measure, HASH_SECONDS)
            if primary:
                manifest.write(path, {name: entry for part in parts for name, entry in part.items()})
        except BaseException:
            if primary:
                checkpoint_folder.remove_unfinished(self._folder)  # frees the space, in case the disk is full
            raise
        # A new checkpoint counts as verified: its checksums were taken from the files on disk a moment ago.
        self._verified = set(sorted(self._verified | {step})[-self._keep_last :])
        if primary:
            with contextlib.suppress(OSError):  # the checkpoint is complete all the same
                self._note(step)
            self._retire()
        if self._mirror is not None:
            self._mirror.update()

    def _retire(self) -> None:
        """Remove the checkpoints that the verified ones make superfluous.

        Older unverified checkpoints stay until there are `keep_last` verified ones. Unverified ones newer than the
        oldest verified one are damaged, or were saved before the run went back to an earlier step. A checkpoint that is
        being copied to the mirror stays until the copy ends.
        """
        copying = None if self._mirror is None else self._mirror.copying
        for step in set(self.steps()) - self._verified - {self._best, copying} if self._verified else ():
            if step > max(self._verified):
                logger.warning("removing checkpoint %d: the run resumed from an earlier step", step)
            if step > min(self._verified) or len(self._verified) == self._keep_last:
                checkpoint_folder.remove(self._folder, step)

    def _fail(self, step: int, error: Exception, warn: bool = True) -> None:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        self._failure = f"checkpoint {step} was not saved in {self._folder}: {reason}"
        if warn:
            logger.warning("%s; training continues, and the next save tries again", self._failure)


def _not_tensorstore_noise(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An excepthook that ignores tensorstore writes which end after their save has already failed."""
    if not (kind is RuntimeError and str(error) == "Event loop is closed"):
        sys.__excepthook__(kind, error, trace)


def _not_orbax_noise(record: logging.LogRecord) -> bool:
    """A log filter for Orbax: it logs 30 lines a save, and a traceback in each thread for an error it also raises."""
    return "orbax" not in record.pathname or (record.levelno > logging.INFO and not record.exc_info)


def _writer(name: str) -> int:
    """Return the process that wrote a file of a checkpoint: Orbax gives each a folder for its shards."""
    folder = re.search(r"(?:^|/)ocdbt\.process_(\d+)/", name)
    return int(folder[1]) if folder else 0


def _from_process_0(value: int) -> int:
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
