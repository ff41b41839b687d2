"""Runs a lane of tests within its budget.

    python tests/lanes.py unit
    python tests/lanes.py nightly                  what covers files that changed since it last passed
    python tests/lanes.py nightly --all            everything; what passed is remembered
    python tests/lanes.py nightly random_kills     the files with this in their names

The lanes and their minutes are in lanes.toml beside this file. What follows the name of a lane goes to pytest.
"""

import ast
import hashlib
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PASSED = TESTS / "nightly" / "passed.json"


def main(arguments: list[str]) -> int:
    """Runs the lane; returns the exit code: 1 if it took longer than its budget."""
    lanes = tomllib.loads((TESTS / "lanes.toml").read_text())
    if not arguments or arguments[0] not in lanes:
        print(f"{__doc__}\nLanes: {', '.join(lanes)}", file=sys.stderr)
        return 2
    name, *more = arguments
    lane = lanes[name]
    chosen = []
    if name == "nightly":
        options = [argument for argument in more if argument.startswith("-") and argument != "--all"]
        chosen = nightly_files([argument for argument in more if argument not in options])
        if not chosen:
            print("nightly: nothing that it covers has changed since it last passed")
            return 0
        of_lane = [argument for argument in lane["arguments"] if argument.startswith("-")]
        lane["arguments"], more = [str(file.relative_to(ROOT)) for file in chosen], [*of_lane, *options]
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--durations=10", *lane["arguments"], *more]
    code = subprocess.call(command, cwd=ROOT)
    minutes = (time.monotonic() - start) / 60
    print(f"lane {name}: {minutes:.1f} of {lane['minutes']} minutes", flush=True)
    if code == 0 and minutes > lane["minutes"]:
        print(f"lane {name} is over its budget; the ten slowest are above. Make them quicker, or move them to nightly")
        return 1
    if code == 0 and chosen:
        PASSED.write_text(json.dumps(passed() | {file.name: digest(file) for file in chosen}, indent=1) + "\n")
    return code


def nightly_files(wanted: list[str]) -> list[Path]:
    """The nightly files to run: all, those with one of these in their names, or those whose cover has changed."""
    files = sorted((TESTS / "nightly").glob("test_*.py"))
    if wanted:
        return files if wanted == ["--all"] else [file for file in files if any(part in file.name for part in wanted)]
    return [file for file in files if passed().get(file.name) != digest(file)]


def passed() -> dict[str, str]:
    """The digest with which each nightly file last passed."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def digest(test: Path) -> str:
    """A hash of a nightly file and of all that it covers: of the files that git knows, as they are now."""
    tree = ast.parse(test.read_text())
    covers = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COVERS"
    )
    listed = subprocess.check_output(["git", "ls-files", "--", *covers, str(test)], cwd=ROOT, text=True)
    found = hashlib.sha256()
    for name in sorted(listed.splitlines()):
        found.update(name.encode() + b"\0" + content(ROOT / name))
    return found.hexdigest()[:16]


def content(file: Path) -> bytes:
    """What counts as a change of a file: of Python all but comments and docstrings."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
