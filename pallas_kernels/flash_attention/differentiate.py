"""The derivative that kernel backends share: the backward pass except for the kernels of dq, dk and dv."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The name of the forward kernel's results in policies of jax.checkpoint: a policy that saves them avoids a second run.
RESIDUALS = "flash_attention"


@cache
def attention(forward: Callable, backward: Callable) -> Callable:
    """Make a differentiable attention from a backend's two functions.

    The result maps (q, k, v, first, end, sinks, variant) to (out (b, s, h, d), log-sum-exp (b, h, s) in float32).
    forward(q, k, v, first, end, sinks, variant) returns both; backward(q, k, v, first, end, lse, delta, d_out, variant)
    returns dq, dk and dv, where delta (b, h, s) is sum(d_out * out) minus the cotangent of the log-sum-exp.
    """

    def attend(q, k, v, first, end, sinks, variant):
        return forward(q, k, v, first, end, sinks, variant)

    def attend_forward(q, k, v, first, end, sinks, variant):
        out, lse = checkpoint_name(forward(q, k, v, first, end, sinks, variant), RESIDUALS)
        return (out, lse), (q, k, v, first, end, sinks, out, lse)

    def attend_backward(variant, residuals, cotangents):
        q, k, v, first, end, sinks, out, lse = residuals
        d_out, d_lse = cotangents
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - d_lse
        # A query that sees no key gives no gradient, even if it or its cotangents are NaN.
        delta = jnp.where((first < end)[:, None, :], delta, 0.0)
        dq, dk, dv = backward(q, k, v, first, end, lse, delta, d_out, variant)
        if sinks is None:
            return dq, dk, dv, None, None, None
        # A sink is a key without a value, so only the softmax's normalisation (delta) reaches its gradient.
        weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
        d_sinks = -jnp.sum(jnp.where((first < end)[:, None, :], weight, 0.0) * delta, axis=(0, 2))
        return dq, dk, dv, None, None, d_sinks.astype(sinks.dtype)

    differentiable = jax.custom_vjp(attend, nondiff_argnums=(6,))
    differentiable.defvjp(attend_forward, attend_backward)
    return differentiable
