"""The compiled code of every kernel: packed rows, grouped queries, quantized weights, forward and backward.

spills.json holds the tolerated bytes of spill stores a thread by GPU, case and kernel: the maximum over the versions of
jax that CI runs. Kernels that it does not list must not spill.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from kernels.kept_ir_cases import kernels_from, lowered

from pallas_kernels import aot, report
from pallas_kernels.case import Case
from pallas_kernels.flash_attention.tiles import tiles_for
from pallas_kernels.gpus import GPUS, Device

# The kernels themselves, not the choice between them.
COVERS = ("pallas_kernels", ":!pallas_kernels/*/__init__.py", "tests/aot/spills.json")

SPILLS = json.loads(Path(__file__).with_name("spills.json").read_text())
ARCHITECTURES = ("a100", "rtx4090", "h100", "b200", "rtx5090")  # a GPU of each
NARROW = ("d=64", "d=72", "d=80", "d=96", "d=128")
# The instruction of the matrix unit, by the major compute capability.
MATRIX_UNIT = {8: "mma_sync", 9: "wgmma", 10: "tcgen05", 12: "mma_sync"}
# How often an element's exponential is computed, for cases in which no tile without a spill does it once, for the
# reason in flash_attention/tiles.py: by GPU, kernel and head dimension.
REPEATED = {("h100", "dkdv", 256): 2}


def compiled_for(gpus: Iterable[str], wanted: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """A test for each GPU and wanted case. Tests of one pair share an id, by which conftest.py distributes them."""

    def parameters():
        for gpu in gpus:
            cases = report.cases_for(gpu)
            firsts = {(case.op, case.backend, case.direction): case for case in reversed(cases)}.values()
            for case in filter(wanted, cases):
                # Every version of jax has its own Triton, Mosaic and LLVM: one case shows that a kernel still lowers
                # and spills nothing. The others are shapes of the same code.
                marks = [pytest.mark.every_jax] if case in firsts else []
                yield pytest.param(gpu, case, marks=marks, id=f"{gpu} {case}")

    return pytest.mark.parametrize(("gpu", "case"), list(parameters()))


def one_of_each_kernel():
    """The first case of each kernel of Pallas-Triton on four GPUs; on every version of jax, the cases for an H100."""
    for gpu in ("a100", "rtx4090", "h100", "b200"):
        cases = [case for case in report.cases_for(gpu) if case.backend != "mosaic"]
        for case in {(case.op, case.backend, case.direction): case for case in reversed(cases)}.values():
            marks = [pytest.mark.every_jax] if gpu == "h100" else []
            yield pytest.param(gpu, case, marks=marks, id=f"{gpu} {case}")


def test_every_architecture_has_its_gpu_here():
    assert {GPUS[gpu].capability for gpu in ARCHITECTURES} == {gpu.capability for gpu in GPUS.values()}


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
    """16-bit inputs, head dims up to 128, regardless of spills.json."""
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
    """If a tile is too small for its warps, several warps compute it, and each computes every exponential."""
    q = case.arguments[0]
    tiles = tiles_for(Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability), q.shape[-1], q.dtype.itemsize)
    for kernel in report.compiled(case, gpu).kernels:
        name = kernel.name.removeprefix("flash_attention_")
        tile = getattr(tiles, name)
        executed = kernel.exponentials * kernel.threads / (tile.block_q * tile.block_k)
        # The forward kernel has one more for each row, in every thread that holds a part of the row.
        most = REPEATED.get((gpu, name, q.shape[-1]), 1.5 if name == "forward" else 1)
        assert 1 <= executed <= most, (tile, kernel)


@compiled_for(["a100", "h100", "b200"], lambda case: case.op == "quant_matmul")
def test_the_fused_product_uses_the_matrix_unit(gpu, case):
    (kernel,) = report.compiled(case, gpu).kernels
    # Newer units multiply at least 64 rows; in the forward pass, the weight provides these rows.
    few = case.direction == "backward" and "m=16" in case.inputs
    assert getattr(kernel, "mma_sync" if few else MATRIX_UNIT[GPUS[gpu].capability[0]]) > 0, kernel


@compiled_for(["h100"], lambda case: case.op == "dequantize")
def test_a_dequantized_weight_is_made_by_one_kernel_alone(gpu, case):
    compiled = report.compiled(case, gpu)
    (kernel,) = compiled.kernels
    assert kernel.occupancy == 1
    assert compiled.memory.temporaries == 0
    assert not re.search(r" (fusion|copy|transpose)\(", compiled.hlo)


@pytest.mark.parametrize(("gpu", "case"), list(one_of_each_kernel()))
def test_kept_ir_compiles_without_pallas_triton_to_the_same_code(gpu, case, tmp_path):
    by_pallas = report.compiled(case, gpu).kernels
    with kernels_from(tmp_path):
        lowered(case.function, *case.arguments, gpu=gpu)
    with kernels_from(tmp_path, pallas=False):
        kept = aot.compile_for(gpu, case.function, *case.arguments).kernels
    # XLA compiles a kernel twice if it is called at two places in the source, and numbers the second.
    figures = [{replace(kernel, name=re.sub(r"__\d+$", "", kernel.name)) for kernel in k} for k in (by_pallas, kept)]
    assert kept and figures[0] == figures[1]
