"""bitsandbytes' 4-bit tables and its double quantization of the scales (Dettmers et al. 2023, arXiv:2305.14314).

NF4's 16 values are quantiles of a normal distribution. FP4 has a sign bit, two exponent bits and one mantissa bit.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxtune.quant.array import SCALES_PER_OUTER, TINY, block_absmax, by_block, in_blocks, nearest
from jaxtune.quant.format import EncodedMatrix, Format
from jaxtune.quant.options import BLOCK_SIZES, QuantOptions
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP
from pallas_kernels.quant_matmul.elements import ELEMENTS


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return NF4 or FP4, one scale per quant.block_size (64) elements of a row, in 8 bits with quant.double_quant."""
    assert options.format is not None
    block = options.block_size if isinstance(options.block_size, int) else BLOCK_SIZES["nf4"][0]
    return FourBitFloats(options.format, (1, block), options.double_quant)


@dataclass(frozen=True)
class FourBitFloats(Format):
    """NF4 or FP4; codes equal those of bitsandbytes' `quantize_4bit`.

    Attributes:
        double_quant: quantize the scales to 8 bits.
    """

    double_quant: bool

    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Round to nearest with one scale per block of a row; with `double_quant` the scales are in 8 bits."""
        table = np.asarray(ELEMENTS[self.elements].values, np.float32)
        order = np.argsort(table, stable=True)  # FP4's codes are not ordered by value
        blocks = in_blocks(weight, self.block_of(weight.shape))
        absmax = block_absmax(blocks)
        # By the reciprocal, as in bitsandbytes' kernel: a division would round differently, and some codes would
        # differ.
        elements = jnp.clip(blocks * by_block(1.0 / jnp.maximum(absmax, TINY)), -1, 1)  # bitsandbytes' floor is 1e-38
        codes = jnp.asarray(order, jnp.uint8)[nearest(elements, table[order])]
        return EncodedMatrix(codes, *(doubly_quantized(absmax) if self.double_quant else (absmax,)))


def doubly_quantized(absmax: Float[Array, "o n"]) -> tuple[UInt8[Array, "o n"], Float[Array, " m"], Float[Array, ""]]:
    """Return 8-bit codes of (scales - mean), one scale per 256 codes, and the mean.

    Equal to bitsandbytes' `quantize_blockwise`.
    """
    # Scales are positive: unless their mean is subtracted they would use half of the codes of the signed map.
    offset = absmax.mean()
    # bitsandbytes sees one list of scales, row after row, so a group of 256 may continue in the next row.
    centred = (absmax - offset).reshape(-1)
    groups = jnp.pad(centred, (0, -centred.size % SCALES_PER_OUTER)).reshape(-1, SCALES_PER_OUTER)
    outer = jnp.abs(groups).max(axis=1)
    elements = jnp.clip(groups * (1.0 / jnp.maximum(outer, TINY))[:, None], -1, 1)
    codes = nearest(elements, DYNAMIC_MAP).reshape(-1)[: centred.size]
    return codes.reshape(absmax.shape), outer, offset
