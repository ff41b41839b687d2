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
# Names that file systems give to fields of a file's information that change when the file is rewritten.
_VERSION = {"size", "mtime", "created", "LastModified", "last_modified", "Last-Modified", "generation", "ETag", "etag"}


@dataclass(frozen=True)
class File:
    """A file that can be read.

    Attributes:
        location: the file's path or URL, which may hold a secret.
        named: whether the user named the file itself, not a folder or pattern that matches it.
        version: returns a value that changes whenever the content may have changed; raises OSError if the file is gone.
        raw: opens the file without decompressing it.
    """

    location: str
    named: bool
    version: Callable[[], Any]
    raw: Callable[[], BinaryIO]

    @property
    def name(self) -> str:
        """The path or URL to show to the user, without secrets."""
        return hide_secrets(self.location)

    @property
    def kind(self) -> str:
        """The suffix that names the format, without a suffix of compression: `.jsonl` for `a.jsonl.gz`."""
        return (self._path.with_suffix("") if self.is_compressed else self._path).suffix.lower()

    def open(self) -> BinaryIO:
        """Open the file; the content is decompressed if the suffix names a compression."""
        if not self.is_compressed:
            return self.raw()
        import pyarrow  # unlike other readers it reads several frames as one stream, and fails if a frame is cut off

        codec = pyarrow.Codec.detect(self._path.name.lower()).name
        return io.BufferedReader(pyarrow.input_stream(self.raw(), compression=codec))

    @property
    def is_compressed(self) -> bool:
        """Whether `open` decompresses the file."""
        return self._path.suffix.lower() in _COMPRESSED

    @property
    def _path(self) -> PurePosixPath:
        is_web = self.name.startswith(("http://", "https://"))
        return PurePosixPath(self.name.partition("?")[0] if is_web else self.name)


Found = File | dict[str, File] | list[File] | None
"""A file; the files of a folder by relative path, sorted; the files that match a pattern; None: no match."""


def is_url(path: str) -> bool:
    """Whether it is a URL such as s3://bucket/file, not a path."""
    return "://" in path


def find(path: str, patterns: tuple[str, ...] = ()) -> Found:
    """Find the file, folder or files that a path, a pattern or a URL names. Hidden files and folders are left out.

    Args:
        path: may begin with ~; a * makes it a pattern.
        patterns: patterns of the files in a folder; (): all files.

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
        files = {file for pattern in patterns or ("**/*",) for file in root.glob(pattern) if file.is_file()}
        return _sort_visible({file.relative_to(root).as_posix(): _local(file) for file in files})
    matches = sorted(map(Path, glob.glob(str(root), recursive=True))) if "*" in path else []
    return [_local(file) for file in matches if file.is_file()] or None


def _local(path: Path, named: bool = False) -> File:
    def version() -> Any:
        stat = path.stat()
        return str(path.resolve()), stat.st_size, stat.st_mtime_ns  # of the file behind a link, not of the link

    return File(str(path), named, version, partial(path.open, "rb"))


def _find_remote(url: str, patterns: tuple[str, ...]) -> Found:
    try:
        system, root = fsspec.core.url_to_fs(url)

        def remote(path: str, named: bool = False) -> File:
            def version() -> Any:
                info = system.info(path)
                return hide_secrets(path), {key: str(info[key]) for key in sorted(_VERSION & info.keys())}

            def open_buffered() -> BinaryIO:
                # readline(limit) of an fsspec file ignores the limit.
                return io.BufferedReader(system.open(path, "rb"))

            return File(system.unstrip_protocol(path), named, version, open_buffered)

        def matching(folder: str, patterns: tuple[str, ...]) -> dict[str, File]:
            listings = [system.glob(f"{folder}/{pattern}", detail=True) for pattern in patterns]
            listings = listings or [system.find(folder, detail=True)]
            paths = [path for listing in listings for path, info in listing.items() if info["type"] == "file"]
            return _sort_visible({path.removeprefix(f"{folder}/"): remote(path) for path in paths})

        if "*" in root:  # ? and [ ] do not make a pattern, because a URL may hold them
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


def _sort_visible(files: dict[str, File]) -> dict[str, File]:
    """Return the files sorted by path, without hidden files and those in hidden folders."""
    return {path: files[path] for path in sorted(files) if not any(part.startswith(".") for part in path.split("/"))}
