"""The quantized array of all formats: codes, scales of blocks, and for some formats scales of the scales.

Shapes: o rows and i columns of a weight, r x c elements of a block, b batch, s sequence, m rows of x.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxtune.parallel.layout import Entry, P, by_token, gather
from pallas_kernels import quant_matmul
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.grouped_quant_matmul import grouped_quant_matmul
from pallas_kernels.quant_matmul.elements import ELEMENTS
from pallas_kernels.quant_matmul.layout import block_scales

SCALES_PER_OUTER = 256  # fixed by bitsandbytes' double quantization


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "outer_scales", "offset"),
    meta_fields=("elements", "dtype"),
)
@dataclass(frozen=True)
class QuantizedArray:
    """A matrix (o, i), or a stack of matrices, in 4 or 8 bits. An element is value(code) * scale of its block.

    A pytree: it is scanned, sharded, moved and saved like the arrays it holds.

    Attributes:
        codes: one byte per element, or two elements per byte, the first in the high four bits.
        scales: one per block of r x c elements, blocks in the order of the matrix; float32 or 8-bit codes.
        outer_scales: the scales of 8-bit `scales`. With `offset` (bitsandbytes' double quantization, Dettmers et al.
            2023) `scales` are codes of the dynamic map, and every 256 codes, in row-major order, share one outer
            scale. Without `offset` they are e4m3 and the matrix has one outer scale (NVFP4). 8-bit scales without
            outer scales are e8m0 (MXFP4).
        offset: added to doubly quantized scales.
        elements: the kind of element, a name in ELEMENTS of `pallas_kernels.quant_matmul`.
        dtype: the dtype of the dequantized matrix.
    """

    codes: UInt8[Array, "*stack o i_packed"]
    scales: Any
    outer_scales: Float[Array, "*stack n"] | None
    offset: Float[Array, "*stack"] | None
    elements: str
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized matrix or stack."""
        *stack, rows, columns = self.codes.shape
        return (*stack, rows, columns * ELEMENTS[self.elements].packed)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, over all devices."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @jax.named_scope("dequantization")
    def kernel_scales(self) -> tuple[Array, Array | None]:
        """Return the scales as kernels take them: per block (float32, or e4m3 codes), and per matrix or None.

        Kernels support neither e8m0 nor double quantization, so such scales are expanded to float32 first. Doubly
        quantized scales are scale[n] = DYNAMIC_MAP[code[n]] * outer_scales[n // 256] + offset, with
        n = row * (blocks in a row) + column.
        """
        if self.outer_scales is None:
            return e8m0(self.scales) if self.scales.dtype == jnp.uint8 else self.scales, None
        if self.offset is None:
            return self.scales, self.outer_scales[..., 0]
        # A gather on a mesh with explicit axes needs an output sharding: the result is sharded like the scales' codes.
        spec = jax.typeof(self.scales).sharding.spec
        rows, columns = self.scales.shape[-2:]
        outer = jnp.arange(rows)[:, None] * columns + jnp.arange(columns)[None, :]
        scale_of_scale = self.outer_scales.at[..., outer // SCALES_PER_OUTER].get(out_sharding=spec)
        value = jnp.asarray(DYNAMIC_MAP).at[self.scales].get(out_sharding=spec)
        return value * scale_of_scale + self.offset[..., None, None], None

    def with_kernel_scales(self) -> "QuantizedArray":
        """Return the same array with only float32 block scales, which can be sharded over devices."""
        scales, matrix_scale = self.kernel_scales()
        scales = block_scales(scales, None if matrix_scale is None else matrix_scale[..., None, None])
        return replace(self, scales=scales, outer_scales=None, offset=None)

    def grouped_matmul(self, x: Float[Array, "m i"], groups: Groups) -> Float[Array, "m o"]:
        """Compute x W^T, with W the matrix of each row's group.

        The array is a stack, made by `with_kernel_scales`; call this inside a shard_map.
        """
        return grouped_quant_matmul(x, self.codes, self.scales, groups, elements=self.elements)

    def dequantize(self) -> Float[Array, "*stack o i"]:
        """Return the matrix, or the stack, in `dtype`, sharded like the codes."""
        if self.codes.ndim > 2:
            return jax.lax.map(lambda matrix: matrix.dequantize(), self)
        scales, tensor_scale = self.kernel_scales()
        kernel = partial(quant_matmul.dequantize, elements=self.elements, dtype=self.dtype)
        arguments = (self.codes, scales) if tensor_scale is None else (self.codes, scales, tensor_scale)
        # A device decodes the codes that it has: no block is divided between devices, unless all have its scale.
        specs = tuple(jax.typeof(array).sharding.spec for array in arguments)
        return jax.shard_map(kernel, in_specs=specs, out_specs=specs[0])(*arguments)

    def matmul(self, x: Float[Array, "b s i"], axis: Entry, noise: Any = None) -> Float[Array, "b s o"]:
        """Compute x W^T in the dtype of x, on any mesh; `axis` is the mesh axis, or axes, that shard o.

        Codes and scales are all-gathered, which moves a quarter or half of the bytes of a 16-bit matrix. They are
        dequantized at each use, so again in the backward pass. `noise` is not used.
        """
        weight = jax.tree.map(gather, self)
        scales, tensor_scale = weight.kernel_scales()
        inner = jax.typeof(weight.codes).sharding.spec[1]

        def kernel(x, codes, scales, tensor_scale):
            rows = x.reshape(-1, x.shape[-1])
            y = quant_matmul.quant_matmul(rows, codes, scales, tensor_scale, elements=weight.elements)
            y = y.reshape(*x.shape[:2], -1)
            # If i is sharded (tensor parallelism) each device has a part of the sum over i.
            return y if inner is None else jax.lax.psum(y, inner)

        arguments = (x, weight.codes, scales, tensor_scale)
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        return jax.shard_map(kernel, in_specs=specs, out_specs=P(*by_token(), axis))(*arguments)


def in_blocks(weight: Float[Array, "o i"], block: tuple[int, int]) -> Float[Array, "o/r r i/c c"]:
    """Return the elements of each block, float32.

    XLA fuses arithmetic on this view into one loop over the matrix; scales broadcast to the shape of the matrix would
    be another array of its size.
    """
    rows, columns = block
    o, i = weight.shape
    return weight.reshape(o // rows, rows, i // columns, columns).astype(jnp.float32)


def block_absmax(blocks: Float[Array, "o/r r i/c c"]) -> Float[Array, "o/r i/c"]:
    """Return the amax of each block."""
    return jnp.abs(blocks).max(axis=(1, 3))


TINY = float(np.finfo(np.float32).tiny)  # XLA flushes smaller (subnormal) numbers to zero


def divisors(scales: Float[Array, "*shape"], least: float = TINY) -> Float[Array, "*shape"]:
    """Return scales to divide by: 1 in place of a scale of zero or below `least`, which would become zero."""
    return jnp.where(scales < least, 1.0, scales)


def e8m0(exponents: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Decode float8_e8m0fnu bytes to float32 powers of two, 2^(exponent - 127); 0 is zero, 255 infinite."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def by_block(scales: Float[Array, "o/r i/c"]) -> Float[Array, "o/r 1 i/c 1"]:
    """Reshape values of blocks so that they broadcast over the elements of `in_blocks`."""
    return scales[:, None, :, None]


def pack(codes: UInt8[Array, "*shape i"]) -> UInt8[Array, "*shape i/2"]:
    """Pack two 4-bit codes per byte, the first in the high bits, as bitsandbytes does."""
    return (codes[..., ::2] << 4) | codes[..., 1::2]


def nearest(values: Float[Array, "*shape"], table: np.ndarray) -> UInt8[Array, "*shape"]:
    """Return the index of the nearest entry of an ascending table; ties go to the lower one, as in torch.bucketize."""
    bounds = (table[:-1] + table[1:]) / np.float32(2)
    # XLA fuses comparisons into the loop around them, but not a search, so short tables use comparisons.
    if len(bounds) > 16:
        return jnp.searchsorted(jnp.asarray(bounds), values).astype(jnp.uint8)
    return sum((values > bound).astype(jnp.uint8) for bound in bounds)  # type: ignore[return-value]
