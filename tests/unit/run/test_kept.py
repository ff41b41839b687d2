"""Arrays that are computed once and kept in a file."""

import numpy as np
import pytest

from jaxtune.errors import UserError
from jaxtune.run.kept import kept


def test_it_is_written_once_and_mapped(tmp_path):
    file, written = tmp_path / "cache" / "scores.npy", []

    def write(path):
        written.append(path)
        with path.open("wb") as stream:
            np.save(stream, np.arange(5))

    for _ in range(2):
        found = kept(file, write)
        assert isinstance(found, np.memmap) and found.tolist() == [0, 1, 2, 3, 4]
    assert len(written) == 1 and list(file.parent.iterdir()) == [file]


def test_what_fails_leaves_no_file_that_is_read(tmp_path):
    file = tmp_path / "scores.npy"

    def write(path):
        path.write_bytes(b"half")
        raise UserError("no room")

    with pytest.raises(UserError, match="no room"):
        kept(file, write)
    assert not file.exists()


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "scores.npy"
    np.save(file, np.arange(100))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=f"{file} is damaged"):
        kept(file, lambda path: None)
