"""The note of a plan that another version of jax compiles faster steps."""

import json

import jax
import pytest

from jaxtune.plan.jax_versions import FILE, say_slower

MADE_UP = {
    "0.10.2": {"LoRA": 90, "FP8": 99},
    "0.11.2": {"LoRA": 98, "FP8": 80},
    "0.12.0.1": {"LoRA": 100, "FP8": 98},
}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.10.2", "jax 0.10.2 is predicted to be slower on an H100 than jax 0.12.0.1 in LoRA by 10%"),
        ("0.11.0", "jax 0.11.0 is predicted to be slower on an H100 than jax 0.10.2 in FP8 by 19%"),
        ("0.12.0.1", None),
        ("0.13.0", None),
    ],
)
def test_a_slower_jax_is_named_with_the_recipes_and_the_faster_one(tmp_path, version, said):
    file = tmp_path / "versions.json"
    file.write_text(json.dumps({name: {"tokens_per_second": rates} for name, rates in MADE_UP.items()}))
    assert say_slower(version, file) == said


def test_the_shipped_file_has_every_version_that_ci_runs_on():
    shipped = json.loads(FILE.read_text())
    assert {tuple(name.split(".")[:2]) for name in shipped} >= {("0", "10"), ("0", "11"), ("0", "12")}
    assert tuple(jax.__version__.split(".")[:2]) in {tuple(name.split(".")[:2]) for name in shipped}
    recipes = [sorted(row["tokens_per_second"]) for row in shipped.values()]
    assert all(names == recipes[0] and len(names) == 5 for names in recipes)
