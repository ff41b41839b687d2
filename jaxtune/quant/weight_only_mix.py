"""ERNIE's weight_only_mix: experts in INT4, everything else in INT8."""

from jaxtune.config.schema import Quant
from jaxtune.quant.format import ANY_SIZE, Format
from jaxtune.quant.integers import integer_format

BLOCK_SIZES = ("channel", ANY_SIZE)


def format_of(options: Quant, parameter: str) -> Format:
    """By the parameter's name."""
    return integer_format(4 if ".experts." in f".{parameter}" else 8, options)
