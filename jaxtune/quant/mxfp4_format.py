"""MXFP4 (OCP Microscaling 1.0): e2m1 elements, and one power-of-two scale per 32 of a row, as an 8-bit exponent."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.quant.array import block_absmax, by_block, e8m0, in_blocks
from jaxtune.quant.format import EncodedMatrix, Format
from jaxtune.quant.nvfp4_format import nearest_e2m1
from jaxtune.quant.options import BLOCK_SIZES, QuantOptions

LARGEST_EXPONENT = 2  # the largest e2m1 exponent


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return MXFP4 in blocks of 32 elements of a row."""
    return Mxfp4("e2m1", (1, *BLOCK_SIZES["mxfp4"]))


class Mxfp4(Format):
    """MXFP4. Weights that were MXFP4 before keep their values, whichever of two possible scales a block had."""

    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Round to nearest, ties to even; elements between 6 and 8 times the scale become 6 times it."""
        blocks = in_blocks(weight, self.block_of(weight.shape))
        scales = exponents(block_absmax(blocks))
        return EncodedMatrix(nearest_e2m1(blocks / by_block(e8m0(scales))), scales)


def exponents(absmax: Float[Array, "o n"]) -> UInt8[Array, "o n"]:
    """Return the biased exponents of the scales: floor(log2(absmax)) - 2 + 127, and at least 1.

    Below 1 scales are subnormal, and XLA flushes them to zero.
    """
    # The exponent is read from the bits of the float32 because a logarithm may be wrong at a power of two.
    exponent = jax.lax.bitcast_convert_type(absmax, jnp.int32) >> 23
    # An amax has sign 0, so the shift left only the biased exponent. e8m0 has the same bias of 127.
    return jnp.maximum(exponent - LARGEST_EXPONENT, 1).astype(jnp.uint8)
