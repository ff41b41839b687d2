"""Folders by URL, wherever fsspec reaches: s3://, gs:// and others."""

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from jaxtune.errors import UserError, hide_secrets, refuse_hidden

# The extra of pyproject.toml that brings the package for a kind of URL.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PROBE = ".jaxtune-can-write"
_TAKE_OVER_SECONDS = 600  # after its last sign of life, which it gives before each file, a writer has ended


@dataclass(frozen=True)
class RemoteFolder:
    """A folder by its URL, shown without secrets. Its methods raise what its file system raises, which has own types.

    Names are relative to it, with / between their parts. What is written has its name once it is whole.
    """

    url: str
    system: Any
    root: str

    def names(self) -> list[str]:
        """The files in it and in its folders; none where it is not there."""
        return list(self.sizes())

    def sizes(self, within: str = "") -> dict[str, int]:
        """The same, of a folder in it, with their sizes in bytes."""
        self.system.invalidate_cache()  # what another process has written since
        try:
            found = self.system.find(self._at(within) if within else self.root, detail=True)
        except FileNotFoundError:
            return {}
        start = f"{self.root}/"
        return {path.removeprefix(start): info["size"] for path, info in found.items() if path.startswith(start)}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self.system.cat_file(self._at(name))

    def write(self, name: str, content: bytes) -> None:
        """A small file, which replaces an older one at once."""
        path = self._at(name)
        self._make_folder(path)
        self.system.pipe_file(f"{path}.partial", content)
        self.system.mv(f"{path}.partial", path)

    def put(self, file: Path, name: str) -> None:
        """A copy of a file, which may be there in part after a failure."""
        path = self._at(name)
        self._make_folder(path)
        self.system.put_file(str(file), path)

    def get(self, name: str, file: Path) -> None:
        """A copy here."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.system.get_file(self._at(name), str(file))

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it; it may be gone already."""
        try:
            self.system.rm(self._at(name), recursive=True)
        except FileNotFoundError:
            return

    def inside(self, name: str) -> "RemoteFolder":
        """A folder in it."""
        return RemoteFolder(f"{self.url}/{name}", self.system, self._at(name))

    def _at(self, name: str) -> str:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name!r} is not a name in {self.url}")
        return f"{self.root}/{name}"

    def _make_folder(self, path: str) -> None:
        # Stores of objects, whose file systems are asynchronous, have no folders; s3fs would make a bucket of a name
        # that is mistyped.
        if not isinstance(self.system, AsyncFileSystem):
            self.system.makedirs(path.rpartition("/")[0], exist_ok=True)


def open_folder(url: str, said: str) -> RemoteFolder:
    """A folder that can be written to, which may be still to be made.

    said: the option that names it. Raises UserError where it cannot be: an unknown kind of URL, a package that is
    missing, no permission, no network.
    """
    refuse_hidden(url, said)
    try:
        system, root = fsspec.core.url_to_fs(url)
        folder = RemoteFolder(hide_secrets(url.rstrip("/")), system, root.rstrip("/"))
        folder.write(_PROBE, b"")
        folder.remove(_PROBE)
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        install = f"; pip install 'jaxtune[{extra}]'" if extra else ""
        raise UserError(f"{said}={url}: {error}{install}") from error
    except Exception as error:  # each file system raises types of its own
        raise UserError(f"{said}={url}: nothing can be written there: {reason(error)}") from error
    return folder


def upload(folder: Path, remote: RemoteFolder, last: str, mark: str) -> None:
    """Make a remote folder the same as a local one. The file `last`, which says that it is whole, goes first there and
    comes last; until then there is a file `mark`, which says who writes. Raises UserError if that fails, or if another
    process writes there: of two that begin in the same moment, one stops before its next file.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    own = {"process": os.getpid(), "host": socket.gethostname(), "id": uuid.uuid4().hex}

    def renew() -> None:
        if (holder := _holder(remote, mark)).get("id") != own["id"]:
            raise _in_use(remote, holder)
        remote.write(mark, json.dumps(own | {"time": time.time()}).encode())

    try:
        check_unused(remote, mark)
        remote.write(mark, json.dumps(own | {"time": time.time()}).encode())
        try:
            renew()
            for name in (last, *(remote.names() - files.keys() - {mark})):
                remote.remove(name)
            for name in sorted(files, key=lambda name: name == last):
                renew()
                remote.put(files[name], name)
            renew()
            remote.remove(mark)
        finally:
            if _holder(remote, mark).get("id") == own["id"]:  # it failed; the mark stays, and nobody writes
                remote.write(mark, b"")
    except UserError:
        raise
    except Exception as error:  # each file system raises types of its own
        raise UserError(f"{remote.url}: the copy is not whole: {reason(error)}") from error


def check_unused(remote: RemoteFolder, mark: str) -> None:
    """Raises UserError if a living process writes to a folder with `upload`."""
    holder = _holder(remote, mark)
    here = holder.get("host") == socket.gethostname()
    if time.time() - holder.get("time", 0) < _TAKE_OVER_SECONDS and not (here and not _runs(holder["process"])):
        raise _in_use(remote, holder)


def _holder(remote: RemoteFolder, mark: str) -> dict[str, Any]:
    """Who writes to a folder; empty if nobody does, or did until it failed."""
    try:
        return dict(json.loads(remote.read(mark) or b"{}"))
    except (FileNotFoundError, ValueError, TypeError):  # the latter if it holds something else
        return {}


def _in_use(remote: RemoteFolder, holder: Mapping[str, Any]) -> UserError:
    who = f"process {holder['process']} on host {holder['host']}" if holder else "another process"
    return UserError(f"{remote.url} is in use: {who} writes there. Wait for it, stop it, or name another folder")


def _runs(process: int) -> bool:
    """Whether a process of this host is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


def reason(error: Exception) -> str:
    """What an error says, in a line."""
    return " ".join(str(error).split()) or type(error).__name__
