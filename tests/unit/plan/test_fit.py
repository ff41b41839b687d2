"""The search for the fastest options that fit, with made-up memory and speed."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxtune.config import dataset, new_config, resolve
from jaxtune.errors import UserError
from jaxtune.plan.fit import NotCompiled, faster_quantized, fastest, fastest_on_each, overrides
from jaxtune.plan.prediction import Group, TargetGpus, memory_limit
from jaxtune.plan.tables.prices import TYPICAL
from pallas_kernels.gpus import GPUS, peak_flops

# A token takes a second of a GPU at a TFLOP/s.
WORK = Group("product", "forward", "", ms=1.0, launches=1, bytes=0.0, flops=1e12)


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
        more = {"tokens": 1, "groups": (WORK,), "where": TargetGpus("h100")}
        return SimpleNamespace(config=config, needed=needed, fits=needed <= limit, speeds=speeds, **more)

    return plan


def no_state(config, where):
    return 0


@pytest.mark.parametrize(
    ("limit", "gain", "expected"),
    [
        (100, 1.1, "memory.remat=none memory.unroll=True train.micro_batch_size=8 train.grad_accum_steps=1"),
        (85, 1.1, "memory.remat=none memory.unroll=False train.micro_batch_size=8 train.grad_accum_steps=1"),
        (100, 1.0, "memory.remat=none memory.unroll=True"),
        (
            33,
            1.1,
            "memory.remat=none memory.unroll=False",
        ),  # four rows would need remat, and be slower
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
    free = {"h100": 0.0, "rtx4090": 0.0}  # so the first is the cheapest
    best = dict(fastest_on_each(config, [small, h100, pair], free, plan_on, no_state))
    assert list(best) == [pair, h100, small]
    # One GPU takes the options of the larger number of GPUs, without a search; only the fastest machine is unrolled.
    assert [of[1:] for of in made if of[0] == h100] == [("none", False, 4)]
    assert [of[0] for of in made if of[2]] == [pair]
    # The small GPU does not try what is known to need more than it has: 32 GB with two rows, 48 with four.
    assert ("none", False, 2) not in [of[1:] for of in made if of[0] == small]
    assert best[small] and best[small].config.memory.remat == "block"


def test_nothing_is_compiled_where_the_state_does_not_fit(config):
    def plan_on(other, where):
        raise AssertionError("compiled")

    where = TargetGpus("rtx4090", 1)
    assert list(fastest_on_each(config, [where], TYPICAL, plan_on, lambda other, where: 2**36)) == [(where, None)]


def test_fewer_rows_are_not_compiled_if_they_cannot_fit(config):
    """Half of the temporaries of 8 rows, 80 GB, and the state, 16 GB, are more than an H100 has."""
    made, a_row = [], {"none": 20, "dots": 10, "block": 9, "offload": 8}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=8))

    def plan_on(other, where):
        rows, remat = other.train.micro_batch_size, other.memory.remat
        made.append((rows, remat))
        plan = planner(0)(other)
        plan.needed = 1e9 * (16 + rows * a_row[remat])
        plan.fits = plan.needed <= memory_limit(where.gpu)
        return plan

    ((_, best),) = fastest_on_each(config, [TargetGpus("h100")], TYPICAL, plan_on, lambda other, where: 16 * 10**9)
    assert made[:5] == [(8, "none"), (8, "dots"), (8, "block"), (8, "offload"), (4, "dots")]
    assert best.config.train.micro_batch_size == 4 and best.config.memory.remat == "dots"


def test_a_gpu_that_can_be_neither_the_cheapest_nor_the_fastest_is_not_compiled(config):
    """At 60% of its peak an RTX 4090 has 291 TFLOP/s for a dollar an hour; at its peak an H200 has 275, an A100 224."""
    made = []

    def plan_on(other, where):
        plan = planner(100)(other)
        plan.where = where
        plan.speeds = {"central": SimpleNamespace(tokens_per_second=0.6 * peak_flops(GPUS[where.gpu].kind) / 1e12)}
        made.append(where.gpu)
        return plan

    best = dict(fastest_on_each(config, [TargetGpus(gpu) for gpu in GPUS], TYPICAL, plan_on, no_state))
    assert [where.gpu for where in best][:3] == ["b200", "rtx4090", "l40s"]
    skipped = {where.gpu: found for where, found in best.items() if isinstance(found, NotCompiled)}
    assert set(skipped) == set(GPUS) - set(made) == {"a100", "h200"}
    assert skipped["a100"].tokens_per_second == pytest.approx(312)
    assert skipped["a100"].per_token == pytest.approx(TYPICAL["a100"] / 3600 / 312)
    # The options that are the fastest on the first GPU are taken on the others; last, the two best are unrolled.
    assert made == ["b200", "b200", "rtx4090", "l40s", "h100", "rtx5090", "rtx4090", "b200"]


def test_one_machine_that_cannot_run_the_recipe_does_not_end_a_comparison(config):
    able, unable = TargetGpus("h100", 1), TargetGpus("a100", 1)

    def plan_on(other, where):
        if where == unable:
            raise UserError("it needs FP8")
        return planner(40)(other)

    best = dict(fastest_on_each(config, [unable, able], TYPICAL, plan_on, no_state))
    assert str(best[unable]) == "it needs FP8" and best[able].fits
    with pytest.raises(UserError, match="needs FP8"):
        list(fastest_on_each(config, [unable], TYPICAL, plan_on, no_state))


def test_a_quantized_base_is_named_if_it_makes_recomputation_unnecessary(config):
    """It is not chosen, because it changes the losses."""
    best = fastest(config, planner(18))
    quantized = faster_quantized(best, planner(22))
    assert best.config.quant.format is None and best.config.memory.remat == "block"
    assert quantized.config.quant.format == "nf4" and quantized.config.memory.remat == "none"
    assert faster_quantized(best, planner(18)).config.memory.remat == "dots"
    assert faster_quantized(fastest(config, planner(33)), planner(33)) is None
