"""Every backend of Mamba-2 on the local GPU. Run with JAX_PLATFORMS=cuda: the default is the CPU."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from kernels.delta_cases import assert_close
from kernels.mamba2_cases import Case, arguments, in_float64, outputs_and_gradients

from pallas_kernels.mamba2_scan import mamba2_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

PACKED = ((200, 1, 55, 1, 43), (64, 64, 1, 170, 1))
CASES = {
    "one document": Case(((300,), (300,)), sizes=(64, 128)),
    "packed, two programs a group": Case(PACKED, heads=16, groups=1, sizes=(64, 128), step=0.02),
    "packed, forgotten at once": Case(PACKED, sizes=(64, 128), step=10.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_equals_the_recurrence_in_float64(backend, dtype, case):
    """The result is also the same in every run."""
    case = replace(case, dtype=dtype)
    given, op = arguments(case), partial(mamba2_scan, backend=backend)
    try:
        found, again = (outputs_and_gradients(op, given) for _ in range(2))
    except ValueError as refusal:
        if "cannot run this on" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert_close(found, in_float64(given), case.tolerance)
