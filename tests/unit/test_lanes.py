"""Every test is in a lane, so that CI runs it."""

import json
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lanes
import pytest

TESTS = Path(__file__).parents[1]


def test_every_test_is_in_a_lane(request):
    declared = tomllib.loads((TESTS / "lanes.toml").read_text())
    # Lanes with markers run only a part of a folder.
    run = {argument for lane in declared.values() if "-m" not in lane["arguments"] for argument in lane["arguments"]}
    run |= set(request.config.getini("testpaths"))
    files = [file.relative_to(TESTS.parent) for file in TESTS.rglob("test_*.py")]
    needs_a_gpu = Path("tests/gpu")
    left_out = [str(file) for file in files if not run & {str(file), *map(str, file.parents)}]
    assert left_out == [str(file) for file in files if needs_a_gpu in file.parents]


def test_what_pytest_leaves_out_is_said_at_its_end(request):
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    chosen = {Path(path).name for path in request.config.getini("testpaths")}
    assert folders - chosen == set(lanes.LEFT_OUT) and not chosen & set(lanes.LEFT_OUT)


@pytest.mark.parametrize(
    ("arguments", "options", "run"),
    [
        (["tests/unit"], {}, ["test[a]"]),
        (["tests/unit/test_it.py::test"], {}, ["test[a]", "test[b]"]),
        (["tests/unit/test_it.py::test[b]"], {}, ["test[b]"]),
        (["tests/unit"], {"keyword": "b]"}, ["test[b]"]),
        (["tests/unit"], {"markexpr": "nightly"}, ["test[b]"]),
    ],
)
def test_rows_that_take_long_run_only_if_they_are_asked_for(request, arguments, options, run):
    """pytest itself leaves out what does not match the arguments, so these items are all that match."""
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    marks = {"test[a]": None, "test[b]": pytest.mark.nightly}
    matching = [name for name in marks if name in run or run == ["test[a]"]]
    items = [
        SimpleNamespace(
            nodeid=f"tests/unit/test_it.py::{name}",
            path=Path("test_it.py"),
            get_closest_marker=lambda marker, name=name: marks[name],
        )
        for name in matching
    ]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(**{"keyword": "", "markexpr": ""} | options)
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=arguments, option=option, hook=hook), items)
    assert [item.nodeid.partition("::")[2] for item in items] == run


def test_no_two_files_of_tests_are_one_module():
    """pytest would fail at collection: without an __init__.py next to it, a file is a module by its name only."""

    def module_of(file: Path) -> str:
        parts = [file.stem]
        for folder in file.parents:
            if not (folder / "__init__.py").exists():
                break
            parts.append(folder.name)
        return ".".join(reversed(parts))

    count = Counter(map(module_of, TESTS.rglob("test_*.py")))
    assert not [module for module, files in count.items() if files > 1]


@pytest.mark.parametrize(("lane", "least"), [("nightly", 5), ("aot", 5)])
def test_a_lane_leaves_out_what_has_passed_as_it_is(tmp_path, monkeypatch, lane, least):
    """Files without a record or with changes are run. Another lane, or another jax, has a separate record."""
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    files = lanes.recorded_files(tomllib.loads((TESTS / "lanes.toml").read_text())[lane]["arguments"])
    assert len(files) >= least
    assert lanes.files_to_run(files, "now", []) == files
    digests = {file.name: lanes.digest([*lanes.covers(file), str(file)]) for file in files}
    lanes.PASSED.write_text(json.dumps({"now": digests}))
    assert lanes.files_to_run(files, "now", []) == []
    assert lanes.files_to_run(files, "another", []) == lanes.files_to_run(files, "now", ["--all"]) == files
    lanes.PASSED.write_text(json.dumps({"now": digests | {file.name: "changed" for file in files[:1]}}))
    assert lanes.files_to_run(files, "now", []) == files[:1]


def test_the_default_lane_leaves_out_kernels_that_have_passed_as_they_are(tmp_path, monkeypatch):
    """The others are run by pytest without a folder, as the README has it."""
    ran = []
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(lanes.subprocess, "call", lambda command, cwd: ran.append(command) or 0)
    assert lanes.main(["default"]) == lanes.main(["default"]) == 0
    (first, second), files = ran, lanes.recorded_files(["tests/kernels"])
    assert len(files) > 10 and second == [*first, *(f"--ignore={file}" for file in files)]


def test_a_lane_with_covers_is_left_out_until_something_there_changes(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(lanes.subprocess, "call", lambda command, cwd: ran.append(command) or 0)
    assert lanes.main(["mesh"]) == lanes.main(["mesh"]) == 0 and len(ran) == 1  # the first one is on record
    assert lanes.main(["mesh", "--quick"]) == 0 and len(ran) == 1
    assert lanes.main(["mesh", "--all"]) == 0 and len(ran) == 2
    monkeypatch.setattr(lanes, "digest", lambda paths: "changed")
    assert lanes.main(["mesh", "--quick"]) == 0 and len(ran) == 3 and "every_jax" in ran[-1]
    assert lanes.main(["mesh"]) == 0 and len(ran) == 4, "a part is not put on record"


def test_some_files_of_a_lane_are_not_put_on_record_as_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(lanes.subprocess, "call", lambda command, cwd: 0)
    assert lanes.main(["aot", "test_wide"]) == 0
    (recorded,) = json.loads(lanes.PASSED.read_text()).values()
    assert recorded.keys() == {"test_wide_heads_compiled.py"}


@pytest.mark.parametrize(("minutes", "code", "told"), [(4.9, 0, False), (6.9, 0, True), (7.1, 1, True)])
def test_a_lane_that_takes_longer_says_so_and_fails_only_if_no_machine_explains_it(
    tmp_path, monkeypatch, capsys, minutes, code, told
):
    monkeypatch.setattr(lanes, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(lanes.subprocess, "call", lambda command, cwd: 0)
    monkeypatch.setattr(lanes.time, "monotonic", iter([0.0, 60 * minutes]).__next__)
    monkeypatch.setattr(lanes.tomllib, "loads", lambda text: {"quick": {"minutes": 5, "arguments": ["tests/unit"]}})
    assert lanes.main(["quick"]) == code
    assert ("over its budget" in capsys.readouterr().out) == told


def test_a_file_that_takes_long_does_not_start_within_a_limit_of_time(tmp_path, monkeypatch, capsys):
    quick, slow = tmp_path / "test_quick.py", tmp_path / "test_slow.py"
    quick.write_text("COVERS = ()\n")
    slow.write_text("TAKES_LONG = True\n")
    started = []
    monkeypatch.setattr(lanes, "main", lambda arguments: started.append(arguments) or 0)
    assert lanes.run_within(3, "nightly", [slow, quick], ["-q"]) == 0
    assert started == [["nightly", "test_quick", "-q"]]
    assert "no time was left for 1 files: python tests/lanes.py nightly test_slow" in capsys.readouterr().out


def test_what_counts_as_changed_is_the_code_alone_in_any_version_of_python(tmp_path):
    file = tmp_path / "code.py"
    file.write_text('"""What it is for."""\ndef f(*, a: int = 1): # why\n  "What it returns."\n  return []\n')
    dump = (
        "Module(body=[FunctionDef(name='f', args=arguments(kwonlyargs=[arg(arg='a', annotation=Name(id='int', "
        "ctx=Load()))], kw_defaults=[Constant(value=1)]), body=[Return(value=List(ctx=Load()))])])"
    )
    assert lanes.content(file).decode() == dump
