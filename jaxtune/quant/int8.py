"""INT8, weights only: a scale a row, or quant.block_size elements of it."""

from jaxtune.config.schema import Quant
from jaxtune.quant.format import ANY_SIZE, Format
from jaxtune.quant.integers import integer_format

BLOCK_SIZES = ("channel", ANY_SIZE)


def format_of(options: Quant, parameter: str) -> Format:
    """Symmetric, from -127 to 127."""
    return integer_format(8, options)
