"""What runs on a bare GPU machine imports nothing that is not there."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"jax", "flax", "optax", "numpy", "jaxtyping"}
LATER = ("hf", "data", "checkpoint", "monitor", "loop", "train", "run_folder", "command")


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
    "file",
    files(
        "jaxtune/models", "jaxtune/lora", "jaxtune/precision", "jaxtune/optim", "jaxtune/objectives", "jaxtune/step.py"
    ),
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_the_computation_needs_jax_alone(file):
    import sys

    for module in imports(file):
        root = module.split(".")[0]
        assert root in ALLOWED | {"jaxtune", "pallas_kernels"} or root in sys.stdlib_module_names, module
        assert not any(module.startswith(f"jaxtune.{room}") for room in (*LATER, "config")), module


@pytest.mark.parametrize("file", files("pallas_kernels"), ids=lambda file: str(file.relative_to(ROOT)))
def test_kernels_know_nothing_of_jaxtune(file):
    assert not any(module.startswith("jaxtune") for module in imports(file))
