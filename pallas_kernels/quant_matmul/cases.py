"""Compile cases of quantized weights: a 4096 x 12288 weight in every kind of element, and products with it."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.quant_matmul import fused, triton
from pallas_kernels.quant_matmul.elements import ELEMENTS
from pallas_kernels.quant_matmul.layout import QuantRequest, WeightLayout, layout_of

ROWS, COLUMNS = 4096, 12288
DTYPE = jnp.dtype("bfloat16")
# Elements, and rows and columns of a block with one scale.
BLOCKS = (
    ("nf4", 1, 64),
    ("fp4", 1, 64),
    ("e2m1", 1, 16),  # NVFP4: E4M3 scales times one float32 scale
    ("e2m1", 1, 32),  # MXFP4
    ("int4", 1, 128),
    ("e4m3", 128, 128),
    ("int8", 1, COLUMNS),
)
# These cover a table of values, 8-bit scales, two scales per row of a tile, blocks of several rows, and one scale per
# row. Each of the other blocks decodes like one of these.
MULTIPLIED = tuple(block for block in BLOCKS if block[0] not in ("fp4", "int4"))


def _weight(
    elements: str, height: int, width: int
) -> tuple[WeightLayout, tuple[jax.ShapeDtypeStruct | None, ...], str]:
    """Return a weight's layout, its arrays (codes, scales, tensor scale) and its name."""
    codes = jax.ShapeDtypeStruct((ROWS, COLUMNS // ELEMENTS[elements].packed), jnp.uint8)
    narrow = (elements, width) == ("e2m1", 16)
    scales = jax.ShapeDtypeStruct((ROWS // height, COLUMNS // width), jnp.uint8 if narrow else jnp.float32)
    arrays = codes, scales, jax.ShapeDtypeStruct((), jnp.float32) if narrow else None
    return layout_of(*arrays, elements), arrays, f"{elements} {height}x{width} {DTYPE}"


def _dequantize() -> Iterator[Case]:
    for block in BLOCKS:
        layout, weight, inputs = _weight(*block)
        function = partial(triton.dequantize, layout=layout, dtype=DTYPE)
        refuses = bind_request(triton.refuses, QuantRequest(layout, DTYPE))
        yield Case("dequantize", "triton", "forward", inputs, function, weight, refuses)


def _quant_matmul() -> Iterator[Case]:
    """Yield products with 16 and 256 rows, forward and backward."""
    for block in MULTIPLIED:
        layout, weight, name = _weight(*block)
        for rows in (16, 256):
            refuses = bind_request(fused.refuses, QuantRequest(layout, DTYPE, rows))
            for direction, size in (("forward", COLUMNS), ("backward", ROWS)):
                arguments = (jax.ShapeDtypeStruct((rows, size), DTYPE), *weight)
                function = partial(fused.multiply, layout=layout, transposed=direction == "backward")
                yield Case("quant_matmul", "fused", direction, f"m={rows} {name}", function, arguments, refuses)


CASES = (*_dequantize(), *_quant_matmul())
