"""NVFP4 products: e2m1 elements, an e4m3 scale per 16, a float32 scale per tensor (NVIDIA 2025, arXiv:2509.25149).

A Blackwell GPU multiplies NVFP4 natively. Elsewhere it is emulated: an element times its block's scale is exact in
bfloat16 and products are summed in float32, so the arithmetic is the same and the speed is bfloat16's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt16

from jaxtune.parallel.random import Noise
from jaxtune.precision.hadamard import SIGNED, rotate_blocks
from jaxtune.precision.operands import (
    BLOCK,
    MatmulFormat,
    Operand,
    Operands,
    by_feature,
    global_amax,
    nan_unless_finite,
)
from jaxtune.quant.array import block_absmax, by_block, in_blocks, pack
from jaxtune.quant.nvfp4_format import (
    LARGEST,
    Nvfp4,
    block_scales,
    e4m3_bits,
    nearest_e2m1,
    rounded_up,
    tensor_scale_of,
)
from pallas_kernels.gpus import Device, current_device
from pallas_kernels.quant_matmul import dequantize
from pallas_kernels.quant_matmul.elements import e4m3


@dataclass(frozen=True)
class Nvfp4Matmul(MatmulFormat):
    """Weights in blocks of 16 x 16, so that W and W^T have the same codes; activations and gradients in 1 x 16.

    Attributes:
        stochastic_rounding: round gradients stochastically. Their block scales are rounded up, so that no element
            saturates: saturation would bias the mean.
        hadamard: rotate both sides of dW along the tokens, with fixed random signs.
        four_over_six: choose 4 or 6 as a block's largest element by the squared error (`jaxtune.quant.nvfp4`), for
            weights, activations, and gradients that are rounded to nearest.
    """

    stochastic_rounding: bool
    hadamard: bool
    four_over_six: bool
    delayed: ClassVar[bool] = False

    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Make the operand of W, which serves both products if they are emulated; with native NVFP4 also of W^T."""
        matrix = Nvfp4("e2m1", (BLOCK, BLOCK), self.four_over_six).quantize(weight)
        assert matrix.outer_scales is not None
        # e2m1 has no NaN: a value that is not finite makes the scale of its block NaN, as in `_operand`.
        zero_or_nan = nan_unless_finite(in_blocks(weight, (BLOCK, BLOCK))).sum(axis=(1, 3))
        scales = e4m3_bits(e4m3(matrix.scales) + zero_or_nan)
        forward = Operand(matrix.codes, matrix.outer_scales[None], scales)
        if not native(current_device()):
            return Operands(forward, None)
        # Blocks are square, so W^T has the codes of W: unpack, transpose, and pack again along the other dimension.
        codes = jnp.stack([matrix.codes >> 4, matrix.codes & 15], axis=-1).reshape(weight.shape)
        return Operands(forward, Operand(pack(codes.T), forward.scale, scales.T))

    def forward(self, x, weight, scale):
        """Round both sides to nearest and multiply."""
        rows = x.reshape(-1, x.shape[-1])
        amax = global_amax(rows)
        y = _product(self._nearest(rows, amax), weight, x.dtype)
        return y.reshape(*x.shape[:2], -1), amax

    def backward(self, dy, x, weight, scales, random, dtype):
        """Round dy stochastically by the `random` bits, or to nearest without them, and multiply."""
        # dy is rounded twice, in blocks along o and along tokens. With the same bits, the errors of dx and dW would
        # correlate.
        for_dx, for_dw = (None, None) if random is None else random
        rows, amax = dy.reshape(-1, dy.shape[-1]), global_amax(dy)
        left = self._gradient(rows, amax, None if for_dx is None else for_dx.reshape(rows.shape))
        dx = _product(left, weight, dy.dtype, transposed=True).reshape(*dy.shape[:2], -1)
        if x is None:
            return dx, None, amax
        dy, x = by_feature(dy), by_feature(x)
        # Only for dW, as in the paper: a rotation along o for dx would have to rotate the weight too.
        if self.hadamard:
            dy, x = rotate_blocks(dy, SIGNED), rotate_blocks(x, SIGNED)
        if for_dw is not None:  # after the rotation, padded positions are no longer 0 and need random bits too
            padding = -for_dw.shape[1] % BLOCK
            for_dw = by_feature(jnp.pad(for_dw, ((0, 0), (0, padding), (0, 0)), "wrap"))
        # The rotation changes the amax of both sides, so each is taken again.
        left = self._gradient(dy, global_amax(dy), for_dw)
        return dx, _product(left, self._nearest(x, global_amax(x)), dtype), amax

    def random(self, noise: Noise | None, shape: tuple[int, ...]) -> Any:
        """Draw 16 random bits per element of dy, once for dx and once for dW; they depend on noise and global row.

        Raises ValueError if gradients are rounded stochastically and noise is None.
        """
        if not self.stochastic_rounding:
            return None
        if noise is None:
            raise ValueError("stochastic rounding of gradients needs noise, which only training has")

        def bits(site: Noise) -> UInt16[Array, "b s o"]:
            of_row = lambda row: jax.random.bits(jax.random.fold_in(site.key, row), shape[1:], "uint16")  # noqa: E731
            return jax.vmap(of_row)(site.rows)

        return bits(noise.site("dx")), bits(noise.site("dw"))

    def _nearest(self, x: Float[Array, "m k"], absmax: Float[Array, ""]) -> Operand:
        blocks, tensor_scale = in_blocks(x, (1, BLOCK)), tensor_scale_of(absmax)
        scales = block_scales(blocks, tensor_scale, self.four_over_six)
        return _operand(blocks, scales, tensor_scale, nearest_e2m1)

    def _gradient(
        self, dy: Float[Array, "m k"], absmax: Float[Array, ""], random: UInt16[Array, "m k"] | None
    ) -> Operand:
        if random is None:
            return self._nearest(dy, absmax)
        blocks, tensor_scale = in_blocks(dy, (1, BLOCK)), tensor_scale_of(absmax)
        # Midpoints of 2^16 intervals: their mean is exactly 1/2, and none is 0 or 1, so numbers on the grid stay there.
        uniform = (in_blocks(random, (1, BLOCK)) + 0.5) / 2**16
        scales = rounded_up(block_absmax(blocks) / LARGEST / tensor_scale)
        return _operand(blocks, scales, tensor_scale, lambda x: stochastic_e2m1(x, uniform))


