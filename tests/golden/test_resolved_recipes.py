"""Every recipe resolves to exactly the committed options, so that a changed default or recipe shows in review.

`defaults.json` has every option. The file of a recipe has only the options that differ, so a new option is one line.
After an intended change: `pytest tests/golden --regenerate`, then read the diff of tests/golden/recipes/.
"""

import json
import pathlib
import sysconfig

import pytest

from jaxtune.config import keys, load_recipe, option_rules, resolve
from jaxtune.config.typed_values import to_plain

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
GOLDEN = pathlib.Path(__file__).parent / "recipes"
RECIPES = sorted(CONFIGS.glob("[!_]*.py"))
LISTS = ("data.datasets", "data.eval_datasets")  # lists whose entries have options


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")  # the quickstart makes its model in the working directory, once for all tests


def is_the_committed(name, options, request):
    text = json.dumps({key: to_plain(value) for key, value in options.items() if key not in LISTS}, indent=1) + "\n"
    text = text.replace(sysconfig.get_paths()["stdlib"], "<standard library>")
    if request.config.getoption("--regenerate", default=False):
        (GOLDEN / f"{name}.json").write_text(text)
    assert json.loads(text) == json.loads((GOLDEN / f"{name}.json").read_text())


def test_the_defaults_are_the_committed_ones(request):
    is_the_committed("defaults", {option.key: option.default for option in keys.options().values()}, request)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_to_the_committed_options(recipe, run_folder, monkeypatch, request):
    monkeypatch.chdir(run_folder)
    is_the_committed(
        recipe.stem, option_rules.non_default_options(resolve(load_recipe(str(recipe)), recipe.name)), request
    )


def test_no_committed_options_without_a_recipe():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {path.stem for path in RECIPES} | {"defaults"}
