"""Dense causal or windowed attention by cuDNN, through jax's public function: no packing, soft-cap or sinks."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.variant import Request, Variant
from pallas_kernels.gpus import Device

AMPERE, HOPPER = (8, 0), (9, 0)


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    variant: Variant,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "b s h d"]:
    """Softmax attention, differentiable as a whole, of requests that `refuses` does not refuse.

    `implementation` 'xla' computes the same arguments by plain jax, for tests where there is no cuDNN.
    """
    # jax's window counts the keys before the query's own, ours includes it; for cuDNN jax adds it again.
    window = None if variant.window is None else (variant.window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=variant.scale,
        is_causal=variant.causal,
        local_window_size=window,
        implementation=implementation,
    )


def refuses(device: Device, request: Request) -> str | None:
    """Why cuDNN cannot run this request on a device, or None; whatever it would ignore is a reason."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    largest = 256 if device.capability >= HOPPER else 128
    dtype, dim, variant = jnp.dtype(request.dtype), request.head_dim, request.variant
    limits = (
        (dtype not in (jnp.bfloat16, jnp.float16), f"it takes bfloat16 and float16, not {dtype}"),
        (dim % 8 or dim > largest, f"the head dim must be a multiple of 8 and at most {largest} there, not {dim}"),
        (request.packed, "it knows no packing"),
        (variant.soft_cap is not None, "it knows no soft-cap"),
        (request.sinks, "it knows no sinks"),
        (request.return_lse, "it returns no float32 log-sum-exp"),
        (variant.query_offset != 0, "it knows no query offset"),
        (
            request.queries != request.keys,
            f"it wants as many keys as queries, not {request.keys} and {request.queries}",
        ),
    )
    return next((reason for refused, reason in limits if refused), None)
