"""Every test is in a lane, so that CI runs it."""

import tomllib
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_is_in_a_lane():
    lanes = tomllib.loads((TESTS / "lanes.toml").read_text())
    # What is marked is a part of a folder.
    run = {argument for lane in lanes.values() if "-m" not in lane["arguments"] for argument in lane["arguments"]}
    found = [file.relative_to(TESTS.parent) for file in TESTS.rglob("test_*.py")]
    needs_a_gpu = Path("tests/gpu")
    left_out = [str(file) for file in found if not run & {str(file), *map(str, file.parents)}]
    assert left_out == [str(file) for file in found if needs_a_gpu in file.parents]
