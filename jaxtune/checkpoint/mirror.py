"""A copy of a run at a URL, updated in the background, from which the run can continue on another machine.

Its layout is the run folder's: the records that a run needs to continue, and checkpoints/<step>. In both, a step is a
checkpoint if it has a manifest, which is copied last and removed first.
"""

import contextlib
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxtune.checkpoint import folder as checkpoint_folder
from jaxtune.checkpoint import manifest
from jaxtune.checkpoint.manifest import MANIFEST
from jaxtune.checkpoint.storage import RemoteFolder, error_text
from jaxtune.errors import UserError

logger = logging.getLogger("jaxtune")
CHECKPOINTS = "checkpoints"
OWNER = "mirrored_by"  # a file that names the process which last began to copy its run to the URL


class Mirror:
    """The copy of the run in the folder `run`: its checkpoints, and the files named by `records`."""

    def __init__(self, remote: RemoteFolder, run: Path, records: Iterable[str]):
        self.remote = remote
        self.copying: int | None = None
        """The step that is being copied, which must stay in the run's folder until then."""
        self.released: Callable[[], None] = lambda: None
        """Called when that step may be removed."""
        self._run, self._records = run, tuple(records)
        # The random part tells restarted containers from each other: host and process number may be the same.
        self._id = f"process {os.getpid()} on host {socket.gethostname()} ({uuid.uuid4().hex})".encode()
        self._claimed = False
        self._same: dict[int, bytes] = {}  # by step, the manifests that are known to be at the URL
        self._failure: str | None = None
        self._pending: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="mirror")

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint in the copy, ascending."""
        return sorted(step for step, whole in self._remote_steps().items() if whole)

    def update(self) -> None:
        """Make the copy the same as the run, in the background: add missing checkpoints and remove superfluous ones.

        A failure is logged as a warning, and the next call copies whatever is missing.
        """
        if self._pending is not None:
            self._pending.cancel()  # an update that has not begun is superseded by this one
        self._pending = self._background.submit(self._bring_up_to_date)

    def wait(self) -> str | None:
        """Wait for the update in the background; return its failure in words, None if it succeeded."""
        if self._pending is not None:
            self._pending.result()
        return self._failure

    def fetch(self, step: int | None) -> int | None:
        """Copy the newest good checkpoint, or `step`, and the records to the run's folder; return the step.

        None: the copy has no checkpoint. A damaged checkpoint is skipped with a warning.

        Raises:
            UserError: a checkpoint cannot be read, `step` is missing, or all checkpoints are damaged.
        """
        available = self.steps()
        if step is not None and step not in available:
            raise UserError(f"{self.remote.url} has no checkpoint of step {step}, only of {available or 'no step'}")
        for candidate in [step] if step is not None else reversed(available):
            logger.info("fetching checkpoint %d from %s", candidate, self.remote.url)
            try:
                problems = self._fetch(candidate)
                for name in () if problems else self._records:
                    self._fetch_record(name)
            except Exception as error:  # each file system raises types of its own
                raise UserError(
                    f"checkpoint {candidate} cannot be read from {self.remote.url}: {error_text(error)}"
                ) from error
            if not problems:
                return candidate
            logger.warning("checkpoint %d in %s is damaged: %s", candidate, self.remote.url, problems[0])
            # Otherwise the damaged one would be the newest of the run's folder.
            checkpoint_folder.remove(self._checkpoints, candidate)
        if available:
            raise UserError(
                f"all checkpoints in {self.remote.url} are damaged; to start afresh, set --config.ckpt.resume=overwrite"
            )
        return None

    def clear(self) -> None:
        """Remove all checkpoints of the copy. Raises UserError if that fails."""
        try:
            for step in self._remote_steps():
                self._remove(step)
        except Exception as error:
            raise UserError(f"checkpoints in {self.remote.url} cannot be removed: {error_text(error)}") from error

    @property
    def _checkpoints(self) -> Path:
        return self._run / CHECKPOINTS

    def _remote_steps(self) -> Mapping[int, bool]:
        """The steps that have files in the copy, and whether their checkpoint is complete."""
        complete: dict[int, bool] = {}
        for name in self.remote.names():
            if parts := re.fullmatch(rf"{CHECKPOINTS}/(\d+)/(.+)", name, re.ASCII):
                complete[int(parts[1])] = complete.get(int(parts[1]), False) or parts[2] == MANIFEST
        return complete

    def _bring_up_to_date(self) -> None:
        failures = []
        try:
            self._check_owner()
            # The records first, so that the metrics reach at least as far as the checkpoints.
            for name in self._records:
                if (self._run / name).is_file():
                    self.remote.write(name, (self._run / name).read_bytes())
            remote = self._remote_steps()
            # The newest first: another machine would continue from it.
            for step in reversed(checkpoint_folder.steps(self._checkpoints)):
                try:
                    self._copy(step, whole=remote.get(step, False))
                except Exception as error:
                    if (self._checkpoints / str(step) / MANIFEST).exists():  # else a newer one has replaced it
                        failures.append(f"checkpoint {step} was not copied to {self.remote.url}: {error_text(error)}")
            local = checkpoint_folder.steps(self._checkpoints)
            # Old copies are removed only when all new ones have arrived. An empty local folder removes nothing: the
            # copy may then be the only one.
            for step in remote.keys() - local if local and not failures else ():
                if remote[step] and step > local[-1]:
                    logger.warning("removing checkpoint %d from %s: the run is before it", step, self.remote.url)
                self._remove(step)
        except Exception as error:  # file systems raise their own types; a failure here must not end the training
            failures.append(f"{self.remote.url} is not up to date: {error_text(error)}")
        self._failure = "; ".join(failures) or None
        if failures:
            logger.warning("%s; the next save tries again", self._failure)

    def _copy(self, step: int, whole: bool) -> None:
        """Copy a checkpoint unless the remote one is the same. `whole`: whether there is a complete remote one."""
        local, remote = self._checkpoints / str(step), f"{CHECKPOINTS}/{step}"
        self.copying = step
        try:
            content = (local / MANIFEST).read_bytes()
            if whole and step not in self._same:
                self._same[step] = self.remote.read(f"{remote}/{MANIFEST}")
            if whole and self._same[step] == content:
                return
            # Before the remote one is removed, so that damage never replaces a good copy.
            if problems := manifest.verify(local):
                raise ValueError(f"it is damaged: {problems[0]}")
            self._remove(step)
            sizes = {name: entry.size for name, entry in manifest.entries(content).items()}
            for name in sizes:
                self.remote.put(local / name, f"{remote}/{name}")
            arrived = self.remote.sizes(remote)
            for name, size in sizes.items():
                if arrived.get(f"{remote}/{name}") != size:
                    raise ValueError(f"of {name}, {arrived.get(f'{remote}/{name}', 0)} of {size} bytes have arrived")
            self._check_owner()  # otherwise files of two runs might be mixed
            self.remote.write(f"{remote}/{MANIFEST}", content)
            self._same[step] = content
        finally:
            self.copying = None
            self.released()

    def _check_owner(self) -> None:
        """Take over the copy on the first call; later raise ValueError if another run has taken it over since."""
        owner = None
        if self._claimed:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the copy; it is made again
                owner = self.remote.read(OWNER)
        if owner is None:
            self.remote.write(OWNER, self._id)
            self._claimed = True
        elif owner != self._id:
            raise ValueError(f"{owner.decode()} copies a run of this name there now; stop one of the two")

    def _remove(self, step: int) -> None:
        self._same.pop(step, None)
        self.remote.remove(f"{CHECKPOINTS}/{step}/{MANIFEST}")
        self.remote.remove(f"{CHECKPOINTS}/{step}")

    def _fetch(self, step: int) -> list[str]:
        """Copy a checkpoint to the run's folder, its manifest last, and return what is wrong with it."""
        local, remote = self._checkpoints / str(step), f"{CHECKPOINTS}/{step}"
        content = self.remote.read(f"{remote}/{MANIFEST}")
        try:
            names = list(manifest.entries(content))
        except ValueError as error:
            return [f"{MANIFEST}: cannot be read ({error})"]
        shutil.rmtree(local, ignore_errors=True)  # left by an interrupted fetch
        arrived = self.remote.sizes(remote)
        if missing := [name for name in names if f"{remote}/{name}" not in arrived]:
            return [f"{missing[0]}: missing"]
        for name in names:
            self.remote.get(f"{remote}/{name}", local / name)
        (local / MANIFEST).write_bytes(content)
        return manifest.verify(local)

    def _fetch_record(self, name: str) -> None:
        try:
            content = self.remote.read(name)
        except FileNotFoundError:
            return
        (self._run / name).write_bytes(content)
