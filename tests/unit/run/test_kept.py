"""Arrays that are computed once and cached in a file."""

import numpy as np
import pytest

from jaxtune.errors import UserError
from jaxtune.scoring.memmap_cache import load_or_compute


def test_it_is_written_once_and_mapped(tmp_path):
    file, written = tmp_path / "cache" / "scores.npy", []

    def write(path):
        written.append(path)
        with path.open("wb") as stream:
            np.save(stream, np.arange(5))

    for _ in range(2):
        array = load_or_compute(file, write)
        assert isinstance(array, np.memmap) and array.tolist() == [0, 1, 2, 3, 4]
    assert len(written) == 1 and list(file.parent.iterdir()) == [file]


def test_what_fails_leaves_no_file_that_is_read(tmp_path):
    file = tmp_path / "scores.npy"

    def write(path):
        path.write_bytes(b"half")
        raise UserError("no room")

    with pytest.raises(UserError, match="no room"):
        load_or_compute(file, write)
    assert not file.exists()


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-40] ^= 1  # in the last value
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda file: file.write_bytes(file.read_bytes()[:-8]),
        lambda file: file.write_bytes(b""),
        lambda file: np.save(file, np.arange(100)),  # in the format of older versions, without a checksum
    ],
)
def test_a_damaged_file_is_said_and_made_again(tmp_path, caplog, damage):
    file, values = tmp_path / "scores.npy", np.arange(100)

    def write(path):
        with path.open("wb") as stream:
            np.save(stream, values)

    load_or_compute(file, write)
    damage(file)
    for warnings in (1, 0):
        caplog.clear()
        assert np.array_equal(load_or_compute(file, write), values)
        assert [f"{file} is damaged" in record.message for record in caplog.records] == [True] * warnings
