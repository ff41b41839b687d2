"""What the compiler makes of every kernel: packed rows, grouped queries, quantized weights, forward and backward.

spills.json holds, by GPU, case and kernel, the bytes of spill stores a thread that are put up with, the most of the
versions of jax that CI runs; what is not in it may have none.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pallas_kernels import report
from pallas_kernels.case import Case
from pallas_kernels.flash_attention.tiles import tiles_for
from pallas_kernels.gpus import GPUS, Device

# The kernels themselves, not the choice among them.
COVERS = ("pallas_kernels", ":!pallas_kernels/*/__init__.py", "tests/aot/spills.json")

SPILLS = json.loads(Path(__file__).with_name("spills.json").read_text())
# One of each architecture: h200 differs from h100 in its memory alone, l40s from rtx4090 in what matters to no kernel.
ARCHITECTURES = tuple(gpu for gpu in GPUS if gpu not in ("h200", "l40s"))
NARROW = ("d=64", "d=80", "d=96", "d=128")
# The instruction of the matrix unit, by the major compute capability.
MATRIX_UNIT = {8: "mma_sync", 9: "wgmma", 10: "tcgen05", 12: "mma_sync"}
# How many times an element's exponential is computed where no tile without a spill does it once, for the reason that
# flash_attention/tiles.py gives: by GPU, kernel and head dimension.
REPEATED = {("h100", "dkdv", 256): 2}


def compiled_for(gpus: Iterable[str], wanted: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """A test for each GPU and wanted case. Tests of the same two have one id, by which conftest.py deals them out."""

    def parameters():
        for gpu in gpus:
            cases = report.cases_for(gpu)
            firsts = {(case.op, case.backend, case.direction): case for case in reversed(cases)}.values()
            for case in filter(wanted, cases):
                # Every version of jax brings its own Triton, Mosaic and LLVM: one case shows that a kernel still
                # lowers and spills nothing. The others are shapes of the same code.
                marks = [pytest.mark.every_jax] if case in firsts else []
                yield pytest.param(gpu, case, marks=marks, id=f"{gpu} {case}")

    return pytest.mark.parametrize(("gpu", "case"), list(parameters()))


@compiled_for(ARCHITECTURES)
def test_fits_the_gpu_and_spills_no_more_than_known(gpu, case):
    kernels = report.compiled(case, gpu).kernels
    assert kernels
    for kernel in kernels:
        known = SPILLS.get(gpu, {}).get(case.label, {}).get(kernel.name, 0)
        assert kernel.spill_bytes <= known, kernel
        assert kernel.shared_memory <= GPUS[gpu].shared_memory_per_block, kernel
        assert kernel.occupancy > 0, kernel


@compiled_for(
    ["h100"],
    lambda case: case.op == "flash_attention" and "float16" in case.inputs and any(d in case.inputs for d in NARROW),
)
def test_attention_on_hopper_uses_wgmma_and_spills_nothing(gpu, case):
    """16-bit inputs, head dims to 128: whatever spills.json says."""
    kernels = report.compiled(case, gpu).kernels
    assert len(kernels) == (2 if case.direction == "backward" else 1)
    for kernel in kernels:
        assert kernel.spill_bytes == 0 and kernel.wgmma > 0 and kernel.mma_sync == 0, kernel


@compiled_for(ARCHITECTURES, lambda case: case.inputs == "bfloat16 d=128")
def test_attention_at_head_dim_128_uses_the_matrix_unit(gpu, case):
    instruction = MATRIX_UNIT[GPUS[gpu].capability[0]]
    assert all(getattr(kernel, instruction) > 0 for kernel in report.compiled(case, gpu).kernels)


@compiled_for(
    ARCHITECTURES, lambda case: case.backend == "triton" and re.fullmatch(r"bfloat16 d=\d+", case.inputs) is not None
)
def test_attention_repeats_no_work(gpu, case):
    """A tile too small for its warps is computed by several of them: each element costs them an exponential each."""
    q = case.arguments[0]
    tiles = tiles_for(Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability), q.shape[-1], q.dtype.itemsize)
    for kernel in report.compiled(case, gpu).kernels:
        name = kernel.name.removeprefix("flash_attention_")
        tile = getattr(tiles, name)
        executed = kernel.exponentials * kernel.threads / (tile.block_q * tile.block_k)
        # The forward kernel has one more for each row, in every thread that holds a part of it.
        most = REPEATED.get((gpu, name, q.shape[-1]), 1.5 if name == "forward" else 1)
        assert 1 <= executed <= most, (tile, kernel)


@compiled_for(["a100", "h100", "b200"], lambda case: case.op == "quant_matmul")
def test_the_fused_product_uses_the_matrix_unit(gpu, case):
    (kernel,) = report.compiled(case, gpu).kernels
    # The newer units multiply no fewer than 64 rows of x; in the forward pass the weight stands for them.
    few = case.direction == "backward" and "m=16" in case.inputs
    assert getattr(kernel, "mma_sync" if few else MATRIX_UNIT[GPUS[gpu].capability[0]]) > 0, kernel


@compiled_for(["h100"], lambda case: case.op == "dequantize")
def test_a_dequantized_weight_is_made_by_one_kernel_alone(gpu, case):
    compiled = report.compiled(case, gpu)
    (kernel,) = compiled.kernels
    assert kernel.occupancy == 1
    assert compiled.memory.temporaries == 0
    assert not re.search(r" (fusion|copy|transpose)\(", compiled.hlo)
