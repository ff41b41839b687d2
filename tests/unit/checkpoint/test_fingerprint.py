"""A base that is not saved is recognised by its files, their sizes and samples of their content."""

import json
import os
from pathlib import Path

import pytest

from jaxtune.checkpoint import fingerprint, verify_fingerprint
from jaxtune.errors import UserError


def write_safetensors(path: Path, data_bytes: int) -> int:
    """Write a file with one zero tensor, sparse on the disk; return where its data start."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [data_bytes], "data_offsets": [0, data_bytes]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + data_bytes)
    return 8 + len(header)


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1]))


@pytest.mark.parametrize("data_bytes", [1, 1000, 3 << 20, 40 << 20])
def test_fingerprint_finds_another_base(tmp_path, data_bytes):
    start = write_safetensors(tmp_path / "model-1.safetensors", data_bytes)
    write_safetensors(tmp_path / "model-2.safetensors", 10)
    recorded = json.loads(json.dumps(fingerprint(tmp_path)))
    verify_fingerprint(tmp_path, recorded)
    for position in (start - 3, start, start + data_bytes - 1):
        flip_byte(tmp_path / "model-1.safetensors", position)
        with pytest.raises(UserError, match=r"model-1.safetensors has other content"):
            verify_fingerprint(tmp_path, recorded)
        flip_byte(tmp_path / "model-1.safetensors", position)
    verify_fingerprint(tmp_path, recorded)


def test_fingerprint_finds_other_files(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", 100)
    recorded = fingerprint(tmp_path)
    write_safetensors(tmp_path / "b.safetensors", 100)
    with pytest.raises(UserError, match=r"b.safetensors was not there"):
        verify_fingerprint(tmp_path, recorded)
    (tmp_path / "b.safetensors").unlink()
    write_safetensors(tmp_path / "a.safetensors", 101)
    with pytest.raises(UserError, match=r"a.safetensors has .* bytes"):
        verify_fingerprint(tmp_path, recorded)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(UserError, match=r"a.safetensors is missing"):
        verify_fingerprint(tmp_path, recorded)


def test_fingerprint_samples_the_middle_of_a_large_file(tmp_path):
    path = tmp_path / "model.safetensors"
    start = write_safetensors(path, 40 << 20)
    before = fingerprint(tmp_path)
    with path.open("r+b") as file:  # another training of the model differs nearly everywhere
        file.seek(start + (2 << 20))
        file.write(b"\1" * (36 << 20))
    assert fingerprint(tmp_path) != before
