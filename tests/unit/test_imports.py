"""Modules that run on a bare GPU machine import only packages that it has."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jaxtune import command_flags

ROOT = Path(__file__).parents[2]
ALLOWED = {"jax", "flax", "optax", "numpy", "jaxtyping"}
ROOMS = (
    *("models", "quant", "lora", "precision", "optim", "objectives", "parallel"),
    *("image_layout.py", "columns.py", "training/state.py", "training/step.py", "training/guard.py"),
)
# Other modules are layers above, or need more packages than a bare GPU machine has.
MAY_USE = {"errors", "option_field", "config.schema", *(room.removesuffix(".py").replace("/", ".") for room in ROOMS)}
NO_COMMANDS = {"__init__", "__main__", "columns", "command", "command_flags", "command_line", "errors", "hlo"}
NO_COMMANDS |= {"json_file", "api", "data_options", "interrupt", "option_field", "reference_pages", "terminal"}
NO_COMMANDS |= {"tokenizer_type", "image_layout", "whole_file"}
COMMANDS = {path.stem for path in (ROOT / "jaxtune").glob("*.py")} - NO_COMMANDS


# The rooms of the package from the ground up: each imports only from those below it, also inside functions.
FLOORS = (
    *("errors", "interrupt", "json_file", "image_layout", "columns"),
    *("hlo", "terminal", "option_field", "tokenizer_type"),
    *("parallel", "quant", "precision", "models", "objectives", "lora", "optim"),
    *("data_options", "config.sources", "config", "checkpoint", "hf", "merging", "monitor"),
    *("data.images", "data.chat", "data.reading", "data.formats", "data.cache", "data.rows", "data"),
    *("host", "weights", "training", "inference", "exports", "scoring", "rollout", "evaluation", "run"),
    *("plan.tables", "plan"),
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(text) for text in PROJECT["dependencies"]]
# Packages whose new minor versions have broken programs; for transformers only major ones have.
BREAK = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "transformers")


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports when it runs, without those under TYPE_CHECKING."""
    modules = set()
    for node in ast.parse(path.read_text()).body:
        for inner in [node] if not isinstance(node, ast.If) else []:
            for part in ast.walk(inner):
                if isinstance(part, ast.Import):
                    modules |= {alias.name for alias in part.names}
                elif isinstance(part, ast.ImportFrom):
                    modules.add(part.module or "")
    return modules


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
def test_only_the_python_api_imports_a_command(file):
    """For `from jaxtune import x` the imported names are checked. The API trains as the command does."""
    if file.name == "api.py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxtune":
            names = {alias.name for alias in node.names} if node.module == "jaxtune" else {node.module.split(".")[1]}
            assert not names & COMMANDS, names


@pytest.mark.parametrize(
    "module, heavy", [("config.schema", "ml_collections"), ("columns", "grain")], ids=["schema", "columns"]
)
def test_sections_and_columns_are_named_without_the_rest_of_their_room(module, heavy):
    code = f"import sys, jaxtune.{module}; print({heavy!r} in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_training_imports_what_takes_long_only_when_it_uses_it():
    heavy = {"jax.experimental.mosaic.gpu", "matplotlib", "wandb", "orbax", "grain", "huggingface_hub"}
    code = f"import sys, jaxtune.train; print(*{heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


def test_the_list_of_commands_needs_no_recipes():
    code = "import sys, jaxtune.__main__ as m; m.main(['--help']); print({'numpy', 'yaml'} & set(sys.modules) or '')"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == ""


def test_flags_and_recipes_are_read_before_what_takes_seconds_to_import(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("from jaxtune.config import new_config as get_config\n")
    taking = [name for name, flags in command_flags.COMMANDS.items() if flags.with_config]
    lines = [f"{name} --confg=x" for name in (*command_flags.COMMANDS, "plan")]
    lines += [f"{name} --config={recipe} --config.optim.rate=1" for name in (*taking, "plan")]
    code = f"""
import runpy, sys
for line in {lines}:
    command, *arguments = line.split()
    sys.argv = ["", *arguments]
    try:
        runpy.run_module("jaxtune." + command, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(end.code, *{{"jax", "transformers", "orbax", "datasets"}} & set(sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout.splitlines() == ["2"] * len(lines)
    assert ran.stderr.count("--confg: no such flag") == 9 == len(command_flags.COMMANDS) + 1
    assert ran.stderr.count("optim.rate = '1': no such option") == 5 == len(taking) + 1


def room(module: str) -> str:
    """The entry of FLOORS that a module of jaxtune is in; "" for a command, which is above them."""
    parts = module.split(".")[1:]
    return next((name for name in (".".join(parts[:2]), parts[0] if parts else "") if name in FLOORS), "")


@pytest.mark.parametrize("name", FLOORS)
def test_a_room_imports_only_from_floors_below(name):
    place = "jaxtune/" + name.replace(".", "/")
    for file in files(f"{place}.py" if (ROOT / f"{place}.py").exists() else place):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if room(module) != name:
            continue  # a room inside this one, which has a floor of its own
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "jaxtune":
                continue
            for below in {room(f"{node.module}.{alias.name}") for alias in node.names} - {"", name}:
                assert FLOORS.index(below) < FLOORS.index(name), f"{file}:{node.lineno} imports {below}"


def test_a_file_of_the_package_is_named_once():
    """So that a search for a name has one answer. In pallas_kernels each op's folder has a file for each backend."""
    again = ("__init__.py", "__main__.py", "options.py")  # options.py: the sections of a room
    count = Counter(file.name for file in files("jaxtune") if file.name not in again)
    assert not [name for name, times in count.items() if times > 1]


def test_a_class_of_the_package_is_named_once():
    trees = [ast.parse(file.read_text()) for file in files("jaxtune", "pallas_kernels")]
    count = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, times in count.items() if times > 1 and not name.startswith("_")]


def test_the_contributors_page_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:jaxtune|pallas_kernels|tests|benchmarks|docs)/[\w/.]+)`", text)
    assert len(named) > 16 and not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("file", files("pallas_kernels"), ids=lambda file: str(file.relative_to(ROOT)))
def test_kernels_know_nothing_of_jaxtune(file):
    assert not any(module.startswith("jaxtune") for module in imports(file))


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=lambda requirement: requirement.name)
def test_a_dependency_is_bounded_where_it_breaks_and_the_tests_run_within_its_bounds(requirement):
    """CI installs the newest allowed version, so the tests have passed on it."""
    assert version(requirement.name) in requirement.specifier
    bounds = {part.operator for part in requirement.specifier}
    assert requirement.name not in BREAK or "<" in bounds, f"{requirement} has no upper bound"


def test_what_is_off_by_default_is_an_extra_and_imported_where_it_is_used():
    """For example, wandb brings 20 packages."""
    optional = {"wandb", "aim", "tensorboardX", "lm_eval", "pynvml", "ray", "s3fs", "gcsfs"}
    assert not optional & {requirement.name for requirement in DEPENDENCIES}
    importing = {str(file.relative_to(ROOT)): imports(file) for file in files("jaxtune")}
    named = [file for file, modules in importing.items() if optional & {module.split(".")[0] for module in modules}]
    # A function that needs the harness imports its two modules.
    assert sorted(named) == ["jaxtune/evaluation/decoder_lm.py", "jaxtune/evaluation/lm_evaluation_harness.py"]
    assert "wandb" in PROJECT["optional-dependencies"]["test"]
