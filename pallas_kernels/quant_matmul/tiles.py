"""The number of rows up to which products use the fused kernel, and the kernel's tiles."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from pallas_kernels.gpus import Capability, Device

# The largest number of rows of x for which 'auto' uses the fused kernel, by compute capability. With more rows, the
# weight is decoded so often that writing it once is faster. GPUs with GDDR memory (8.6, 8.9, 12.0) write slowly. The
# thresholds come from bitsandbytes' dispatcher and are not yet measured with these kernels.
_FUSED_ROWS: dict[Capability, int] = {(8, 0): 64, (8, 6): 256, (9, 0): 64, (10, 0): 64, (12, 0): 256}
# Number of programs that keeps a GPU busy, about four per multiprocessor. With fewer tiles the contraction is split.
PROGRAMS = 512


def fused_rows(device: Device) -> int:
    """Return the largest number of rows for the fused kernel.

    A GPU that is not listed uses the entry of the latest listed compute capability before its own.
    """
    capability = max(device.capability or min(_FUSED_ROWS), min(_FUSED_ROWS))
    return _FUSED_ROWS[max(listed for listed in _FUSED_ROWS if listed <= capability)]


@dataclass(frozen=True)
class QuantTile:
    """Block sizes of a program.

    Attributes:
        block_m: rows of x.
        block_rows: rows of the weight's tile.
        block_columns: columns of the weight's tile.
        warps: warps of the program.
    """

    block_m: int
    block_rows: int
    block_columns: int
    warps: int


def tile_for(m: int) -> QuantTile:
    """Return the tile for m rows of x.

    It was chosen from compile reports: three or more programs fit a multiprocessor, and none spills.
    """
    return QuantTile(block_m=min(64, max(16, pl.next_power_of_2(m))), block_rows=64, block_columns=64, warps=4)
