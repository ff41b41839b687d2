"""Which products take the fused kernel, and its tiles."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from pallas_kernels.gpus import Capability, Device

# The most rows of x for which 'auto' takes the fused kernel, by compute capability: with more, the weight is decoded so
# often that writing it once is quicker. GPUs with GDDR memory (8.6, 8.9, 12.0) write slowly. The thresholds are those
# of bitsandbytes' dispatcher, not yet measured with these kernels.
_FUSED_ROWS: dict[Capability, int] = {(8, 0): 64, (8, 6): 256, (9, 0): 64, (10, 0): 64, (12, 0): 256}
# Programs that keep a GPU busy: about four for each multiprocessor. Fewer tiles are cut in splits.
PROGRAMS = 512


def fused_rows(device: Device) -> int:
    """The most rows for the fused kernel. A GPU that is not listed takes the row of the latest one before it."""
    capability = max(device.capability or min(_FUSED_ROWS), min(_FUSED_ROWS))
    return _FUSED_ROWS[max(listed for listed in _FUSED_ROWS if listed <= capability)]


@dataclass(frozen=True)
class Tile:
    """Rows of x, and rows and columns of the weight, that a program works on at once; its warps."""

    block_m: int
    block_rows: int
    block_columns: int
    warps: int


def tile_for(m: int) -> Tile:
    """The tile for m rows of x. From compile reports: three programs or more fit a multiprocessor, and none spills."""
    return Tile(block_m=min(64, max(16, pl.next_power_of_2(m))), block_rows=64, block_columns=64, warps=4)
