"""FP8 e4m3 with float32 scales, one per square block (DeepSeek-V3, arXiv:2412.19437), per row or per matrix."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.quant.array import block_absmax, by_block, divisors, in_blocks
from jaxtune.quant.format import EncodedMatrix, Format
from jaxtune.quant.options import QuantOptions

LARGEST = 448.0  # the largest e4m3 number


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return FP8 in square blocks of quant.block_size (128); "channel": a scale per row; "tensor": one per matrix."""
    match options.block_size or 128:
        case "channel":
            block = (1, None)
        case "tensor":
            block = (None, None)
        case int(size):
            block = (size, size)

    return Fp8("e4m3", block)


class Fp8(Format):
    """FP8 e4m3, scaled so that the amax of a block becomes the largest e4m3 number; a block of zeros has scale 1."""

    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Round to nearest, ties to even."""
        blocks = in_blocks(weight, self.block_of(weight.shape))
        absmax = block_absmax(blocks)
        scales = divisors(absmax / LARGEST)
        elements = jnp.clip(blocks / by_block(scales), -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        return EncodedMatrix(jax.lax.bitcast_convert_type(elements, jnp.uint8), scales)
