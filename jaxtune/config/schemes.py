"""Formats for quantized exports."""

from jaxtune.config.schema import Quant

# By quant.format, with the block sizes most common in published checkpoints; nf4 has float32 scales.
SCHEMES = {
    "nf4": Quant(format="nf4", block_size=64, double_quant=False),
    "fp8": Quant(format="fp8", block_size=128),
    "nvfp4": Quant(format="nvfp4", block_size=16),
    "int4": Quant(format="int4", block_size=128),
}
