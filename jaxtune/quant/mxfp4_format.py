"""MXFP4: e2m1 elements, a power of two per 32 of a row, its exponent in a byte (OCP Microscaling 1.0)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.config.schema import Quant
from jaxtune.config.schemes import BLOCK_SIZES
from jaxtune.quant.array import QuantizedArray, block_absmax, by_block, e8m0, in_blocks, pack
from jaxtune.quant.format import Format
from jaxtune.quant.nvfp4_format import nearest_e2m1

LARGEST_EXPONENT = 2  # of e2m1


def format_of(options: Quant, parameter: str) -> Format:
    """Blocks of 32 elements of a row."""
    return Mxfp4("e2m1", (1, *BLOCK_SIZES["mxfp4"]))


class Mxfp4(Format):
    """What was MXFP4 before keeps its values, whichever of two scales a block had."""

    def quantize(self, weight: Float[Array, "o i"]) -> QuantizedArray:
        """Rounded to nearest, ties to even; what is between 6 and 8 times its scale becomes 6 times that."""
        blocks = in_blocks(weight, self.block_of(weight.shape))
        scales = exponents(block_absmax(blocks))
        codes = pack(nearest_e2m1(blocks / by_block(e8m0(scales)))).reshape(len(weight), -1)
        return QuantizedArray(codes, scales, None, None, self.elements, weight.dtype)


def exponents(absmax: Float[Array, "o n"]) -> UInt8[Array, "o n"]:
    """floor(log2(absmax)) - 2, plus 127; at least 1, below which scales are subnormal, which XLA flushes to zero."""
    # The exponent of a float32 as its bits say it: a logarithm may be wrong at a power of two.
    exponent = jax.lax.bitcast_convert_type(absmax, jnp.int32) >> 23
    return jnp.maximum(exponent - LARGEST_EXPONENT, 1).astype(jnp.uint8)
