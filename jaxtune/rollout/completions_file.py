"""The file of completions in a run's folder, for people to read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtune.config.schema import Config
from jaxtune.host.run_folder import RunFolder
from jaxtune.json_file import as_text
from jaxtune.monitor.metrics import cut
from jaxtune.parallel import multihost


class CompletionsFile:
    """A file of completions, one line each, from the first step of this process."""

    def __init__(self, path: Path):
        self._path, self._begun = path, False

    def write(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append completions of a step, one in a line; values that JSON has no type for become text, bytes null."""
        if not self._begun:  # a resumed run repeats some steps
            cut(self._path, step - 1)
            self._begun = True
        with self._path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps({"step": step} | dict(line), ensure_ascii=False, default=as_text) + "\n")


def completions_file(config: Config, run: Path) -> CompletionsFile | None:
    """Return the file of a run's folder; None without log.jsonl, and in all processes but the first."""
    return CompletionsFile(RunFolder(run).completions) if config.log.jsonl and multihost.is_main() else None
