"""Write text files so that a crash leaves the old content or the new one."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write the parts of a text to a file under another name, flush it to disk, and rename it, which is atomic."""
    unfinished = path.with_name(f"{path.name}.partial")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
