"""The README's trainings, unchanged: what the models learn, and that the README's other commands can use them."""

import pytest
from readme import TRAININGS, empty_folder, run_commands
from runs import metrics

TAKES_LONG = True
COVERS = ("jaxtune/recipes/quickstart.py", "jaxtune/recipes/quickstart_lora.py", "jaxtune/training/step.py")


@pytest.mark.timeout(1200)
def test_the_quickstart_learns_and_adapters_learn_more(tmp_path_factory):
    with empty_folder(tmp_path_factory) as home:
        printed = run_commands()
        whole, lora = (
            [row["eval_loss"] for row in metrics(home / "runs" / training.rpartition("=")[2]) if "eval_loss" in row]
            for training in TRAININGS
        )
    assert "sample: def " in printed[TRAININGS[0]]
    assert whole[-1] < 2.2
    assert lora[-1] < lora[0]
