"""Products of rows with the quantized weight of their group, which stays as it is stored: the public op."""

from functools import partial

import jax
from jaxtyping import Array, Float, UInt8

from pallas_kernels import quant_matmul, registry
from pallas_kernels.gpus import current_device
from pallas_kernels.grouped_matmul import Groups, grouped_matmul
from pallas_kernels.grouped_quant_matmul import fused
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.quant_matmul.layout import FLOATS, Layout, Request, check, layout_of
from pallas_kernels.registry import ANY_CARD, Backend

__all__ = ["BACKENDS", "grouped_quant_matmul"]

# The most rows of a group, on average, for which 'auto' decodes weights within the product. Writing one in 16 bits and
# reading it back moves 4 bytes an element: on an H100 that takes about as long as decoding it, at 15 instructions an
# element, for three blocks of 128 rows. By these floors, not measured.
FUSED_ROWS = 384


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _decoded_within(x: Array, codes: Array, scales: Array, groups: Groups, layout: Layout) -> Array:
    return fused.multiply(x, codes, scales, groups, layout, transposed=False)


def _forward(x: Array, codes: Array, scales: Array, groups: Groups, layout: Layout) -> tuple[Array, tuple]:
    return _decoded_within(x, codes, scales, groups, layout), (codes, scales, groups)


def _backward(layout: Layout, residuals: tuple, dy: Array) -> tuple[Array, None, None, None]:
    codes, scales, groups = residuals
    return fused.multiply(dy, codes, scales, groups, layout, transposed=True), None, None, None


_decoded_within.defvjp(_forward, _backward)


def _with_whole_weights(x: Array, codes: Array, scales: Array, groups: Groups, layout: Layout) -> Array:
    """All weights are written at each use, in one kernel, again in the backward pass."""

    @jax.checkpoint
    def product(x: Array, codes: Array, scales: Array) -> Array:
        by_rows = (array.reshape(-1, array.shape[-1]) for array in (codes, scales))
        weights = quant_matmul.dequantize(*by_rows, elements=layout.kind, dtype=x.dtype)
        return grouped_matmul(x, weights.reshape(*codes.shape[:2], -1), groups)

    return product(x, codes, scales)


# In order of preference.
BACKENDS = (
    Backend("fused", _decoded_within, quant_matmul.fused.refuses, {ANY_CARD: "interpreted tests"}),
    Backend("dequantize", _with_whole_weights, registry.never_refuses, {ANY_CARD: "tests"}),
)


def grouped_quant_matmul(
    x: Float[Array, "m i"],
    codes: UInt8[Array, "g o packed"],
    scales: Float[Array, "g blocks_o blocks_i"],
    groups: Groups,
    *,
    elements: str,
) -> Float[Array, "m o"]:
    """`grouped_matmul` with the weights that `dequantize` makes of codes and float32 scales, in the dtype of x.

    The gradient of x is made from codes and scales again, which are the only residuals; they are frozen.

    Raises ValueError for shapes and dtypes that do not fit together.
    """
    layout = layout_of(codes.reshape(-1, codes.shape[2]), scales.reshape(-1, scales.shape[2]), None, elements)
    check(
        x.ndim == 2 and x.shape[1] == layout.columns, f"x {x.shape} must be (rows, {layout.columns}) for these weights"
    )
    check(x.dtype in FLOATS, f"x has dtype {x.dtype}; bfloat16, float16 and float32 can run")
    check(codes.shape[1] % layout.block_rows == 0, f"blocks of {layout.block_rows} rows are of several weights")
    arrays = (x, codes, scales, groups.block_group, groups.first)
    x, codes, scales, block_group, first = vary_over(varying_axes(*arrays), *arrays)
    groups = Groups(block_group, first, groups.backend)
    rows = len(x) // len(codes)
    # XLA multiplies by whole weights.
    able = BACKENDS if groups.backend != "xla" and rows <= FUSED_ROWS else BACKENDS[1:]
    request = Request(layout, x.dtype, rows)
    chosen = registry.choose("grouped_quant_matmul", able, current_device(), request)
    return chosen.run(x, codes, scales, groups, layout)
