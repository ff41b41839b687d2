"""The shape of a quantized weight, read from its arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.elements import ELEMENTS, Elements, e4m3

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclass(frozen=True)
class Layout:
    """A weight of (rows, columns), one scale for each block of (block_rows, block_columns) of it."""

    kind: str
    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def elements(self) -> Elements:
        """The kind of element of the codes."""
        return ELEMENTS[self.kind]


@dataclass(frozen=True)
class Request:
    """What a backend is asked for: `refuses` of each backend says whether it can.

    dtype: of the result. rows: of x, None where the weight itself is wanted.
    """

    layout: Layout
    dtype: Any
    rows: int | None = None


def layout_of(codes: Any, scales: Any, tensor_scale: Any, kind: str) -> Layout:
    """The layout of a weight, from shapes and dtypes alone. Raises ValueError where they do not fit together."""
    check(kind in ELEMENTS, f"unknown elements {kind!r}; there are {', '.join(map(repr, ELEMENTS))}")
    check(codes.dtype == jnp.uint8, f"codes are uint8, not {codes.dtype}")
    check(
        scales.dtype in (jnp.float32, jnp.uint8),
        f"scales are float32, or uint8 with the bits of float8_e4m3fn, not {scales.dtype}",
    )
    check(codes.ndim == scales.ndim == 2, f"codes {codes.shape} and scales {scales.shape} must have two dimensions")
    packed = ELEMENTS[kind].packed
    rows, columns = codes.shape[0], codes.shape[1] * packed
    check(rows > 0 and columns > 0, f"codes {codes.shape} are empty")
    for size, blocks, what in ((rows, scales.shape[0], "rows"), (columns, scales.shape[1], "columns")):
        check(
            blocks > 0 and size % blocks == 0,
            f"{blocks} scales do not divide the {size} {what} of the weight into equal blocks",
        )
    block_columns = columns // scales.shape[1]
    check(
        block_columns % packed == 0,
        f"blocks of {block_columns} columns separate the two codes of a byte: a block of {kind} has an even number",
    )
    check(rows * columns < 2**31, f"{rows * columns} elements; fewer than 2^31 are supported")
    if tensor_scale is not None:
        check(
            tensor_scale.shape == () and tensor_scale.dtype == jnp.float32,
            f"tensor_scale is one float32, not {tensor_scale.dtype} {tensor_scale.shape}",
        )
    return Layout(kind, rows, columns, rows // scales.shape[0], block_columns)


def check(right: bool, message: str) -> None:
    """Raises ValueError in the name of the op."""
    if not right:
        raise ValueError(f"quant_matmul: {message}")


def block_scales(scales: jax.Array, tensor_scale: jax.Array | None) -> jax.Array:
    """The factor on the values of each block, float32."""
    scales = e4m3(scales) if scales.dtype == jnp.uint8 else scales
    return scales if tensor_scale is None else scales * tensor_scale
