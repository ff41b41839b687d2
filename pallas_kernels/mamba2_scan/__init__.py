"""The recurrence of Mamba-2, a state space model: the public op and its backends."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import registry
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.mamba2_scan import reference, triton, xla
from pallas_kernels.mamba2_scan.triton import RESIDUALS
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "RESIDUALS", "mamba2_scan"]


def _refuses_several_tokens(device: Device, request: tuple[Any, Any]) -> str | None:
    return "it computes one token after another" if request[0].shape[1] > 1 else None


BACKENDS = (
    # In decoding a row has one token, which needs no chunk.
    Backend("xla", reference.mamba2_scan, _refuses_several_tokens, {ANY_GPU: "tests"}),
    Backend("triton", triton.mamba2_scan, triton.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("xla", xla.mamba2_scan, registry.never_refuses, {ANY_GPU: "tests"}),
)


def mamba2_scan(
    x: Float[Array, "b s h p"],
    step: Float[Array, "b s h"],
    rate: Float[Array, " h"],
    write: Float[Array, "b s g n"],
    read: Float[Array, "b s g n"],
    skip: Float[Array, " h"],
    starts: Bool[Array, "b s"],
    initial_state: Float[Array, "b h p n"] | None = None,
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "b s h p"], Float[Array, "b h p n"]]:
    """Compute the recurrence of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060).

    Returns the outputs in the dtype of x, and the last state. A head has a state S (p, n) in float32. Each token decays
    it, writes to it, and reads it:

        S <- exp(rate step) S + step x write^T;   out = S read + skip x

    In the paper's letters, step is dt, rate is A, write is B, read is C and skip is D. Shapes: b batch, s sequence, h
    heads of p features, g groups, n features of the state. h is a multiple of g: consecutive heads share a group's
    `write` and `read`, which have the dtype of x.

    step is at least 0 and rate at most 0, both float32 as skip is. A token with a step of 0 does not change the state.
    The state is `initial_state`, or zeros, before the first token, and zeros before each token that starts a document,
    so that nothing passes between documents, forward or backward.

    Differentiable in all arguments except `starts`, through both results; the backward pass keeps at most one state per
    64 tokens. Under `jax.checkpoint` the forward kernels run again, unless the policy saves the arrays named RESIDUALS
    (the XLA backend always runs again).

    Inside a `shard_map`, batch and heads may be sharded, h and g alike. `backend`: 'auto', or a name in BACKENDS.
    Raises ValueError for shapes that do not fit together, and registry.CannotRun for a backend that cannot run.
    """
    _check(x, step, rate, write, read, skip, starts, initial_state)
    if initial_state is None:
        initial_state = jnp.zeros((len(x), *x.shape[2:], write.shape[3]), jnp.float32)
    chosen = registry.choose("mamba2_scan", BACKENDS, current_device(), (x, write), backend)
    arrays = (x, step, rate, write, read, skip, starts, initial_state)
    # Inside a shard_map, zeros made above vary over no mesh axis; the backends need arguments that vary alike.
    return chosen.run(*vary_over(varying_axes(*arrays), *arrays))


def _check(x: Any, step: Any, rate: Any, write: Any, read: Any, skip: Any, starts: Any, state: Any) -> None:
    def check(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(f"mamba2_scan: {message}")

    check(x.ndim == write.ndim == 4, "x is (batch, sequence, heads, size), write and read (batch, sequence, groups, n)")
    check(write.shape == read.shape, f"write {write.shape} and read {read.shape} differ in shape")
    check(x.shape[:2] == write.shape[:2], f"x {x.shape} and write {write.shape} differ in batch or sequence")
    check(x.shape[2] % write.shape[2] == 0, f"{x.shape[2]} heads are not a multiple of {write.shape[2]} groups")
    dtypes = x.dtype, write.dtype, read.dtype
    check(len(set(dtypes)) == 1, f"x, write and read have dtypes {', '.join(map(str, dtypes))}; they must be equal")
    check(step.shape == x.shape[:3], f"step {step.shape} is not {x.shape[:3]}")
    for name, one in (("rate", rate), ("skip", skip)):
        check(one.shape == x.shape[2:3], f"{name} {one.shape} is not {x.shape[2:3]}")
    check(starts.shape == x.shape[:2], f"starts {starts.shape} is not {x.shape[:2]}")
    check(starts.dtype == jnp.bool_, f"starts has dtype {starts.dtype}; it must be bool")
    if state is not None:
        state_shape = (len(x), *x.shape[2:], write.shape[3])
        check(state.shape == state_shape, f"initial_state {state.shape} is not {state_shape}")
        check(state.dtype == jnp.float32, f"initial_state has dtype {state.dtype}; it must be float32")
