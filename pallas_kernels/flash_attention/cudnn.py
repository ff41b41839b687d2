"""Dense causal or windowed attention by cuDNN, through jax's public function: no packing, soft-cap or sinks."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.flash_attention.variant import AttentionRequest, Variant
from pallas_kernels.gpus import Device

AMPERE, HOPPER = (8, 0), (9, 0)


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s n d"],
    v: Float[Array, "b s n d"],
    variant: Variant,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "b s h d"]:
    """Compute softmax attention, differentiable as a whole, for a request that `refuses` accepts.

    `implementation='xla'` computes it from the same arguments by plain jax, for tests without cuDNN.
    """
    # jax's window counts only the keys before the query's own key; ours includes it. jax adds it again for cuDNN.
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


def refuses(device: Device, request: AttentionRequest) -> str | None:
    """Return why cuDNN cannot run this request on a device, or None; an argument that it would ignore is a reason."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    largest = 256 if device.capability >= HOPPER else 128
    dtype, dim, variant = jnp.dtype(request.dtype), request.head_dim, request.variant
    limits = (
        (dtype not in (jnp.bfloat16, jnp.float16), f"it takes bfloat16 and float16, not {dtype}"),
        (dim % 8 or dim > largest, f"the head dim must be a multiple of 8 and at most {largest} there, not {dim}"),
        (request.packed, "it does not support packing"),
        (request.key_end, "it does not support an end of keys for each query (MaskSpec.key_end)"),
        (variant.soft_cap is not None, "it does not support a soft-cap"),
        (request.sinks, "it does not support sinks"),
        (request.return_lse, "it does not return a float32 log-sum-exp"),
        (variant.query_offset != 0, "it does not support a query offset"),
        (
            request.queries != request.keys,
            f"it needs as many keys as queries, not {request.keys} keys and {request.queries} queries",
        ),
    )
    return next((reason for refused, reason in limits if refused), None)
