"""The gated delta rule by chunks against transformers' own, forward and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import gated_delta_rule

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")


def test_equals_transformers():
    """Shared key heads, an incomplete last chunk, a given state; transformers supports only one document."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 100, 2, 16)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, d_out = (rng.normal(size=(2, 100, 4, 32)) for _ in range(2))
    log_decay, beta = -rng.exponential(0.3, size=(2, 100, 4)), rng.uniform(size=(2, 100, 4))
    state, d_last = (rng.normal(size=(2, 4, 16, 32)) for _ in range(2))

    inputs = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (q, k, v, log_decay, beta, state)]
    out, last = torch_chunk_gated_delta_rule(*inputs[:5], initial_state=inputs[5], output_final_state=True)
    torch.autograd.backward([out, last], [torch.tensor(x, dtype=torch.float32) for x in (d_out, d_last)])
    expected = [out, last, *(x.grad for x in inputs)]

    def ours(q, k, v, log_decay, beta, state):
        return gated_delta_rule(q, k, v, log_decay, beta, jnp.zeros((2, 100), bool), state)

    found, pull = jax.vjp(jax.jit(ours), *(jnp.asarray(x.detach().numpy()) for x in inputs))
    gradients = pull(tuple(jnp.asarray(x, jnp.float32) for x in (d_out, d_last)))
    for got, wanted in zip((*found, *gradients), expected):
        wanted = wanted.detach().numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
