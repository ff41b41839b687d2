"""The manifest of a checkpoint folder: size and SHA-256 of every file, written last.

Neither Orbax nor the file system notices a flipped bit in stored arrays. A folder is a checkpoint once it has a
manifest, and a good one while every file agrees with the manifest.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxtune.whole_file import write_whole

MANIFEST = "manifest.json"


class Entry(NamedTuple):
    """A file's size and SHA-256 (in hex) in a manifest."""

    size: int
    sha256: str


def measure(folder: Path, wanted: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
    """Flush files of `folder` to disk and return their entries in its manifest. `wanted` chooses by the file's name."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in names if name != MANIFEST and wanted(name))
    return dict(zip(names, _in_threads(lambda name: _measure(folder / name, sync=True), names)))


def write(folder: Path, measured: Mapping[str, dict[str, Any]] = {}) -> None:
    """Write the manifest of all files in `folder`, after flushing them to disk, except those in `measured`."""
    files = {**measured, **measure(folder, lambda name: name not in measured)}
    for path in (*filter(Path.is_dir, folder.rglob("*")), folder):
        _sync_folder(path)
    # Files and folders are on disk by now, so that a manifest which survives a crash implies complete files.
    write_whole(folder / MANIFEST, [json.dumps({"files": dict(sorted(files.items()))}, indent=1)])
    # A rename is durable once its folder is on disk. The parent has the entry of the checkpoint's own folder.
    for path in (folder, folder.parent):
        _sync_folder(path)


def verify(folder: Path, only: Iterable[str] | None = None, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the disagreements with the manifest, each as "file: reason"; empty for a good checkpoint.

    Files that the manifest does not name are ignored, because nothing reads them.

    Args:
        folder: the checkpoint's folder.
        only: the files to check; None: all.
        share: (i, n): divide the files into n parts of about the same size, and check only part i.
    """
    try:
        recorded = entries((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return [f"{MANIFEST}: missing"]
    except (ValueError, OSError) as error:
        return [f"{MANIFEST}: cannot be read ({error})"]
    if only is not None:
        # A file that is not in the manifest gets an entry that no file can agree with.
        recorded = {name: recorded.get(name, Entry(0, "")) for name in only}
    part, parts = share
    mine = set(sorted(recorded, key=lambda name: (-recorded[name].size, name))[part::parts])
    recorded = {name: entry for name, entry in recorded.items() if name in mine}
    problems = _in_threads(lambda item: _problem(folder / item[0], *item[1]), recorded.items())
    return [f"{name}: {problem}" for name, problem in zip(recorded, problems) if problem]


def entries(content: bytes) -> dict[str, Entry]:
    """Return a manifest's entries by file name.

    Raises:
        ValueError: the manifest is damaged, or names a file that is not inside the checkpoint's folder.
    """
    try:
        recorded = {name: Entry(entry["size"], entry["sha256"]) for name, entry in json.loads(content)["files"].items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if outside := [name for name in recorded if not _is_inside(name)]:
        raise ValueError(f"{outside[0]!r} is not the name of a file in a checkpoint")
    return recorded


def _is_inside(name: str) -> bool:
    """Whether a relative name with / between its parts denotes, on every system, a file inside the folder."""
    parts = name.split("/")
    return name.isprintable() and not {"", ".", ".."} & set(parts) and not any(mark in name for mark in "\\:")


def _problem(path: Path, size: int, sha256: str) -> str | None:
    try:
        # The size first: it finds a truncated file without reading gigabytes.
        actual = path.stat().st_size
        if actual != size:
            return f"has {actual} bytes, the manifest says {size}"
        return None if _measure(path)["sha256"] == sha256 else "content differs from its checksum"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error})"


def _measure(path: Path, sync: bool = False) -> dict[str, Any]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        # The number of bytes that were hashed; stat would give another if the file grew.
        return {"size": file.tell(), "sha256": digest}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_threads(function: Callable, items: Iterable) -> list:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # threads, as hashing releases the GIL
        return list(pool.map(function, items))
