"""Attention with O(sequence) memory over packed rows: the public op."""

from pallas_kernels.flash_attention.mask import Mask
from pallas_kernels.flash_attention.xla import flash_attention

__all__ = ["Mask", "flash_attention"]
