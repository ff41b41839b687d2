"""The text of a plan, and the refusals of its command."""

import os
from types import SimpleNamespace

import pytest

from jaxtune.config.schema import Config, MemoryOptions
from jaxtune.plan import __main__ as plan
from jaxtune.plan import hints, prediction, summary
from jaxtune.plan.prediction import Collective, Speed, TargetGpus
from jaxtune.plan.tables.prices import Price
from jaxtune.training.memory import POLICIES

FACTORS = {"central": 1.0, "optimistic": 2.0, "pessimistic": 0.5}


def test_communication_that_no_work_hides_is_said_as_a_part_of_the_step():
    gathers = Collective("all-gather", "linear.py:7", launches=72, bytes=2e9, hidden_ms=30.0, exposed_ms=3.0)
    scatters = Collective("reduce-scatter", "step.py:5", launches=36, bytes=1e9, hidden_ms=0.0, exposed_ms=5.0)
    speeds = {"central": Speed(seconds=0.1, tokens_per_second=1e5, mfu=0.4)}
    planned = SimpleNamespace(collectives=(gathers, scatters), speeds=speeds, said=(), seconds=9.0)
    assert "exposed communication: 8.00 ms, 8.0% of the step" in summary._rest(planned)


def test_a_price_gives_what_tokens_and_the_run_cost():
    """8 GPUs at 2.50 are 20 an hour; at 100,000 tokens a second these are 360 million tokens."""
    speeds = {name: Speed(1.0, 1e5 * factor, 0.4) for name, factor in FACTORS.items()}
    config = SimpleNamespace(train=SimpleNamespace(max_steps=3600))
    planned = SimpleNamespace(where=TargetGpus("h100", 4, 2), speeds=speeds, tokens=100_000, config=config)
    assert summary._cost(planned, Price(2.5)) == [
        "cost by the predicted speed; a GPU and hour: 2.5",
        "  hour       20.00",
        "  1M tokens  0.056 (0.028 - 0.111)",
        "  3,600 steps  20.00 (10.00 - 40.00), without start, evaluations and checkpoints",
    ]


@pytest.mark.parametrize(
    ("needs", "chosen", "said"),
    [
        ({"none": 12, "dots": 6}, "dots", "6.00 GB, fits; 5 tokens/s"),
        ({"none": 12, "dots": 9.8, "block": 9.5, "offload": 9.6}, "block", "9.50 GB, fits; 5 tokens/s"),
        (
            {"none": 14, "dots": 12, "block": 10.5, "offload": 11},
            "block",
            "10.50 GB, does not fit, 0.50 GB missing; 5 tokens/s",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_the_one_that_needs_least_and_says_so(needs, chosen, said):
    """The limit is 10 GB; a run wants a tenth of the memory to be free."""

    def plan_of(remat):
        config, where = Config(memory=MemoryOptions(remat)), TargetGpus("h100")
        needed, speeds = int(1e9 * needs[remat]), {"central": Speed(1.0, 5.0, 0.4)}
        rest = {"groups": (), "collectives": (), "launches": {}, "assumptions": {}, "said": ("a note",), "seconds": 1.0}
        return prediction.Plan(config, where, 1, {"weights": 3}, needed, 10**10, speeds, **rest)

    alone = prediction.choose([plan_of(POLICIES[0])])
    assert alone.said == ("a note",)  # no other policy was allowed
    planned = prediction.choose(map(plan_of, POLICIES))
    assert planned.config.memory.remat == chosen and summary.line(planned).endswith(said)
    each = "none needs 14.00 GB, dots needs 12.00 GB, block needs 10.50 GB, offload needs 11.00 GB"
    assert planned.said == (() if planned.fits else (f"memory.remat=auto: no policy fits: {each}",)) + ("a note",)
    weights, total = summary._memory(planned)[1:3]
    assert summary._head(planned)[0].endswith(f"; memory.remat={chosen} memory.unroll=False")
    assert weights.endswith(" 0.0 kB") and ("DOES NOT FIT, 0.50 GB missing" in total) == (not planned.fits)


@pytest.mark.parametrize(("given", "used"), [(None, "3"), ("1", "3"), ("0", "0"), ("2", "2")])
def test_warnings_about_an_absent_gpu_are_shown_only_if_asked_for(monkeypatch, given, used):
    """jax sets 1 if the user sets nothing."""
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, given or "1")
    if given is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    hints._use_cpu()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == used


def test_the_gpus_of_a_plan_are_those_of_the_run(capsys):
    recipe = ["--config=qwen_lora:Qwen/Qwen3-0.6B", "--config.device.gpus=2"]
    assert plan.main([*recipe, "--gpus=4"]) == 2
    assert "--gpus=4: device.gpus is 2; leave out one of the two" in capsys.readouterr().err
