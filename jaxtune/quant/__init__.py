"""Frozen weights in 4 and 8 bits: quantized arrays that a matmul accepts, and the formats they come in.

A format is a module here of the format's name; its README says how to add one.
"""

from importlib import import_module
from types import ModuleType

from jaxtune.config.schema import Quant
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.format import ANY_SIZE, Format

__all__ = ["ANY_SIZE", "Format", "QuantizedArray", "format_module", "format_of"]


def format_module(name: str) -> ModuleType:
    """The module of a format: `format_of`, and the BLOCK_SIZES that it can have."""
    return import_module(f"{__name__}.{name}")


def format_of(options: Quant, parameter: str) -> Format:
    """The format that quant.format asks for, for a parameter by its name inside its layer ("mlp.down.weight")."""
    assert options.format is not None
    return format_module(options.format).format_of(options, parameter)
