"""The module of each value of quant.format."""

from jaxtune.quant import four_bit_floats, fp8_format, integers, mxfp4_format, nvfp4_format
from jaxtune.quant.format import Format
from jaxtune.quant.options import QuantOptions

MODULES = {
    "nf4": four_bit_floats,
    "fp4": four_bit_floats,
    "fp8": fp8_format,
    "nvfp4": nvfp4_format,
    "mxfp4": mxfp4_format,
}
MODULES |= dict.fromkeys(("int8", "int4", "weight_only_mix"), integers)


def format_of(options: QuantOptions, parameter: str) -> Format:
    """Return the format that quant.format selects for a parameter, by its name inside a layer ("mlp.down.weight")."""
    assert options.format is not None
    return MODULES[options.format].format_of(options, parameter)
