"""INT8 and INT4, weights only: symmetric integers with a float32 scale per row, or per block of a row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.quant.array import block_absmax, by_block, divisors, in_blocks
from jaxtune.quant.format import EncodedMatrix, Format
from jaxtune.quant.options import QuantOptions
from pallas_kernels.quant_matmul.elements import ELEMENTS


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return INT8 or INT4 with a scale per row, or per quant.block_size elements of a row.

    weight_only_mix is ERNIE's: experts in INT4, the other weights in INT8.
    """
    is_expert = options.format == "weight_only_mix" and "experts." in parameter
    elements = "int4" if options.format == "int4" or is_expert else "int8"
    return Integers(elements, (1, options.block_size if isinstance(options.block_size, int) else None))


class Integers(Format):
    """Symmetric integers: the lowest code, -8 or -128, is not used. A block of zeros has scale 1."""

    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Round to nearest, ties to even."""
        bits = ELEMENTS[self.elements].bits
        largest = 2 ** (bits - 1) - 1
        blocks = in_blocks(weight, self.block_of(weight.shape))
        absmax = block_absmax(blocks)
        scales = divisors(absmax / largest)
        integers = jnp.clip(jnp.round(blocks / by_block(scales)), -largest, largest).astype(jnp.int8)
        codes = jax.lax.bitcast_convert_type(integers, jnp.uint8)
        # A negative int8 has ones in its high bits, which would spoil the other code of the byte.
        return EncodedMatrix(codes & 15 if bits == 4 else codes, scales)
