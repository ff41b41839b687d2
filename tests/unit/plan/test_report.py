"""The text of a plan, and the refusals of its command."""

from types import SimpleNamespace

from jaxtune.plan import __main__ as plan
from jaxtune.plan import summary
from jaxtune.plan.prediction import Collective, Speed, TargetGpus

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
    assert summary._cost(planned, 2.5) == [
        "cost at 2.5 per GPU and hour, by the predicted speed",
        "  hour       20.00",
        "  1M tokens  0.056 (0.028 - 0.111)",
        "  3,600 steps  20.00 (10.00 - 40.00), without start, evaluations and checkpoints",
    ]


def test_the_gpus_of_a_plan_are_those_of_the_run(capsys):
    recipe = ["--config=qwen_lora:Qwen/Qwen3-0.6B", "--config.device.gpus=2"]
    assert plan.main([*recipe, "--gpus=4"]) == 2
    assert "--gpus=4: device.gpus is 2; leave one of them out" in capsys.readouterr().err
