"""Every attention backend on the local GPU. Run with JAX_PLATFORMS=cuda: the tests' default is the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_cases import TOLERANCE, Case, arguments, in_float64

from pallas_kernels.flash_attention import BACKENDS, flash_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU, or JAX_PLATFORMS does not name it"),
]

PACKED = ((700, 1, 250), (300, 500, 100))
CASES = {
    "dense": Case(queries=1024, heads=(8, 2), head_dim=128, dtype="bfloat16"),
    "packed": Case(queries=1024, heads=(8, 2), head_dim=128, dtype="bfloat16", documents=PACKED),
    "everything": Case(1024, 1024, (4, 2), 64, "bfloat16", True, 200, 0, False, PACKED, 20.0, True),
    "head dim 96": Case(queries=1024, heads=(4, 2), head_dim=96, dtype="float16", documents=PACKED),
    "head dim 512": Case(queries=1024, heads=(4, 2), head_dim=512, dtype="bfloat16", documents=PACKED),
    "float32": Case(queries=1024, heads=(4, 2), head_dim=64, documents=PACKED),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_equals_float64(backend, case):
    given = arguments(case)

    @jax.jit
    @jax.default_matmul_precision("highest")  # as in float32 steps; plain XLA would use TF32 by default
    def gradients(q, k, v):
        out, pull = jax.vjp(
            lambda q, k, v: flash_attention(
                q, k, v, case.mask, soft_cap=case.soft_cap, sinks=given.sinks, backend=backend
            ),
            q,
            k,
            v,
        )
        return dict(zip(("out", "d_q", "d_k", "d_v"), (out, *pull(given.d_out))))

    try:
        got = gradients(given.q, given.k, given.v)
    except ValueError as refusal:
        if "cannot run this on" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    expected = in_float64(case, given._replace(d_lse=jnp.zeros_like(given.d_lse)))
    for name, value in got.items():
        error = np.abs(np.asarray(value, np.float64) - expected[name]).max()
        assert error <= TOLERANCE[case.dtype] * np.abs(expected[name]).max(), name
