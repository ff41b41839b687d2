"""What the compiler makes of every kernel: packed rows and grouped queries, forward and backward.

spills.json holds, by card, case and kernel, the bytes of spill stores a thread that are put up with, the most of the
versions of jax that CI runs; what is not in it may have none.
"""

import json
from pathlib import Path

import pytest

from pallas_kernels import report
from pallas_kernels.gpus import GPUS

SPILLS = json.loads(Path(__file__).with_name("spills.json").read_text())
# h200 differs from h100 in its memory alone.
CARDS = tuple(gpu for gpu in GPUS if gpu != "h200")
# float32 and the widest heads take ptxas a minute each.
SLOW = ("float32", "d=192", "d=256")


def cases():
    for gpu in CARDS:
        for case in report.cases_for(gpu):
            slow = [pytest.mark.slow] if any(part in case.inputs for part in SLOW) else []
            yield pytest.param(gpu, case, marks=slow, id=f"{gpu} {case}")


@pytest.mark.parametrize(("gpu", "case"), list(cases()))
def test_fits_the_card_and_spills_no_more_than_known(gpu, case):
    kernels = report.compiled(case, gpu).kernels
    assert kernels
    for kernel in kernels:
        known = SPILLS.get(gpu, {}).get(case.label, {}).get(kernel.name, 0)
        assert kernel.spill_bytes <= known, kernel
        assert kernel.shared_memory <= GPUS[gpu].shared_memory_per_block, kernel
        assert kernel.occupancy > 0, kernel


NARROW = ("d=64", "d=80", "d=96", "d=128")


@pytest.mark.parametrize(
    "case",
    [case for case in report.cases_for("h100") if "float16" in case.inputs and any(d in case.inputs for d in NARROW)],
    ids=str,
)
def test_hopper_uses_wgmma_and_spills_nothing(case):
    """16-bit inputs, head dims to 128: whatever spills.json says."""
    kernels = report.compiled(case, "h100").kernels
    assert len(kernels) == (2 if case.direction == "backward" else 1)
    for kernel in kernels:
        assert kernel.spill_bytes == 0 and kernel.wgmma > 0 and kernel.mma_sync == 0, kernel


@pytest.mark.parametrize("gpu", CARDS)
def test_matrix_units_at_head_dim_128(gpu):
    instruction = {8: "mma_sync", 9: "wgmma", 10: "tcgen05"}[GPUS[gpu].capability[0]]
    for case in report.cases_for(gpu):
        if case.inputs == "bfloat16 d=128":
            assert all(getattr(kernel, instruction) > 0 for kernel in report.compiled(case, gpu).kernels)
