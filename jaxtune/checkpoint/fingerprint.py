"""The fingerprint of a frozen base model, kept in a checkpoint instead of its weights."""

import hashlib
import os
from pathlib import Path
from typing import Any

from jaxtune.errors import UserError

_MIB = 1 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 256


def fingerprint(folder: Path) -> dict[str, Any]:
    """Return {file name: {"size": bytes, "sha256": hex}} for each safetensors file in `folder`, as JSON values.

    Hashing 60 GB takes minutes, so the hash covers the header (names, shapes, dtypes, offsets), the first and last MiB
    of the tensor data, and 256 evenly spaced samples of 64 KiB between: 18 MiB a file. Smaller files are hashed whole.
    The hash detects another revision or a retrained model, but not a change confined to the gaps between samples.
    """
    return {
        path.name: {"size": path.stat().st_size, "sha256": hash_sample(path)}
        for path in sorted(folder.glob("*.safetensors"))
    }


def verify_fingerprint(folder: Path, recorded: dict[str, Any]) -> None:
    """Raise UserError naming the first safetensors file of `folder` that differs from the recorded one."""
    current = fingerprint(folder)
    for name in sorted(current.keys() | recorded.keys()):
        if current.get(name) == recorded.get(name):
            continue
        if name not in current:
            reason = "is missing"
        elif name not in recorded:
            reason = "was not there"
        elif current[name]["size"] != recorded[name]["size"]:
            reason = f"has {current[name]['size']} bytes, not {recorded[name]['size']}"
        else:
            reason = "has other content"
        raise UserError(
            f"{folder / name} {reason}: the checkpoint was trained on another base model; "
            "put the original files back, or start a new run"
        )


def hash_sample(path: Path) -> str:
    """Return the SHA-256 of a file: of samples, as `fingerprint` says, if it is a large safetensors file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)  # a safetensors file begins with the length of its header
        data_start = min(size, 8 + int.from_bytes(prefix, "little"))
        digest.update(prefix)
        digest.update(file.read(data_start - len(prefix)))
        inner = size - data_start - 2 * _MIB
        # In such a file the samples would overlap.
        if inner <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(_MIB))
            for index in range(_SAMPLES):
                # The first sample begins after the first MiB, and the last one ends before the last MiB.
                file.seek(data_start + _MIB + index * (inner - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
            file.seek(size - _MIB)
            digest.update(file.read(_MIB))
    return digest.hexdigest()
