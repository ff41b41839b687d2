"""NVFP4: e2m1 elements, an e4m3 scale per 16 of a row, a float32 scale per matrix (NVIDIA, arXiv:2509.25149)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.quant.array import TINY, block_absmax, by_block, divisors, in_blocks
from jaxtune.quant.format import EncodedMatrix, Format
from jaxtune.quant.options import BLOCK_SIZES, QuantOptions
from pallas_kernels.quant_matmul.elements import ELEMENTS, e4m3

LARGEST, LARGEST_SCALE = 6.0, 448.0
SMALLEST_SCALE = 2.0**-9  # the smallest e4m3 number above zero


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return NVFP4 in blocks of 16 elements of a row."""
    return Nvfp4("e2m1", (1, *BLOCK_SIZES["nvfp4"]), options.four_over_six)


@dataclass(frozen=True)
class Nvfp4(Format):
    """NVFP4.

    Attributes:
        four_over_six: map a block's largest element to 4 instead of 6 if the block's squared error is then smaller.
    """

    four_over_six: bool

    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Round to nearest with two levels of scales.

        A matrix of zeros has scale 1, and its blocks have e4m3's smallest scale, never 0.
        """
        blocks = in_blocks(weight, self.block_of(weight.shape))
        tensor_scale = tensor_scale_of(block_absmax(blocks).max())
        scales = block_scales(blocks, tensor_scale, self.four_over_six)
        codes = nearest_e2m1(blocks / by_block(scales * tensor_scale))
        return EncodedMatrix(codes, e4m3_bits(scales), tensor_scale[None])


def tensor_scale_of(absmax: Float[Array, ""]) -> Float[Array, ""]:
    """Return the scale of a matrix with this amax; amax divided by it is 6 * 448."""
    # With this least value, the product with the smallest scale of a block is not subnormal either.
    return divisors(absmax / (LARGEST * LARGEST_SCALE), least=TINY / SMALLEST_SCALE)


def block_scales(
    blocks: Float[Array, "o/r r i/c c"], tensor_scale: Float[Array, ""], four_over_six: bool
) -> Float[Array, "o/r i/c"]:
    """Return the e4m3 scale of each block; a block is divided by this scale times the scale of the matrix."""
    absmax = block_absmax(blocks)
    scales = _block_scales(absmax, LARGEST, tensor_scale)
    if not four_over_six:
        return scales
    # Cook et al. 2025, arXiv:2512.02010. The tensor scale stays the same, so that no block gets a larger error. Blocks
    # whose amax is near the tensor's gain nothing: 6 / 4 times their scale would exceed 448.
    larger = _block_scales(absmax, 4.0, tensor_scale)
    better = _error(blocks, larger * tensor_scale) < _error(blocks, scales * tensor_scale)
    return jnp.where(better, larger, scales)


def _block_scales(absmax: Float[Array, "o n"], becomes: float, tensor_scale: Float[Array, ""]) -> Float[Array, "o n"]:
    """Return scales, rounded to e4m3, that map the amax of a block to `becomes`."""
    # From below, because a scale of 0 would divide its block by 0.
    clipped = jnp.clip(absmax / becomes / tensor_scale, SMALLEST_SCALE, LARGEST_SCALE)
    return e4m3(e4m3_bits(clipped))


def rounded_up(scales: Float[Array, "o n"]) -> Float[Array, "o n"]:
    """Round scales of blocks up to e4m3."""
    clipped = jnp.clip(scales, SMALLEST_SCALE, LARGEST_SCALE)
    nearest = e4m3_bits(clipped)
    # Positive floats are ordered like their bits, so the next code is the next larger scale.
    return jnp.where(e4m3(nearest) < clipped, e4m3(nearest + 1), e4m3(nearest))


def e4m3_bits(x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Return the bits of the nearest float8_e4m3fn; `e4m3` decodes them.

    The result is bits because XLA for GPUs removes a conversion to a narrower float and back, and with it the rounding.
    """
    return jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)


def _error(blocks: Float[Array, "o/r r i/c c"], scales: Float[Array, "o/r i/c"]) -> Float[Array, "o/r i/c"]:
    """Return the squared error of each block when quantized with these scales."""
    values = ELEMENTS["e2m1"].decode(nearest_e2m1(blocks / by_block(scales)))
    return jnp.square(values * by_block(scales) - blocks).sum(axis=(1, 3))


def nearest_e2m1(x: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Return codes of 0, 0.5, 1, 1.5, 2, 3, 4, 6, the sign in the high bit; ties to even, beyond 6 saturates."""
    # `>` and `>=` alternate, so that a tie goes to the even code.
    a = jnp.abs(x)
    bounds = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    magnitude = sum(above.astype(jnp.uint8) for above in bounds)
    return magnitude | (jnp.signbit(x).astype(jnp.uint8) << 3)
