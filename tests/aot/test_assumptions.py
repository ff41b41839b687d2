"""The programs of the suite's piece `assumptions`, compiled for an H200: each must show its rate."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import assumptions, models, qwen3
from gpu.predicted import ReadProgram

from jaxtune.host.process import GPU_OPTIONS
from jaxtune.plan.calibration import PLAUSIBLE, with_value
from jaxtune.plan.launches import count_executed, read_program
from jaxtune.plan.prediction import xla_options
from jaxtune.plan.rates import KERNELS, SCENARIOS
from pallas_kernels import aot

GPU, CENTRAL = "h200", SCENARIOS["central"]
# For each program, the kinds of launches that occur more than a few times, and their number.
LAUNCHES = {
    "sustained": {"product": 8},
    "narrow": {"product": 8},
    "fp8": {"FP8 product": 8},
    "bandwidth": {"fusion": 1},
    "l2": {"fusion": 32},
    "launch": {"fusion": 256},
    "stream": {"fusion": 256},
    "graph": {"fusion": 320},
    "sync": {"fusion": 129},
    **{kernel: {kernel: 1} for kernel in KERNELS},
}
EXECUTED = {"launch": {"graphs": 1}, "stream": {"graphs": 0, "outside": 256}, "graph": {"graphs": 64}}


def compiled(rate: str, case: str) -> ReadProgram:
    mesh = jax.sharding.Mesh(np.array(aot.devices(GPU)), ("one",), axis_types=(jax.sharding.AxisType.Explicit,))
    held = []

    def arguments():
        held.append(assumptions.PROGRAMS[rate][0](case, False))
        return held[0].arguments

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(arguments)
    options = {**GPU_OPTIONS, **xla_options(GPU), **held[0].options}
    made = aot.compile_for(GPU, held[0].function, *shapes, mesh=mesh, compiler_options=options)
    program = read_program(made.hlo)
    return ReadProgram(GPU, program, count_executed(made.thunks, program.trips))


CASES = [(rate, case) for rate, (_, cases) in assumptions.PROGRAMS.items() for case in cases]


@pytest.mark.parametrize(("rate", "case"), CASES, ids=map("/".join, CASES))
def test_a_program_is_what_it_is_taken_for_and_shows_its_rate(rate, case):
    read = compiled(rate, case)
    found = {}
    for launch in read.program.launches:
        found[launch.kind] = found.get(launch.kind, 0) + launch.count
    assert LAUNCHES[rate].items() <= found.items(), found
    assert EXECUTED.get(rate, {}).items() <= read.executed.items(), read.executed
    assert not read.program.unknown and read.program.syncs == (64 if rate == "sync" else 0)
    # An error of the measurement causes an error of the rate that is at most five times as large.
    central = dataclasses.asdict(CENTRAL).get(rate) or KERNELS[rate][9]
    other = with_value(CENTRAL, rate, 0.9 * central)
    before, after = read.seconds(CENTRAL), read.seconds(other)
    assert abs(after / before - 1) > 0.02, (before, after)
    value, said = assumptions.solve(rate, after, CENTRAL, read.seconds)
    assert value == pytest.approx(0.9 * central, rel=1e-4), said
    low, high = PLAUSIBLE[rate]
    assert low < central < high


def test_the_flag_changes_the_program_that_it_is_checked_with():
    mesh = models.one_device_mesh(aot.devices(GPU)[0])
    with jax.set_mesh(mesh):
        step = models.training(qwen3.CONFIGS["small"])
    stacks = {}
    for flag in (False, True):
        options = {**GPU_OPTIONS, assumptions.ZERO_INIT: flag}
        made = aot.compile_for(GPU, step.step, *step.arguments, mesh=mesh, compiler_options=options)
        stacks[flag] = made.custom_calls.get("AllocateBuffer", 0)
    assert stacks[False] == 0 < stacks[True], stacks
