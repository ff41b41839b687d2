"""bitsandbytes' FP4: a sign, two bits of exponent, one of mantissa, a scale a block of a row."""

from jaxtune.config.schema import Quant
from jaxtune.quant.format import Format
from jaxtune.quant.four_bit_floats import four_bit_format

BLOCK_SIZES = (64, 128, 256, 512)


def format_of(options: Quant, parameter: str) -> Format:
    """By quant.block_size and quant.double_quant."""
    return four_bit_format("fp4", options)
