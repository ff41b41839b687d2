"""Products of rows with the quantized weight of their group, which stays quantized in memory: the public op."""

from functools import partial

import jax
from jaxtyping import Array, Float, UInt8

from pallas_kernels import quant_matmul, registry
from pallas_kernels.gpus import current_device
from pallas_kernels.grouped_matmul import Groups, grouped_matmul
from pallas_kernels.grouped_quant_matmul import fused
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.quant_matmul.layout import FLOATS, QuantRequest, WeightLayout, check, layout_of
from pallas_kernels.registry import ANY_GPU, Backend

__all__ = ["BACKENDS", "grouped_quant_matmul"]

# The largest average number of rows per group for which 'auto' decodes weights within the product. Writing a weight in
# 16 bits and reading it back moves 4 bytes per element. On an H100 this takes about as long as decoding the weight, at
# 15 instructions per element, for three blocks of 128 rows. This is computed from these lower bounds, not measured.
FUSED_ROWS = 384


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _multiply_fused(x: Array, codes: Array, scales: Array, groups: Groups, layout: WeightLayout) -> Array:
    return fused.multiply(x, codes, scales, groups, layout, transposed=False)


def _forward(x: Array, codes: Array, scales: Array, groups: Groups, layout: WeightLayout) -> tuple[Array, tuple]:
    return _multiply_fused(x, codes, scales, groups, layout), (codes, scales, groups)


def _backward(layout: WeightLayout, residuals: tuple, dy: Array) -> tuple[Array, None, None, None]:
    codes, scales, groups = residuals
    return fused.multiply(dy, codes, scales, groups, layout, transposed=True), None, None, None


_multiply_fused.defvjp(_forward, _backward)


def _multiply_dequantized(x: Array, codes: Array, scales: Array, groups: Groups, layout: WeightLayout) -> Array:
    """Dequantize all weights in one kernel at each use, so again in the backward pass, and multiply."""

    @jax.checkpoint
    def product(x: Array, codes: Array, scales: Array) -> Array:
        by_rows = (array.reshape(-1, array.shape[-1]) for array in (codes, scales))
        weights = quant_matmul.dequantize(*by_rows, elements=layout.kind, dtype=x.dtype)
        return grouped_matmul(x, weights.reshape(*codes.shape[:2], -1), groups)

    return product(x, codes, scales)


# In order of preference.
BACKENDS = (
    Backend("fused", _multiply_fused, quant_matmul.fused.refuses, {ANY_GPU: "interpreted tests"}),
    Backend("dequantize", _multiply_dequantized, registry.never_refuses, {ANY_GPU: "tests"}),
)


def grouped_quant_matmul(
    x: Float[Array, "m i"],
    codes: UInt8[Array, "g o packed"],
    scales: Float[Array, "g blocks_o blocks_i"],
    groups: Groups,
    *,
    elements: str,
) -> Float[Array, "m o"]:
    """Compute `grouped_matmul` with weights dequantized from codes and float32 scales, in the dtype of x.

    Codes and scales are the only residuals: the gradient of x is computed from them again. They are frozen. Raises
    ValueError for shapes and dtypes that do not fit together.
    """
    layout = layout_of(codes.reshape(-1, codes.shape[2]), scales.reshape(-1, scales.shape[2]), None, elements)
    check(
        x.ndim == 2 and x.shape[1] == layout.columns, f"x {x.shape} must be (rows, {layout.columns}) for these weights"
    )
    check(x.dtype in FLOATS, f"x has dtype {x.dtype}; bfloat16, float16 and float32 are supported")
    check(codes.shape[1] % layout.block_rows == 0, f"blocks of {layout.block_rows} rows span several weights")
    arrays = (x, codes, scales, groups.block_group, groups.first)
    x, codes, scales, block_group, first = vary_over(varying_axes(*arrays), *arrays)
    groups = Groups(block_group, first, groups.backend)
    rows = len(x) // len(codes)
    # The XLA backend of grouped_matmul needs dequantized weights.
    able_backends = BACKENDS if groups.backend != "xla" and rows <= FUSED_ROWS else BACKENDS[1:]
    request = QuantRequest(layout, x.dtype, rows)
    chosen = registry.choose("grouped_quant_matmul", able_backends, current_device(), request)
    return chosen.run(x, codes, scales, groups, layout)
