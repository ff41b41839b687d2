"""Block sizes of the Triton kernels by GPU and head dimension. None spills registers; tests/aot checks this."""

from dataclasses import dataclass

from pallas_kernels.gpus import Capability, Device


@dataclass(frozen=True)
class Tile:
    """Block sizes of one kernel.

    Attributes:
        block_q: queries per block.
        block_k: keys per block.
        warps: warps per program.
        stages: pipeline stages.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# By compute capability, then by the largest head dimension of a row. The sizes were chosen from compile reports: the
# largest blocks that use the GPU's matrix unit without spills and without work that warps repeat, but small enough that
# rows of short documents do not spend much on masked elements. `python -m pallas_kernels.tune` times others on a GPU.
#
# On Hopper, and on older GPUs up to a head dimension of 96, Triton gives each warp of the backward kernels 16 rows:
# blocks of 64 queries (in dkdv, of keys) take 4 warps, blocks of 128 take 8.
_SMALL_SHARED_MEMORY = {
    64: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
    96: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    192: Tiles(Tile(64, 32, 4, 1), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: Tiles(Tile(32, 64, 4, 2), Tile(32, 32, 4, 3), Tile(64, 16, 8, 2)),
}
_TILES: dict[Capability, dict[int, Tiles]] = {
    (8, 0): {
        64: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
        96: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 3), Tile(32, 64, 4, 2)),
        128: Tiles(Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        192: Tiles(Tile(32, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 3)),
        256: Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
    },
    (8, 6): _SMALL_SHARED_MEMORY,
    (9, 0): {
        64: Tiles(Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        96: Tiles(Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
        128: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
        192: Tiles(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(16, 128, 8, 2)),
        # dkdv at 256 computes its logits twice: 16 rows of dk and dv for each warp would take 256 registers per thread,
        # and a thread can have 255.
        256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(16, 64, 8, 2)),
    },
    (10, 0): {
        96: Tiles(Tile(128, 128, 8, 2), Tile(64, 64, 8, 2), Tile(64, 128, 8, 2)),
        128: Tiles(Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(64, 128, 8, 2)),
        192: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        256: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 64, 8, 1)),
    },
    (12, 0): _SMALL_SHARED_MEMORY,
}
# No matrix unit multiplies float32, so operands stay in registers and blocks are small.
_FLOAT32 = {
    64: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    80: Tiles(Tile(16, 16, 4, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    128: Tiles(Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
}


def tiles_for(device: Device, head_dim: int, itemsize: int) -> Tiles:
    """Return the tiles for a GPU, by head dimension (at most 256; 128 in float32) and bytes per element.

    A GPU that is not listed uses the entry of the latest listed compute capability before its own.
    """
    capability = max(device.capability or min(_TILES), min(_TILES))
    by_head_dim = _FLOAT32 if itemsize == 4 else _TILES[max(listed for listed in _TILES if listed <= capability)]
    return by_head_dim[min(largest for largest in by_head_dim if largest >= head_dim)]
