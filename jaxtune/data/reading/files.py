"""Files by path, pattern or URL: on this machine, or wherever fsspec reaches (s3://, gs://, abfs://, https://)."""

import glob
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec

from jaxtune.errors import UserError, hide_secrets, refuse_hidden

_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
# What file systems call the fields that change when a file is written anew.
_VERSION = {"size", "mtime", "created", "LastModified", "last_modified", "Last-Modified", "generation", "ETag", "etag"}


@dataclass(frozen=True)
class File:
    """A file that can be read.

    Attributes:
        location: its path or URL, which may hold a secret.
        named: whether the user named it, as opposed to a folder or pattern that it was found by.
        version: changes whenever the content may have changed; raises OSError if the file has gone.
        raw: opens it.
    """

    location: str
    named: bool
    version: Callable[[], Any]
    raw: Callable[[], BinaryIO]

    @property
    def name(self) -> str:
        """Its path or URL as it is shown."""
        return hide_secrets(self.location)

    @property
    def kind(self) -> str:
        """The suffix that names the format, without that of compression: `.jsonl` for `a.jsonl.gz`."""
        return (self._path.with_suffix("") if self.compressed else self._path).suffix.lower()

    def open(self) -> BinaryIO:
        """The content, decompressed by the suffix."""
        if not self.compressed:
            return self.raw()
        import pyarrow  # unlike others it reads several frames as one stream, and fails where a frame is cut off

        codec = pyarrow.Codec.detect(self._path.name.lower()).name
        return io.BufferedReader(pyarrow.input_stream(self.raw(), compression=codec))

    @property
    def compressed(self) -> bool:
        """Whether `open` decompresses it."""
        return self._path.suffix.lower() in _COMPRESSED

    @property
    def _path(self) -> PurePosixPath:
        is_web = self.name.startswith(("http://", "https://"))
        return PurePosixPath(self.name.partition("?")[0] if is_web else self.name)


Found = File | dict[str, File] | list[File] | None
"""A file; the files of a folder, by relative path and in its order; those that match a pattern; None: nothing."""


def is_url(path: str) -> bool:
    """Whether it is a URL such as s3://bucket/file, as opposed to a path."""
    return "://" in path


def find(path: str, patterns: tuple[str, ...] = ()) -> Found:
    """What a path, a pattern of paths or a URL names. Hidden files of a folder and in its hidden folders do not count.

    Args:
        path: may begin with ~; * in it makes it a pattern.
        patterns: of the files in a folder; (): all.

    Raises:
        UserError: a URL of an unknown kind, or one that cannot be reached.
    """
    refuse_hidden(path, "data")
    try:
        return _find_remote(path, patterns) if is_url(path) else _find_local(path, patterns)
    except ImportError as error:
        raise UserError(f"data: {path}: {error}") from error


def _find_local(path: str, patterns: tuple[str, ...]) -> Found:
    root = Path(path).expanduser()
    if root.is_file():
        return _local(root, named=True)
    if root.is_dir():
        found = {file for pattern in patterns or ("**/*",) for file in root.glob(pattern) if file.is_file()}
        return _in_order({file.relative_to(root).as_posix(): _local(file) for file in found})
    matches = sorted(map(Path, glob.glob(str(root), recursive=True))) if "*" in path else []
    return [_local(file) for file in matches if file.is_file()] or None


def _local(path: Path, named: bool = False) -> File:
    def version() -> Any:
        stat = path.stat()
        return str(path.resolve()), stat.st_size, stat.st_mtime_ns

    return File(str(path), named, version, partial(path.open, "rb"))


def _find_remote(url: str, patterns: tuple[str, ...]) -> Found:
    try:
        system, root = fsspec.core.url_to_fs(url)

        def remote(path: str, named: bool = False) -> File:
            def version() -> Any:
                info = system.info(path)
                return hide_secrets(path), {key: str(info[key]) for key in sorted(_VERSION & info.keys())}

            def opened() -> BinaryIO:
                return io.BufferedReader(system.open(path, "rb"))  # whose lines have a limit, unlike those of fsspec

            return File(system.unstrip_protocol(path), named, version, opened)

        def matching(folder: str, patterns: tuple[str, ...]) -> dict[str, File]:
            found = [system.glob(f"{folder}/{pattern}", detail=True) for pattern in patterns]
            found = found or [system.find(folder, detail=True)]
            paths = [path for one in found for path, info in one.items() if info["type"] == "file"]
            return _in_order({path.removeprefix(f"{folder}/"): remote(path) for path in paths})

        if "*" in root:  # not ? and [ ], which URLs may hold
            folder = root[: root.index("*")].rpartition("/")[0]
            return list(matching(folder, (root.removeprefix(f"{folder}/"),)).values()) or None
        if system.isfile(root):
            return remote(root, named=True)
        if not system.isdir(root):
            return None
        return matching(root.rstrip("/"), patterns)
    except ImportError:
        raise
    except Exception as error:  # each file system raises types of its own
        raise UserError(f"data: {url} cannot be reached: {error or type(error).__name__}") from error


def _in_order(found: dict[str, File]) -> dict[str, File]:
    return {path: found[path] for path in sorted(found) if not any(part.startswith(".") for part in path.split("/"))}
