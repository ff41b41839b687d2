"""Run a lane of tests within its budget.

    python tests/lanes.py mesh
    python tests/lanes.py nightly                  all files except those on record
    python tests/lanes.py nightly --all            all files
    python tests/lanes.py nightly random_kills     the recorded files with this in their names
    python tests/lanes.py nightly --within=5       one file after another; none starts after 5 minutes
    python tests/lanes.py mesh --quick             a part of the lane, unless the whole lane is on record

The lanes and their minutes are in lanes.toml next to this file. Options that follow are passed to pytest. A test file
may list the paths it covers in COVERS. Once it has passed, it is on record (passed.json) and runs again only after a
covered path has changed. So is a lane that has `covers` in lanes.toml; --all runs it anyway, and --quick runs the
arguments `quick` of lanes.toml instead. A file with TAKES_LONG does not start within a limit of time.
"""

import ast
import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PASSED = TESTS / "passed.json"
# Folders that `pytest` without arguments leaves out, and how to run them.
LEFT_OUT = {
    "mesh": "several devices: python tests/lanes.py mesh",
    "hosts": "several processes: python tests/lanes.py hosts",
    "aot": "steps and kernels compiled for GPUs that need not be there: pip install -e '.[aot]' && pytest tests/aot",
    "gpu": "on a GPU: pip install -e '.[cuda13]' && pytest -n 0 tests/gpu",
    "package": "the wheel in a fresh environment, the commands of the README: python tests/lanes.py package",
    "nightly": "long tests: python tests/lanes.py nightly",
}


def main(arguments: list[str]) -> int:
    """Run the lane; return the exit code, which is 1 if it took far longer than its budget."""
    lanes = tomllib.loads((TESTS / "lanes.toml").read_text())
    if not arguments or arguments[0] not in lanes:
        print(f"{__doc__}\nLanes: {', '.join(lanes)}", file=sys.stderr)
        return 2
    name, *more = arguments
    lane, record = lanes[name], f"{name}, jax {version('jax')}"
    if quick := "--quick" in more:
        more.remove("--quick")
    parts = list(takewhile(lambda argument: argument == "--all" or not argument.startswith("-"), more))
    options = more[len(parts) :]
    known = recorded_files(lane.get("recorded", lane["arguments"]))
    chosen = files_to_run(known, record, parts)
    if parts and parts != ["--all"]:
        if not chosen:
            print(f"lane {name} has no files on record with {' or '.join(parts)} in their names", file=sys.stderr)
            return 2
        lane["arguments"] = [*map(str, chosen), *(each for each in lane["arguments"] if not path_of(each).exists())]
    if limit := next((option for option in options if option.startswith("--within=")), None):
        options.remove(limit)
        return run_within(float(limit.partition("=")[2]), name, chosen, options)
    left_out = [f"--ignore={file}" for file in known if file not in chosen]
    every = not parts or parts == ["--all"]
    whole = {WHOLE: digest(lane["covers"])} if "covers" in lane and every and not options else {}
    if whole and not parts and whole.items() <= read_passed().get(record, {}).items():
        print(f"{name}: nothing it covers has changed since it last passed")
        return 0
    if quick and "quick" in lane and not parts:
        print(f"{name}: changed since all of it last passed; a part of it now. All: python tests/lanes.py {name}")
        lane["arguments"], chosen, whole = lane["quick"], [], {}  # a part is not put on record
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--durations=10", *lane["arguments"], *left_out, *options]
    code = subprocess.call(command, cwd=ROOT)
    if code == NO_TESTS and left_out:
        print(f"{name}: nothing it covers has changed since it last passed")
        return 0
    minutes = (time.monotonic() - start) / 60
    print(f"lane {name}: {minutes:.1f} of {lane['minutes']} minutes", flush=True)
    if code == 0 and minutes > lane["minutes"]:
        print(f"lane {name} is over its budget; the ten slowest are above. Make them quicker, or move them to nightly")
        if minutes > SLACK * lane["minutes"]:
            return 1
    if code == 0 and (chosen or whole) and not options:
        records = read_passed()
        passed = {file.name: digest([*covers(file), str(file)]) for file in chosen}
        records[record] = records.get(record, {}) | passed | whole
        PASSED.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    return code


def run_within(minutes: float, lane: str, files: list[Path], options: list[str]) -> int:
    """Run a lane file by file until the time is up; print the files that were not run."""
    start, codes, left = time.monotonic(), [], []
    for file in files:
        if (time.monotonic() - start) / 60 < minutes and not assigned(file, "TAKES_LONG", False):
            codes.append(main([lane, file.stem, *options]))
        else:
            left.append(file)
    if left:
        names = " ".join(file.stem for file in left)
        print(f"{lane}: no time was left for {len(left)} files: python tests/lanes.py {lane} {names}", flush=True)
    return max(codes, default=0)


SLACK = 1.4  # the same tests took 1.0 to 1.3 times as long on machines of one kind, so that a tighter bound would flake
NO_TESTS = 5  # pytest's exit code if it collected no tests
WHOLE = "all files"  # the record of a lane that has `covers`


def recorded_files(arguments: list[str]) -> list[Path]:
    """Return the lane's files that have COVERS, relative to the root."""
    paths = [path for path in map(path_of, arguments) if path.exists()]
    files = sorted({file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])})
    return [file.relative_to(ROOT) for file in files if covers(file)]


def path_of(argument: str) -> Path:
    """Return the file or folder that an argument of pytest names; it may not exist."""
    return ROOT / argument.partition("::")[0]


def files_to_run(known: list[Path], record: str, parts: list[str]) -> list[Path]:
    """Return all files with COVERS, or those with one of `parts` in their names, or those that have changed."""
    if parts:
        return known if parts == ["--all"] else [file for file in known if any(part in file.name for part in parts)]
    passed = read_passed().get(record, {})
    return [file for file in known if passed.get(file.name) != digest([*covers(file), str(file)])]


def read_passed() -> dict[str, dict[str, str]]:
    """Return the digest with which each file last passed, by lane and jax version."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def covers(test: Path) -> tuple[str, ...]:
    """Return the COVERS of a test file; () if it has none."""
    return assigned(test, "COVERS", ())


def assigned(test: Path, name: str, default: Any) -> Any:
    """Return the literal that a test file assigns to a name; `default` if it assigns none."""
    nodes = (node for node in ast.parse((ROOT / test).read_text()).body if isinstance(node, ast.Assign))
    return next((ast.literal_eval(node.value) for node in nodes if ast.unparse(node.targets[0]) == name), default)


def digest(paths: Sequence[str]) -> str:
    """Hash the files at some paths: those that git tracks, with their current content."""
    listed = subprocess.check_output(["git", "ls-files", "--", *paths], cwd=ROOT, text=True)
    sha256 = hashlib.sha256()
    for name in sorted(listed.splitlines()):
        sha256.update(name.encode() + b"\0" + content(ROOT / name))
    return sha256.hexdigest()[:16]


@cache
def content(file: Path) -> bytes:
    """Return the content that counts as changed: Python without comments and docstrings, other files as they are."""
    if file.is_symlink():
        return str(file.readlink()).encode()
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return re.sub(r"\w+=\[\](, )?|, \w+=\[\]", "", ast.dump(tree)).encode()  # versions of Python show other empty lists


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
