"""What runs on a bare GPU machine imports nothing that is not there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"jax", "flax", "optax", "numpy", "jaxtyping"}
ROOMS = (
    *("models", "quant", "lora", "precision", "optim", "objectives", "parallel"),
    *("data/columns.py", "run/state.py", "run/step.py", "run/guard.py"),
)
# The rest is on the road after them, or needs more than a bare GPU machine has.
MAY_USE = {"errors", "config.schema", *(room.removesuffix(".py").replace("/", ".") for room in ROOMS)}
NO_COMMANDS = {"__init__", "__main__", "command", "errors", "interrupt", "python"}
COMMANDS = {path.stem for path in (ROOT / "jaxtune").glob("*.py")} - NO_COMMANDS


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs; those under TYPE_CHECKING are for the reader."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        for inner in [node] if not isinstance(node, ast.If) else []:
            for part in ast.walk(inner):
                if isinstance(part, ast.Import):
                    found |= {alias.name for alias in part.names}
                elif isinstance(part, ast.ImportFrom):
                    found.add(part.module or "")
    return found


def files(*places: str) -> list[Path]:
    return [
        file for place in places for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]


@pytest.mark.parametrize(
    "file", files(*(f"jaxtune/{room}" for room in ROOMS)), ids=lambda file: str(file.relative_to(ROOT))
)
def test_the_computation_needs_jax_alone(file):
    for module in imports(file):
        root, _, inner = module.partition(".")
        assert root in ALLOWED | {"jaxtune", "pallas_kernels"} or root in sys.stdlib_module_names, module
        assert root != "jaxtune" or any(inner == room or inner.startswith(f"{room}.") for room in MAY_USE), module


@pytest.mark.parametrize("file", files("jaxtune"), ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_imports_a_command(file):
    """`from jaxtune import x` is checked by its names."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxtune":
            names = {alias.name for alias in node.names} if node.module == "jaxtune" else {node.module.split(".")[1]}
            assert not names & COMMANDS, names


@pytest.mark.parametrize(
    "module, heavy", [("config.schema", "ml_collections"), ("data.columns", "grain")], ids=["schema", "columns"]
)
def test_sections_and_columns_are_named_without_the_rest_of_their_room(module, heavy):
    code = f"import sys, jaxtune.{module}; print({heavy!r} in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize("file", files("pallas_kernels"), ids=lambda file: str(file.relative_to(ROOT)))
def test_kernels_know_nothing_of_jaxtune(file):
    assert not any(module.startswith("jaxtune") for module in imports(file))
