"""Every backend of the gated delta rule on the local GPU. Run with JAX_PLATFORMS=cuda: the default is the CPU."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from kernels.delta_cases import Case, arguments, assert_close, in_float64, outputs_and_gradients

from pallas_kernels.gated_delta_rule import BACKENDS, gated_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

PACKED = ((200, 1, 55, 1, 43), (64, 64, 1, 170, 1))
CASES = {
    "one document": Case(((300,), (300,)), heads=(2, 2), sizes=(128, 128)),
    "packed, three value heads a key head": Case(PACKED, heads=(2, 6), sizes=(128, 128)),
    "packed, unlike sizes": Case(PACKED, heads=(1, 2), sizes=(64, 128)),
    "packed, forgotten at once": Case(PACKED, heads=(1, 2), sizes=(128, 64), decay=10.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_equals_the_recurrence_in_float64(backend, dtype, case):
    """The result is also the same in every run."""
    case = replace(case, dtype=dtype)
    given, op = arguments(case), partial(gated_delta_rule, backend=backend)
    try:
        found, again = (outputs_and_gradients(op, given) for _ in range(2))
    except ValueError as refusal:
        if "cannot run this on" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert_close(found, in_float64(given), case.tolerance)
