"""Time block sizes on this machine's GPU and print the line of a kernel's table to paste into its source.

    python -m pallas_kernels.tune flash_attention --head-dim 128 --dtype bfloat16

Kernels are not tuned while a program runs: the tables are in the source, so that the same code compiles everywhere.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import triton
from pallas_kernels.flash_attention.mask import MaskSpec, intervals
from pallas_kernels.flash_attention.tiles import Tile, Tiles
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.gpus import current_device

BLOCKS, WARPS, STAGES = (32, 64, 128), (4, 8), (1, 2, 3)
KERNELS = ("forward", "dq", "dkdv")
REPEATS = 15


def candidates(smoke: bool) -> list[Tile]:
    """Return the tiles to try; tiles that are too large for the GPU fail to compile."""
    if smoke:
        return [Tile(16, 16, 4, 1), Tile(16, 32, 4, 1)]
    return [Tile(*sizes) for sizes in itertools.product(BLOCKS, BLOCKS, WARPS, STAGES)]


def flash_attention_kernels(
    rows: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, interpret: bool
) -> dict[str, Callable[[Tile], Callable[[], Any]]]:
    """Return for each kernel a function that compiles it with a tile.

    Inputs are normally distributed, in packed causal rows of four documents.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, length, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes))
    starts = (np.array([0, 0.38, 0.69, 0.9]) * length).astype(np.int32)
    key_start = starts[np.searchsorted(starts, np.arange(length), side="right") - 1]
    bounds = intervals(MaskSpec(key_start=jnp.tile(key_start, (rows, 1))), rows, length, length)
    variant = Variant(head_dim**-0.5, None, True, None, 0)

    def forward(q, k, v, first, end, *, tiles=None):
        return triton.forward(q, k, v, first, end, None, variant, tiles=tiles, interpret=interpret)

    def backward(q, k, v, first, end, lse, delta, d_out, *, tiles):
        arrays = (q, k, v, first, end, lse, delta, d_out)
        return triton.backward(*arrays, variant, tiles=tiles, interpret=interpret)

    out, lse = jax.jit(forward)(q, k, v, *bounds)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    inputs, residuals = (q, k, v, *bounds), (q, k, v, *bounds, lse, delta, d_out)
    return {
        "forward": partial(_compile, forward, inputs),
        # XLA removes a kernel whose result is not returned. dq and (dk, dv) come from separate kernels, so returning
        # only one of the results times only its kernel.
        "dq": partial(_compile, lambda *arrays, tiles: backward(*arrays, tiles=tiles)[0], residuals),
        "dkdv": partial(_compile, lambda *arrays, tiles: backward(*arrays, tiles=tiles)[1:], residuals),
    }


def _compile(kernel: Callable[..., Any], arrays: tuple[Any, ...], tile: Tile) -> Callable[[], Any]:
    program = jax.jit(partial(kernel, tiles=Tiles(tile, tile, tile))).lower(*arrays).compile()
    return lambda: program(*arrays)


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call, after one warm-up call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def rank_tiles(make: Callable[[Tile], Callable[[], Any]], tiles: Iterable[Tile]) -> list[tuple[float, Tile]]:
    """Return (seconds, tile), the fastest first, without tiles that do not compile for this GPU."""
    times = []
    for tile in tiles:
        try:
            times.append((seconds(make(tile)), tile))
        except jax.errors.JaxRuntimeError as error:  # too much shared memory, too many registers
            print(f"    {tile}: {str(error).splitlines()[0][:100]}")
    return sorted(times, key=lambda timed: timed[0])


def main() -> None:
    """Rank tiles for each kernel and print the best as source."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description="Times block sizes on this GPU.")
    parser.add_argument("op", choices=["flash_attention"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="two tiny tiles, interpreted on a CPU; times nothing")
    options = parser.parse_args()
    device = current_device()
    if device.platform != "gpu" and not options.smoke:
        sys.exit(f"there is no GPU to time on: jax runs on {device}; --smoke tests this command without one")
    sizes = (options.rows, options.length, options.heads, options.kv_heads, options.head_dim)
    if options.smoke:
        sizes = (1, 64, 2, 1, 16)
    kernels = flash_attention_kernels(*sizes, options.dtype, interpret=options.smoke)
    best = {}
    for name, make in kernels.items():
        print(f"{name}, head_dim {sizes[-1]}, {options.dtype}, on {device}:", flush=True)
        ranking = rank_tiles(make, candidates(options.smoke))
        for duration, tile in ranking[:5]:
            print(f"    {duration * 1e3:9.3f} ms  {tile}")
        best[name] = ranking[0][1]
    print("Fastest, as source:")
    print(f"    Tiles({', '.join(repr(best[name]) for name in KERNELS)})")


if __name__ == "__main__":
    main()
