"""The code blocks of the documentation, which say in a comment above them what they are.

<!-- run -->                a bash or Python block that is run, in the page's own folder, in order
<!-- not run: REASON -->    a bash or Python block that is not
<!-- file: NAME -->         the content of a file that is there from here on
<!-- output -->             what the block before it prints, in which ... stands for anything
<!-- text -->               anything else
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)(?:<!-- (?P<kind>run|not run|file|output|text)(?:: (?P<about>.+?))? -->\n[ ]*)?"
    r"```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: the number of its first line.
        kind: run, not run, file, output or text; None: no comment says it.
        about: the reason or the name of the file; "" for other kinds.
        language: the language that the fence names.
        code: the content.
    """

    line: int
    kind: str | None
    about: str
    language: str
    code: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        code = "".join(each.removeprefix(found["indent"]) for each in found["code"].splitlines(keepends=True))
        yield Block(line, found["kind"], found["about"] or "", found["language"], code)


def run_blocks(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Write the page's files into `folder`, run its blocks there, and compare what they print with the page."""
    printed = ""
    for block in blocks(page.read_text("utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.kind == "file":
            (folder / block.about).write_text(block.code)
        elif block.kind == "run":
            shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
            command = [*shells[block.language], block.code]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{where}\n{block.code}\n{printed}"
        elif block.kind == "output":
            missing = missing_part(block.code, printed)
            assert missing is None, f"{where}: not printed: {missing}\n{printed}"


def missing_part(expected: str, printed: str) -> str | None:
    """Return the first part between `...` that does not follow the part before it; white space counts as one space."""
    text, at = " ".join(printed.split()), 0
    for part in re.split(r"\.{3,}", " ".join(expected.split())):
        at = text.find(part.strip(), at)
        if at < 0:
            return part
        at += len(part.strip())
    return None
