"""Linear attention with the gated delta rule: the public op and its backends."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import registry
from pallas_kernels.gated_delta_rule import triton, xla
from pallas_kernels.gated_delta_rule.triton import RESIDUALS
from pallas_kernels.gpus import current_device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "RESIDUALS", "gated_delta_rule"]

BACKENDS = (
    Backend("triton", triton.gated_delta_rule, triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("xla", xla.gated_delta_rule, registry.never_refuses, {ANY_GPU: "tests"}),
)


def gated_delta_rule(
    q: Float[Array, "b s hk dk"],
    k: Float[Array, "b s hk dk"],
    v: Float[Array, "b s hv dv"],
    log_decay: Float[Array, "b s hv"],
    beta: Float[Array, "b s hv"],
    starts: Bool[Array, "b s"],
    initial_state: Float[Array, "b hv dk dv"] | None = None,
    scale: float | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "b s hv dv"], Float[Array, "b hv dk dv"]]:
    """Compute the gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    Returns the outputs in the dtype of v, and the last state. A value head has a state S (dk, dv) in float32. Each
    token decays it, corrects its value for k, and reads it:

        S <- exp(log_decay) S;   S <- S + k (beta (v - S^T k))^T;   out = scale S^T q

    Shapes: b batch, s sequence, hk key heads, hv value heads, dk and dv sizes of a key and a value head. hv is a
    multiple of hk: consecutive groups of value heads share a head of q and k.

    log_decay is at most 0; `scale` is dk^-0.5 unless given. q and k are not normalised here: models with a norm apply
    it before. The state is `initial_state`, or zeros, before the first token, and zeros before each token that starts a
    document, so that nothing passes between documents, forward or backward.

    Differentiable in all arguments except `starts`, through both results; the backward pass keeps at most one state per
    64 tokens. Under `jax.checkpoint` the forward kernels run again, unless the policy saves the arrays named RESIDUALS
    (the XLA backend always runs again).

    Inside a `shard_map`, batch and heads may be sharded, hk and hv alike. `backend`: 'auto', or a name in BACKENDS.
    Raises ValueError for shapes that do not fit together, and registry.CannotRun for a backend that cannot run.
    """
    _check(q, k, v, log_decay, beta, starts, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if initial_state is None:
        initial_state = jnp.zeros((len(v), v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    chosen = registry.choose("gated_delta_rule", BACKENDS, current_device(), (q, v), backend)
    arrays = (q, k, v, log_decay, beta, starts, initial_state)
    # Inside a shard_map, zeros made above vary over no mesh axis; the backends need arguments that vary alike.
    return chosen.run(*vary_over(varying_axes(*arrays), *arrays), scale)


def _check(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, starts: Any, state: Any) -> None:
    def check(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(f"gated_delta_rule: {message}")

    check(q.ndim == v.ndim == 4, "q, k and v are (batch, sequence, heads, size)")
    check(q.shape == k.shape, f"q {q.shape} and k {k.shape} differ in shape")
    check(q.shape[:2] == v.shape[:2], f"k {k.shape} and v {v.shape} differ in batch or sequence")
    check(v.shape[2] % k.shape[2] == 0, f"{v.shape[2]} value heads are not a multiple of {k.shape[2]} key heads")
    check(
        q.dtype == k.dtype == v.dtype, f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal"
    )
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        check(x.shape == v.shape[:3], f"{name} {x.shape} is not {v.shape[:3]}")
    check(starts.shape == v.shape[:2], f"starts {starts.shape} is not {v.shape[:2]}")
    check(starts.dtype == jnp.bool_, f"starts has dtype {starts.dtype}; it must be bool")
    if state is not None:
        state_shape = (len(v), v.shape[2], k.shape[3], v.shape[3])
        check(state.shape == state_shape, f"initial_state {state.shape} is not {state_shape}")
        check(state.dtype == jnp.float32, f"initial_state has dtype {state.dtype}; it must be float32")
