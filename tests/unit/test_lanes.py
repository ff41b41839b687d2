"""Every test is in a lane, so that CI runs it."""

import json
import tomllib
from pathlib import Path

import lanes

TESTS = Path(__file__).parents[1]


def test_every_test_is_in_a_lane():
    declared = tomllib.loads((TESTS / "lanes.toml").read_text())
    # What is marked is a part of a folder.
    run = {argument for lane in declared.values() if "-m" not in lane["arguments"] for argument in lane["arguments"]}
    found = [file.relative_to(TESTS.parent) for file in TESTS.rglob("test_*.py")]
    needs_a_gpu = Path("tests/gpu")
    left_out = [str(file) for file in found if not run & {str(file), *map(str, file.parents)}]
    assert left_out == [str(file) for file in found if needs_a_gpu in file.parents]


def test_nightly_runs_what_has_not_passed_as_it_is(tmp_path, monkeypatch):
    """Never on record, or its cover has changed since; nothing, if all of it has passed."""
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    files = lanes.nightly_files([])
    assert len(files) >= 5
    record = {file.name: lanes.digest(file) for file in files}
    lanes.PASSED.write_text(json.dumps(record))
    assert lanes.nightly_files([]) == []
    lanes.PASSED.write_text(json.dumps(record | {files[0].name: "another"}))
    assert lanes.nightly_files([]) == files[:1]
    assert lanes.nightly_files(["--all"]) == files
