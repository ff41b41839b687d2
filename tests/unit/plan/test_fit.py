"""The search for the fastest options that fit, with made-up memory and speed."""

from types import SimpleNamespace

import pytest

from jaxtune.config import dataset, new_config, resolve
from jaxtune.errors import UserError
from jaxtune.plan.fit import faster_quantized, fastest, fastest_on_each, overrides
from jaxtune.plan.prediction import TargetGpus, memory_limit


@pytest.fixture
def config():
    made = new_config()
    made.model.path, made.lora.enabled = "some/model", True
    made.data.datasets = (dataset(path="x.jsonl"),)
    made.train.micro_batch_size, made.train.grad_accum_steps = 2, 4
    return resolve(made, "here")


def planner(limit, gain=1.1):
    """Memory grows with the micro-batch and shrinks with remat and quantization; a larger micro-batch is faster."""

    def plan(config):
        rows, remat = config.train.micro_batch_size, config.memory.remat
        activations = rows * {"none": 8, "dots": 4, "block": 1, "offload": 0.5}[remat]
        speed = {"none": 1.0, "dots": 0.9, "block": 0.8, "offload": 0.7}[remat] * gain ** (rows.bit_length() - 1)
        needed = activations + (4 if config.quant.format else 16) + (8 if config.memory.unroll else 0)
        speed *= 1.05 if config.memory.unroll else 1.0
        speeds = {"central": SimpleNamespace(tokens_per_second=speed)}
        return SimpleNamespace(config=config, needed=needed, fits=needed <= limit, speeds=speeds)

    return plan


@pytest.mark.parametrize(
    ("limit", "gain", "expected"),
    [
        (100, 1.1, "memory.remat=none memory.unroll=True train.micro_batch_size=8 train.grad_accum_steps=1"),
        (85, 1.1, "memory.remat=none train.micro_batch_size=8 train.grad_accum_steps=1"),  # no room to unroll
        (100, 1.0, "memory.remat=none memory.unroll=True"),
        (33, 1.1, "memory.remat=none"),  # a micro-batch of four would need rematerialisation, and be slower
        (18, 1.1, "memory.remat=block"),
        (17, 1.1, "memory.remat=offload"),
        (16.5, 1.1, "memory.remat=offload train.micro_batch_size=1 train.grad_accum_steps=8"),
        (10, 1.1, "memory.remat=block quant.format=nf4"),
        (4.5, 1.1, "memory.remat=offload train.micro_batch_size=1 train.grad_accum_steps=8 quant.format=nf4"),
    ],
)
def test_the_fastest_that_fits(config, limit, gain, expected):
    best = fastest(config, planner(limit, gain))
    assert overrides(config, best.config) == [f"--config.{option}" for option in expected.split()]


def test_nothing_fits(config):
    assert fastest(config, planner(3)) is None


def test_few_plans_are_made_for_several_machines(config):
    """Memory needs are in units of a GB; an H100 has 79, an RTX 4090 23.9."""
    made = []

    def plan_on(other, where):
        plan = planner(memory_limit(where.gpu) / 1e9)(other)
        plan.needed, plan.where = plan.needed * 1e9, where
        made.append((where, other.memory.remat, other.memory.unroll, other.train.micro_batch_size))
        return plan

    h100, pair, small = TargetGpus("h100", 1), TargetGpus("h100", 2), TargetGpus("rtx4090", 1)
    best = fastest_on_each(config, [small, h100, pair], plan_on, lambda other, where: 0)
    assert list(best) == [small, h100, pair]
    # What the larger number of GPUs had is taken on one GPU, without a search.
    assert [of[1:] for of in made if of[0] == h100] == [("none", True, 4)]
    # The small GPU does not try what is known to need more than it has: 32 GB with two rows, 48 with four.
    assert ("none", False, 2) not in [of[1:] for of in made if of[0] == small]
    assert best[small] and best[small].config.memory.remat == "block"


def test_nothing_is_compiled_where_the_state_does_not_fit(config):
    def plan_on(other, where):
        raise AssertionError("compiled")

    where = TargetGpus("rtx4090", 1)
    assert fastest_on_each(config, [where], plan_on, lambda other, where: 2**36) == {where: None}


def test_one_machine_that_cannot_run_the_recipe_does_not_end_a_comparison(config):
    able, unable = TargetGpus("h100", 1), TargetGpus("a100", 1)

    def plan_on(other, where):
        if where == unable:
            raise UserError("it needs FP8")
        return planner(40)(other)

    best = fastest_on_each(config, [unable, able], plan_on, lambda other, where: 0)
    assert str(best[unable]) == "it needs FP8" and best[able].fits
    with pytest.raises(UserError, match="needs FP8"):
        fastest_on_each(config, [unable], plan_on, lambda other, where: 0)


def test_a_quantized_base_is_named_if_it_makes_recomputation_unnecessary(config):
    """It is not chosen, because it changes the losses."""
    best = fastest(config, planner(18))
    quantized = faster_quantized(best, planner(22))
    assert best.config.quant.format is None and best.config.memory.remat == "block"
    assert quantized.config.quant.format == "nf4" and quantized.config.memory.remat == "none"
    assert faster_quantized(best, planner(18)).config.memory.remat == "dots"
    assert faster_quantized(fastest(config, planner(33)), planner(33)) is None
