"""Grouped products compiled for GPUs: they use the matrix unit and spill nothing."""

import pytest
from aot.test_kernels import ARCHITECTURES, MATRIX_UNIT

from pallas_kernels import report
from pallas_kernels.gpus import GPUS

COVERS = ("pallas_kernels", ":!pallas_kernels/flash_attention", "tests/aot/test_kernels.py")


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_every_kernel_uses_the_matrix_unit(gpu):
    instruction = MATRIX_UNIT[GPUS[gpu].capability[0]]
    for case in report.cases_for(gpu):
        if case.op == "grouped_quant_matmul" or (case.op == "grouped_matmul" and case.inputs.endswith("gate")):
            for kernel in report.compiled(case, gpu).kernels:
                assert getattr(kernel, instruction) > 0 and kernel.spill_bytes == 0, kernel
