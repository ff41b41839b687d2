"""The formats of quantized weights: the block sizes that each can have, and those that an export may have."""

from typing import Any

from jaxtune.config.schema import QuantOptions

ANY_SIZE = "a number of elements, 2 or more"

# The values of quant.block_size by quant.format: elements of a block, or what has one scale.
BLOCK_SIZES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("nf4", "fp4"), (64, 128, 256, 512)),
    "fp8": (64, 128, 256, "channel", "tensor"),
    "nvfp4": (16,),
    "mxfp4": (32,),
    **dict.fromkeys(("int8", "int4", "weight_only_mix"), ("channel", ANY_SIZE)),
}

# By the name of their quant.format: in the blocks that most such files have, and nf4 with float32 scales.
SCHEMES = {
    "nf4": QuantOptions(format="nf4", block_size=64, double_quant=False),
    "fp8": QuantOptions(format="fp8", block_size=128),
    "nvfp4": QuantOptions(format="nvfp4", block_size=16),
    "int4": QuantOptions(format="int4", block_size=128),
}
