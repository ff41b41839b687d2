"""List the tokenised documents that runs have left, one line per entry of data.datasets, and remove unused ones.

    python -m jaxtune.cache
    python -m jaxtune.cache --unused_days=30

Removed documents are tokenised again when a run needs them.
"""

import datetime
import fcntl
import os
import shutil
import socket
import sys
import time
from functools import partial
from pathlib import Path

from absl import flags

from jaxtune import command
from jaxtune.data.cache.token_cache import FORMAT, SUMMARY, read_summary
from jaxtune.errors import UserError

KEPT = {"reference": "scores of answers by a reference", "teacher": "most likely tokens of a teacher"}
"""Files of preference.precompute_reference and distill.teacher, by the prefix of their names."""


def entries(folder: Path) -> list[Path]:
    """Return the folders of tokenised documents in a cache, the most recently used last."""
    return sorted((path.parent for path in folder.glob(f"*/{SUMMARY}")), key=last_used)


def last_used(entry: Path) -> float:
    """Return when a run last read or wrote the folder, in seconds since the epoch."""
    return (entry / SUMMARY).stat().st_mtime


def remove(entry: Path) -> None:
    """Rename an entry out of the cache, then delete its files, so that a run never sees it half deleted."""
    gone = entry.with_name(f"{entry.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    entry.rename(gone)
    shutil.rmtree(gone)


def remove_remains(folder: Path, limit: float) -> None:
    """Remove unfinished documents whose lock no process holds, and the locks of removed entries.

    Files that this host was writing are always removed. Finished parts are removed if the last one is older than
    `limit`, in seconds since the epoch.
    """
    for lock in folder.glob("*.lock"):
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the lock is held, or the file system has no locks and the documents may be in use
                continue
            for unfinished in folder.glob(f"{lock.stem}.{socket.gethostname()}.*.tmp"):
                shutil.rmtree(unfinished)
            parts = folder / f"{lock.stem}.parts"
            if parts.exists() and parts.stat().st_mtime <= limit:
                shutil.rmtree(parts)
            if not [*folder.glob(f"{lock.stem}.*.tmp"), *folder.glob(lock.stem), *folder.glob(parts.name)]:
                lock.unlink()


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "folder", "runs/cache", "cache folder: data.cache_dir, or cache in train.output_dir", flag_values=values
    )
    flags.DEFINE_float(
        "unused_days",
        None,
        "remove documents that no run has read for this many days; 0: all",
        flag_values=values,
        lower_bound=0.0,
    )


def _main(values: flags.FlagValues, _: None) -> None:
    folder = Path(values.folder)
    if not folder.is_dir():
        raise UserError(f"--folder={folder}: no such folder")
    limit = None if values.unused_days is None else time.time() - 86_400 * values.unused_days
    for entry in entries(folder):
        size = sum(file.stat().st_size for file in entry.iterdir())
        removed = limit is not None and last_used(entry) <= limit
        day = datetime.date.fromtimestamp(last_used(entry))
        summary = read_summary(entry)
        notes = "; ".join(summary.get("notes", ()))
        if not summary:
            notes = f"damaged: {SUMMARY} cannot be read"
        elif summary.get("format") != FORMAT:
            notes += " (written by another version of jaxtune: this one does not read it)"
        print(f"{'removed' if removed else entry.name[:8]}  {size / 1e6:10,.1f} MB  last used {day}  {notes}")
        if removed:
            remove(entry)
    for kind, what in KEPT.items():
        for scores in folder.glob(f"{kind}-*"):
            made = scores.stat().st_mtime
            removed = limit is not None and made <= limit
            name = "removed" if removed else scores.stem.removeprefix(f"{kind}-")[:8]
            # Count allocated blocks: the file is sparse for documents without scores, such as validation documents.
            day, size = datetime.date.fromtimestamp(made), scores.stat().st_blocks * 512 / 1e6
            unfinished = " (unfinished)" if scores.suffix == ".tmp" else ""
            print(f"{name}  {size:10,.1f} MB  made {day}  {what}{unfinished}")
            if removed:
                scores.unlink()
    if limit is not None:
        remove_remains(folder, limit)


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
