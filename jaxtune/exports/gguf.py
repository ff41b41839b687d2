"""An exported folder converted for llama.cpp, by llama.cpp's own converter."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from jaxtune.errors import UserError

CONVERTER = "convert_hf_to_gguf.py"
KINDS = ("bf16", "q8_0")
"""Number formats of the matrices."""
# In an environment of its own, because the converter needs other versions of transformers and torch.
GET_IT = """git clone --depth=1 https://github.com/ggml-org/llama.cpp
    python -m venv llama.cpp/env
    llama.cpp/env/bin/pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt
    jaxtune export ... --gguf_converter='llama.cpp/env/bin/python llama.cpp/convert_hf_to_gguf.py'"""


def find_converter(command: str | None) -> list[str]:
    """Return the command of llama.cpp's converter: the given one, or the script on PATH.

    Args:
        command: The script, run by this Python, or a Python and the script; None: look on PATH.

    Raises:
        UserError: There is no such script.
    """
    if command is None:
        if (found := shutil.which(CONVERTER)) is None:
            raise UserError(f"--format=gguf: llama.cpp's {CONVERTER} is not on PATH. To get it:\n    {GET_IT}")
        return [found]
    try:
        words = [os.path.expanduser(word) for word in shlex.split(command)]
    except ValueError as error:
        raise UserError(f"--gguf_converter={command}: {error}") from error
    if not words or not Path(words[-1]).is_file():
        raise UserError(
            f"--gguf_converter={command}: there is no such file (quote a path with spaces inside the flag). To get "
            f"llama.cpp's {CONVERTER}:\n    {GET_IT}"
        )
    if len(words) > 1 and shutil.which(words[0]) is None:
        raise UserError(f"--gguf_converter={command}: there is no program {words[0]}")
    return words if len(words) > 1 else [sys.executable, *words]


def remove_earlier(folder: Path) -> None:
    """Remove the files of an earlier export to this folder, because their weights are other ones."""
    for kind in KINDS:
        for path in (output_path(folder, kind), _unfinished_path(folder, kind)):
            path.unlink(missing_ok=True)


def output_path(folder: Path, kind: str) -> Path:
    """Return the path of the file that `convert` writes."""
    return folder / f"model-{kind}.gguf"


def _unfinished_path(folder: Path, kind: str) -> Path:
    return folder / f".model-{kind}.gguf"


def convert(converter: list[str], folder: Path, kind: str) -> Path:
    """Write `model-KIND.gguf` into an exported folder, and return its path.

    Args:
        converter: The command of `find_converter`.
        folder: A whole model, unquantized.
        kind: The number format of its matrices, bf16 or q8_0.

    Raises:
        UserError: The converter failed; with its last words.
    """
    output, unfinished = output_path(folder, kind), _unfinished_path(folder, kind)
    try:
        done = subprocess.run(
            [*converter, folder, "--outfile", unfinished, "--outtype", kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode or not unfinished.is_file():
            said = "\n    ".join(done.stdout.strip().splitlines()[-5:])
            raise UserError(f"{folder} is written, but not {output.name}: {shlex.join(converter)} failed:\n    {said}")
        return unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)
