"""The shape of a quantized weight, read from its arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quant_matmul.elements import ELEMENTS, Elements, e4m3

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclass(frozen=True)
class WeightLayout:
    """The shape of a weight (rows, columns) that has one scale per block of (block_rows, block_columns).

    Attributes:
        kind: the kind of element, a key of ELEMENTS.
        rows: rows of the weight.
        columns: columns of the dequantized weight.
        block_rows: rows of a block.
        block_columns: columns of a block.
    """

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
class QuantRequest:
    """The static properties of a call, from which each backend's `refuses` decides whether it can run it.

    Attributes:
        layout: the shape of the weight.
        dtype: dtype of the result.
        rows: rows of x; None: the result is the weight itself.
    """

    layout: WeightLayout
    dtype: Any
    rows: int | None = None


def layout_of(codes: Any, scales: Any, tensor_scale: Any, kind: str) -> WeightLayout:
    """Return the layout of a weight from shapes and dtypes. Raises ValueError if they do not fit together."""
    check(kind in ELEMENTS, f"unknown elements {kind!r}; choose from {', '.join(map(repr, ELEMENTS))}")
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
        f"blocks of {block_columns} columns separate the two codes of a byte; a block of {kind} needs an even number",
    )
    # The kernels compute offsets as signed 32-bit integers.
    check(rows * columns < 2**31, f"{rows * columns} elements; fewer than 2^31 are supported")
    if tensor_scale is not None:
        check(
            tensor_scale.shape == () and tensor_scale.dtype == jnp.float32,
            f"tensor_scale is one float32, not {tensor_scale.dtype} {tensor_scale.shape}",
        )
    return WeightLayout(kind, rows, columns, rows // scales.shape[0], block_columns)


def check(ok: bool, message: str) -> None:
    """Raise ValueError with the op's name in the message, unless `ok`."""
    if not ok:
        raise ValueError(f"quant_matmul: {message}")


def block_scales(scales: jax.Array, tensor_scale: jax.Array | None) -> jax.Array:
    """Return the float32 factor of the values of each block."""
    scales = e4m3(scales) if scales.dtype == jnp.uint8 else scales
    return scales if tensor_scale is None else scales * tensor_scale