def stochastic_e2m1(x: Float[Array, "*shape"], uniform: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Round x to one of its two neighbours, the nearer one more likely, and return codes; unbiased up to |x| = 6."""
    magnitude = jnp.abs(x)
    # The spacing of e2m1 below 2, from 2 to 4, and from 4 to 6.
    step = jnp.where(magnitude < 2.0, 0.5, jnp.where(magnitude < 4.0, 1.0, 2.0))
    # The value is on the grid already; `nearest_e2m1` only encodes it.
    return nearest_e2m1(jnp.copysign(jnp.floor(magnitude / step + uniform) * step, x))


def _operand(
    blocks: Float[Array, "m 1 n 16"], scales: Float[Array, "m n"], tensor_scale: Float[Array, ""], rounding
) -> Operand:
    """Make one side of a product from blocks and their scales; a value that is not finite makes its block NaN."""
    codes = pack(rounding(blocks / by_block(scales * tensor_scale))).reshape(len(blocks), -1)
    scales = scales + nan_unless_finite(blocks).sum(axis=(1, 3))  # NaN goes into the scale because e2m1 has none
    return Operand(codes, tensor_scale.reshape(1, 1), e4m3_bits(scales))


def native(device: Device) -> bool:
    """Return whether the device multiplies NVFP4 natively: on Blackwell XLA passes such products to cuDNN."""
    return device.capability is not None and device.capability[0] == 10


def _product(a: Operand, b: Operand, dtype: Any, transposed: bool = False) -> Float[Array, "m n"]:
    """Compute a b^T; if emulated and `transposed`, a b.

    Emulated, the operand of W serves both products; with native NVFP4 dx gets the operand of W^T.
    """
    if native(current_device()):
        product = _in_nvfp4(a, b)
    else:
        contracted = ((1,), (0 if transposed else 1,)), ((), ())
        product = jax.lax.dot_general(_values(a), _values(b), contracted, preferred_element_type=jnp.float32)
    return (product * (a.scale * b.scale)).astype(dtype)


def _in_nvfp4(a: Operand, b: Operand) -> Float[Array, "m n"]:
    """Compute a b^T without the tensor scales.

    float4_e2m1fn takes the low four bits of a byte first, so the two elements of a byte swap, on both sides alike.
    """

    def side(operand: Operand) -> tuple[Array, Array]:
        assert operand.block_scales is not None
        # This adds a last axis, the two elements of a byte. The reshape below folds it, and adds the batch axis of
        # scaled_matmul.
        codes = jax.lax.bitcast_convert_type(operand.codes, jnp.float4_e2m1fn)
        rows = len(operand.codes)
        scales = jax.lax.bitcast_convert_type(operand.block_scales, jnp.float8_e4m3fn)
        # scaled_matmul wants a scale for each row; a weight has one for 16 rows.
        scales = jnp.repeat(scales, rows // len(scales), axis=0)
        return codes.reshape(1, rows, -1), scales[None]

    (left, left_scales), (right, right_scales) = side(a), side(b)
    product = jax.nn.scaled_matmul(left, right, left_scales, right_scales, preferred_element_type=jnp.float32)
    return product[0]


def _values(operand: Operand) -> Float[Array, "m k"]:
    """Return elements times the scales of their blocks, exact in bfloat16."""
    assert operand.block_scales is not None
    return dequantize(operand.codes, operand.block_scales, elements="e2m1", dtype=jnp.bfloat16)
