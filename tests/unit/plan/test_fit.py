"""The search for the fastest options that fit, with made-up memory and speed."""

from types import SimpleNamespace

import pytest

from jaxtune.config import dataset, new_config, resolve
from jaxtune.plan.fit import fastest, overrides


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
