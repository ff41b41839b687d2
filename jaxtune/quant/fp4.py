"""bitsandbytes' FP4: a sign, two bits of exponent, one of mantissa, a scale a block of a row."""

from typing import TYPE_CHECKING

from jaxtune.quant.format import Format
from jaxtune.quant.four_bit_floats import four_bit_format

if TYPE_CHECKING:
    from jaxtune.config.schema import Quant

BLOCK_SIZES = (64, 128, 256, 512)
OPTIONS = ("double_quant",)


def format_of(options: "Quant", parameter: str) -> Format:
    """By quant.block_size and quant.double_quant."""
    return four_bit_format("fp4", options)
