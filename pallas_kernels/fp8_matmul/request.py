"""The static properties of a call of fp8_matmul, and the check that its arguments fit together."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

# DeepSeek-V3's blocks (arXiv:2412.19437): a scale per 1 x 128 of the activations and per 128 x 128 of the weight.
BLOCK = 128


@dataclass(frozen=True)
class Fp8Request:
    """The static properties of a call: x is (rows, depth), the weight is (columns, depth).

    Attributes:
        rows: rows of x.
        columns: rows of the weight, which are columns of the result.
        depth: contracted size.
        x_dtype: dtype of x.
        x_scales: shape of the scales of x.
        weight_scales: shape of the scales of the weight.
        dtype: dtype of the result.
        fast_accumulation: the tensor core may sum over all of depth.
    """

    rows: int
    columns: int
    depth: int
    x_dtype: Any
    x_scales: tuple[int, int]
    weight_scales: tuple[int, int]
    dtype: Any
    fast_accumulation: bool = False


def request_for(
    x: Float[Array, "m k"],
    weight: Float[Array, "n k"],
    x_scale: Float[Array, "r c"],
    weight_scale: Float[Array, "s d"],
    dtype: Any = jnp.bfloat16,
    fast_accumulation: bool = False,
) -> Fp8Request:
    """Return the request for these arguments. Raises ValueError for dtypes and shapes that do not fit together."""

    def check(ok: bool, message: str) -> None:
        if not ok:
            raise ValueError(f"fp8_matmul: {message}")

    check(x.ndim == weight.ndim == 2, f"x {x.shape} must be (m, k) and the weight {weight.shape} (n, k)")
    check(x.shape[1] == weight.shape[1], f"x {x.shape} and the weight {weight.shape} differ in k, their last dimension")
    bitcast = "jax.lax.bitcast_convert_type makes FP8 of uint8 codes"
    check(
        x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2), f"x is float8_e4m3fn or float8_e5m2, not {x.dtype}; {bitcast}"
    )
    check(weight.dtype == jnp.float8_e4m3fn, f"the weight is float8_e4m3fn, not {weight.dtype}; {bitcast}")
    dtype = jnp.dtype(dtype)
    results = (jnp.bfloat16, jnp.float16, jnp.float32)
    check(dtype in results, f"the result can be bfloat16, float16 or float32, not {dtype}")
    for name, array, scale in (("x_scale", x, x_scale), ("weight_scale", weight, weight_scale)):
        check(scale.dtype in (jnp.float32, dtype), f"{name} is float32 or {dtype} like the result, not {scale.dtype}")
        fits = scale.ndim == 2 and all(
            blocks > 0 and size % blocks == 0 for size, blocks in zip(array.shape, scale.shape)
        )
        check(
            fits,
            f"{name} {scale.shape} does not cut {array.shape} into equal blocks: (1, 1) is one scale for all, "
            f"{(array.shape[0], 1)} one per row, ({array.shape[0]} / r, {array.shape[1]} / c) one per r x c",
        )
    return Fp8Request(
        rows=x.shape[0],
        columns=weight.shape[0],
        depth=x.shape[1],
        x_dtype=x.dtype,
        x_scales=(x_scale.shape[0], x_scale.shape[1]),
        weight_scales=(weight_scale.shape[0], weight_scale.shape[1]),
        dtype=dtype,
        fast_accumulation=fast_accumulation,
    )
