"""Folders at a URL that fsspec supports: s3://, gs:// and others."""

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

# The extra of pyproject.toml that installs the package for a kind of URL.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PROBE = ".jaxtune-can-write"
_TAKE_OVER_SECONDS = 600  # a writer renews its mark before each file; after this time without renewal it counts as dead


@dataclass(frozen=True)
class RemoteFolder:
    """A folder at a URL. Its methods raise the exceptions of its file system, which have types of their own.

    File names are relative to the folder, with / between their parts.

    Attributes:
        url: the URL without secrets, for messages.
        system: the fsspec file system.
        root: the folder's path in the file system.
    """

    url: str
    system: Any
    root: str

    def names(self) -> list[str]:
        """Return the names of all files, including those in subfolders; empty if the folder does not exist."""
        return list(self.sizes())

    def sizes(self, within: str = "") -> dict[str, int]:
        """Return the files, or those in the subfolder `within`, with their sizes in bytes."""
        self.system.invalidate_cache()  # another process may have written files
        try:
            files = self.system.find(self._at(within) if within else self.root, detail=True)
        except FileNotFoundError:
            return {}
        start = f"{self.root}/"
        return {path.removeprefix(start): info["size"] for path, info in files.items() if path.startswith(start)}

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return self.system.cat_file(self._at(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which replaces an older one atomically: it is written under another name and moved."""
        path = self._at(name)
        self._make_folder(path)
        self.system.pipe_file(f"{path}.partial", content)
        self.system.mv(f"{path}.partial", path)

    def put(self, file: Path, name: str) -> None:
        """Copy a local file into the folder; after a failure a part of it may exist."""
        path = self._at(name)
        self._make_folder(path)
        self.system.put_file(str(file), path)

    def get(self, name: str, file: Path) -> None:
        """Copy a file of the folder to a local file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.system.get_file(self._at(name), str(file))

    def remove(self, name: str) -> None:
        """Remove a file, or a subfolder with its content; do nothing if it does not exist."""
        try:
            self.system.rm(self._at(name), recursive=True)
        except FileNotFoundError:
            return

    def inside(self, name: str) -> "RemoteFolder":
        """Return a subfolder."""
        return RemoteFolder(f"{self.url}/{name}", self.system, self._at(name))

    def _at(self, name: str) -> str:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name!r} is not a name in {self.url}")
        return f"{self.root}/{name}"

    def _make_folder(self, path: str) -> None:
        # Object stores, whose file systems are asynchronous, have no folders; s3fs would create a bucket for a mistyped
        # name.
        if not isinstance(self.system, AsyncFileSystem):
            self.system.makedirs(path.rpartition("/")[0], exist_ok=True)


def open_folder(url: str, said: str) -> RemoteFolder:
    """Return a folder, which need not exist yet, after checking that it can be written to.

    `said`: the option that names the folder, for messages.

    Raises UserError if the folder cannot be written to: an unknown kind of URL, a missing package, no permission, no
    network.
    """
    refuse_hidden(url, said)
    try:
        system, root = fsspec.core.url_to_fs(url)
        folder = RemoteFolder(hide_secrets(url.rstrip("/")), system, root.rstrip("/"))
        # A write is the only proof: credentials that can list and read may still lack permission to write.
        folder.write(_PROBE, b"")
        folder.remove(_PROBE)
    except ImportError as error:
        extra = _EXTRAS.get(url.partition("://")[0])
        install = f"; pip install 'jaxtune[{extra}]'" if extra else ""
        raise UserError(f"{said}={url}: {error}{install}") from error
    except Exception as error:  # each file system raises types of its own
        raise UserError(f"{said}={url}: nothing can be written there: {error_text(error)}") from error
    return folder


def upload(folder: Path, remote: RemoteFolder, last: str, mark: str) -> None:
    """Make a remote folder the same as a local one.

    Args:
        folder: the local folder.
        remote: the remote folder.
        last: the file that marks the folder as complete. It is removed first and copied last.
        mark: a file in the remote folder that names the writing process; it exists only during the upload.

    Raises UserError if the upload fails, or if another process writes to the remote folder. If two processes begin in
    the same moment, one of them stops before its next file.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    writer = {"process": os.getpid(), "host": socket.gethostname(), "id": uuid.uuid4().hex}

    def renew() -> None:
        if (holder := _holder(remote, mark)).get("id") != writer["id"]:
            raise _in_use(remote, holder)
        remote.write(mark, json.dumps(writer | {"time": time.time()}).encode())

    try:
        check_unused(remote, mark)
        remote.write(mark, json.dumps(writer | {"time": time.time()}).encode())
        try:
            # If two processes began in the same moment, the mark names the later writer, and the other one stops here.
            renew()
            for name in (last, *(remote.names() - files.keys() - {mark})):
                remote.remove(name)
            # False comes before True, so `last` is copied last.
            for name in sorted(files, key=lambda name: name == last):
                renew()
                remote.put(files[name], name)
            renew()
            remote.remove(mark)
        finally:
            # The upload failed, or the mark would be gone. An empty mark says that no process writes any more.
            if _holder(remote, mark).get("id") == writer["id"]:
                remote.write(mark, b"")
    except UserError:
        raise
    except Exception as error:  # each file system raises types of its own
        raise UserError(f"{remote.url}: the copy is incomplete: {error_text(error)}") from error


def check_unused(remote: RemoteFolder, mark: str) -> None:
    """Raise UserError if a living process writes to a folder with `upload`."""
    holder = _holder(remote, mark)
    # A process of this host can be looked up, so a dead one is replaced without the wait.
    same_host = holder.get("host") == socket.gethostname()
    if time.time() - holder.get("time", 0) < _TAKE_OVER_SECONDS and not (same_host and not _runs(holder["process"])):
        raise _in_use(remote, holder)


def _holder(remote: RemoteFolder, mark: str) -> dict[str, Any]:
    """The process that writes to a folder; empty if no process does, or if the last upload failed."""
    try:
        return dict(json.loads(remote.read(mark) or b"{}"))
    except (FileNotFoundError, ValueError, TypeError):  # the last two if the file holds something else
        return {}


def _in_use(remote: RemoteFolder, holder: Mapping[str, Any]) -> UserError:
    who = f"process {holder['process']} on host {holder['host']}" if holder else "another process"
    return UserError(f"{remote.url} is in use: {who} is writing to it. Wait for it, stop it, or use another folder")


def _runs(process: int) -> bool:
    """Whether a process of this host is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def error_text(error: Exception) -> str:
    """Return an error's message in one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
