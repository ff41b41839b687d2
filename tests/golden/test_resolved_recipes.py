"""Every recipe resolves, and to exactly the committed options: a change of a default or a recipe is seen in review.

After a change that is meant: `pytest tests/golden --regenerate`, then read the diff of tests/golden/recipes/.
"""

import json
import pathlib
import sysconfig

import pytest

from jaxtune.config import load_recipe, resolve, to_json

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
GOLDEN = pathlib.Path(__file__).parent / "recipes"
RECIPES = sorted(CONFIGS.glob("[!_]*.py"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")  # the quickstart makes its model in the working directory, once for all tests


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_to_the_committed_options(recipe, run_folder, monkeypatch, request):
    monkeypatch.chdir(run_folder)
    config = resolve(load_recipe(str(recipe)), recipe.name)
    text = to_json(config).replace(sysconfig.get_paths()["stdlib"], "<standard library>")
    golden = GOLDEN / f"{recipe.stem}.json"
    if request.config.getoption("--regenerate", default=False):
        golden.write_text(text)
    assert json.loads(text) == json.loads(golden.read_text())


def test_no_committed_options_without_a_recipe():
    assert {path.stem for path in GOLDEN.glob("*.json")} == {path.stem for path in RECIPES}
