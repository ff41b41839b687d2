"""A copy of a run by URL, brought up to date in the background, with which the run goes on on another machine.

It is laid out as the run's folder: the records that a run needs to go on, and checkpoints/<step>. As there, a step is a
checkpoint once it has its manifest, which is copied last and removed first.
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
from jaxtune.checkpoint.storage import RemoteFolder, reason
from jaxtune.errors import UserError

logger = logging.getLogger("jaxtune")
CHECKPOINTS = "checkpoints"
OWNER = "mirrored_by"  # a file with the process that last began to copy its run there


class Mirror:
    """The copy of the run in the folder `run`, whose files `records` go with the checkpoints."""

    def __init__(self, remote: RemoteFolder, run: Path, records: Iterable[str]):
        self.remote = remote
        self.copying: int | None = None
        """The step that is being copied, which must stay in the run's folder meanwhile."""
        self.released: Callable[[], None] = lambda: None
        """Called once it need not stay any longer."""
        self._run, self._records = run, tuple(records)
        self._own = f"process {os.getpid()} on host {socket.gethostname()} ({uuid.uuid4().hex})".encode()
        self._claimed = False
        self._same: dict[int, bytes] = {}  # manifests there that are known
        self._failure: str | None = None
        self._pending: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="mirror")

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint there, ascending."""
        return sorted(step for step, whole in self._found().items() if whole)

    def update(self) -> None:
        """Makes the copy the same as the run, in the background: its checkpoints, no more and no fewer.

        A failure is logged as a warning; whatever is not there yet, the next call copies.
        """
        if self._pending is not None:
            self._pending.cancel()  # if it has not begun, this one does what it would have done
        self._pending = self._background.submit(self._bring_up_to_date)

    def wait(self) -> str | None:
        """Waits for the background; says what is not there and why, None if all is."""
        if self._pending is not None:
            self._pending.result()
        return self._failure

    def fetch(self, step: int | None) -> int | None:
        """Brings the newest good checkpoint, or `step`, to the run's folder, with the records; returns its step.

        None: there is none. A damaged one is passed over with a warning.

        Raises:
            UserError: it cannot be read, there is no checkpoint of `step`, or all are damaged.
        """
        found = self.steps()
        if step is not None and step not in found:
            raise UserError(f"{self.remote.url} has no checkpoint of step {step}, only of {found or 'no step'}")
        for candidate in [step] if step is not None else reversed(found):
            logger.info("fetching checkpoint %d from %s", candidate, self.remote.url)
            try:
                problems = self._fetch(candidate)
                for name in () if problems else self._records:
                    self._fetch_record(name)
            except Exception as error:  # each file system raises types of its own
                raise UserError(
                    f"checkpoint {candidate} cannot be read from {self.remote.url}: {reason(error)}"
                ) from error
            if not problems:
                return candidate
            logger.warning("checkpoint %d in %s is damaged: %s", candidate, self.remote.url, problems[0])
            checkpoint_folder.remove(self._checkpoints, candidate)
        if found:
            raise UserError(f"all checkpoints in {self.remote.url} are damaged; to start afresh, remove them")
        return None

    def clear(self) -> None:
        """Removes all checkpoints there. Raises UserError where that fails."""
        try:
            for step in self._found():
                self._remove(step)
        except Exception as error:
            raise UserError(f"checkpoints in {self.remote.url} cannot be removed: {reason(error)}") from error

    @property
    def _checkpoints(self) -> Path:
        return self._run / CHECKPOINTS

    def _found(self) -> Mapping[int, bool]:
        """The steps of which something is there, and whether it is whole."""
        found: dict[int, bool] = {}
        for name in self.remote.names():
            if parts := re.fullmatch(rf"{CHECKPOINTS}/(\d+)/(.+)", name, re.ASCII):
                found[int(parts[1])] = found.get(int(parts[1]), False) or parts[2] == MANIFEST
        return found

    def _bring_up_to_date(self) -> None:
        failures = []
        try:
            self._check_owner()
            # Before the checkpoints, so that metrics reach as far as they do.
            for name in self._records:
                if (self._run / name).is_file():
                    self.remote.write(name, (self._run / name).read_bytes())
            found = self._found()
            for step in reversed(checkpoint_folder.steps(self._checkpoints)):
                try:
                    self._copy(step, whole=found.get(step, False))
                except Exception as error:
                    if (self._checkpoints / str(step) / MANIFEST).exists():  # else a newer one has taken its place
                        failures.append(f"checkpoint {step} was not copied to {self.remote.url}: {reason(error)}")
            here = checkpoint_folder.steps(self._checkpoints)
            for step in found.keys() - here if here and not failures else ():
                if found[step] and step > here[-1]:
                    logger.warning("checkpoint %d is removed from %s: the run is before it", step, self.remote.url)
                self._remove(step)
        except Exception as error:  # each file system raises types of its own; training goes on whatever happens here
            failures.append(f"{self.remote.url} is not up to date: {reason(error)}")
        self._failure = "; ".join(failures) or None
        if failures:
            logger.warning("%s; the next save tries again", self._failure)

    def _copy(self, step: int, whole: bool) -> None:
        """Copies a checkpoint, unless that is what is there: `whole` says whether something is."""
        here, there = self._checkpoints / str(step), f"{CHECKPOINTS}/{step}"
        self.copying = step
        try:
            content = (here / MANIFEST).read_bytes()
            if whole and step not in self._same:
                self._same[step] = self.remote.read(f"{there}/{MANIFEST}")
            if whole and self._same[step] == content:
                return
            if problems := manifest.verify(here):
                raise ValueError(f"it is damaged: {problems[0]}")
            self._remove(step)
            sizes = {name: entry.size for name, entry in manifest.entries(content).items()}
            for name in sizes:
                self.remote.put(here / name, f"{there}/{name}")
            arrived = self.remote.sizes(there)
            for name, size in sizes.items():
                if arrived.get(f"{there}/{name}") != size:
                    raise ValueError(f"of {name}, {arrived.get(f'{there}/{name}', 0)} of {size} bytes have arrived")
            self._check_owner()  # else files of two runs may be mixed
            self.remote.write(f"{there}/{MANIFEST}", content)
            self._same[step] = content
        finally:
            self.copying = None
            self.released()

    def _check_owner(self) -> None:
        """Takes the copy over at first. Raises ValueError if another run has taken it over since."""
        owner = None
        if self._claimed:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the copy, which is made again
                owner = self.remote.read(OWNER)
        if owner is None:
            self.remote.write(OWNER, self._own)
            self._claimed = True
        elif owner != self._own:
            raise ValueError(f"{owner.decode()} copies a run of this name there now; stop one of the two")

    def _remove(self, step: int) -> None:
        self._same.pop(step, None)
        self.remote.remove(f"{CHECKPOINTS}/{step}/{MANIFEST}")
        self.remote.remove(f"{CHECKPOINTS}/{step}")

    def _fetch(self, step: int) -> list[str]:
        """Copies a checkpoint here, its manifest last; what is wrong with it then."""
        here, there = self._checkpoints / str(step), f"{CHECKPOINTS}/{step}"
        content = self.remote.read(f"{there}/{MANIFEST}")
        try:
            names = list(manifest.entries(content))
        except ValueError as error:
            return [f"{MANIFEST}: cannot be read ({error})"]
        shutil.rmtree(here, ignore_errors=True)  # a fetch that was interrupted
        arrived = self.remote.sizes(there)
        if missing := [name for name in names if f"{there}/{name}" not in arrived]:
            return [f"{missing[0]}: missing"]
        for name in names:
            self.remote.get(f"{there}/{name}", here / name)
        (here / MANIFEST).write_bytes(content)
        return manifest.verify(here)

    def _fetch_record(self, name: str) -> None:
        try:
            content = self.remote.read(name)
        except FileNotFoundError:
            return
        (self._run / name).write_bytes(content)
