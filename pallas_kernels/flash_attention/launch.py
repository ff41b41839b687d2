"""Launches the three Pallas-Triton kernels of attention (triton.py, triton_wide.py).

It pads their arrays to whole blocks, and heads to a multiple of 16, and gives each program the arrays that it reads and
writes.

Shapes: b batch, s queries, t keys, h query heads, n key heads, d head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels import cost
from pallas_kernels.flash_attention.blocks import key_blocks, most_flops, query_blocks, seen_keys, whole_blocks
from pallas_kernels.flash_attention.tiles import Tile
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.triton_call import triton_call


def rows_of(block, size: int) -> pl.Slice:
    """Return the rows of a block, given its number."""
    return pl.Slice(block * size, size)


class Shapes:
    """Sizes of one call, all in whole blocks, and the BlockSpecs of the arrays that a program reads and writes.

    A program computes all columns of the results of its block.
    """

    splits = 1  # programs of one block, which follow each other in the grid

    def __init__(self, q: Array, k: Array, tile: Tile):
        self.batch, self.queries, self.heads, self.head_dim = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = self.heads // self.kv_heads
        self.block_q, self.block_k = tile.block_q, tile.block_k
        self.q_blocks, self.k_blocks = self.queries // self.block_q, self.keys // self.block_k
        # Without HIGHEST Triton would round float32 inputs to TF32.
        self.precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        self.varying = jax.typeof(q).manual_axis_type
        # Sizes of Triton's arrays are powers of 2: a head dimension of 96 is split into 64 + 32, not padded to 128.
        bits = [bit for bit in reversed(range(self.head_dim.bit_length())) if self.head_dim >> bit & 1]
        self.parts = tuple(
            pl.Slice(sum(1 << bit for bit in bits[:place]), 1 << bits[place]) for place in range(len(bits))
        )

    def block_of(self, program):
        """Return a program's block, given its number in the first dimension of the grid."""
        return program

    def queries_of_head(self) -> pl.BlockSpec:
        """All queries of a head."""
        return pl.BlockSpec((None, self.queries, None, self.head_dim), lambda i, h, b: (b, 0, h, 0))

    def keys_of_head(self) -> pl.BlockSpec:
        """All keys of the key head that a query head uses."""
        return pl.BlockSpec((None, self.keys, None, self.head_dim), lambda i, h, b: (b, 0, h // self.group, 0))

    def range_of_queries(self) -> pl.BlockSpec:
        """The range of blocks of keys that the program's queries see."""
        return pl.BlockSpec((None, None, 4), lambda i, h, b: (b, self.q_blocks - 1 - self.block_of(i), 0))

    def seen_of_row(self) -> pl.BlockSpec:
        """Whether some query sees a key, for each key of a row."""
        return pl.BlockSpec((None, self.keys), lambda i, h, b: (b, 0))

    def row(self) -> pl.BlockSpec:
        """A number for each query of a row."""
        return pl.BlockSpec((None, self.queries), lambda i, h, b: (b, 0))

    def row_of_head(self) -> pl.BlockSpec:
        """A number for each query of a head."""
        return pl.BlockSpec((None, None, self.queries), lambda i, h, b: (b, h, 0))

    def my_queries(self) -> pl.Slice:
        """Return the queries of this program, last queries first.

        With a causal mask the last queries see the most keys, and long programs should not start last.
        """
        return rows_of(self.q_blocks - 1 - self.block_of(pl.program_id(0)), self.block_q)

    def like(self, x: Array) -> jax.ShapeDtypeStruct:
        """An output with the shape and dtype of x."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=self.varying)

    @property
    def per_query(self) -> jax.ShapeDtypeStruct:
        """An output with a float32 number for each query of each head."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.queries), jnp.float32, manual_axis_type=self.varying)


@dataclass(frozen=True)
class Kernels:
    """The kernels of attention for some sizes of heads.

    Attributes:
        name: the first part of their names in a profile.
        shapes: makes the shapes of a call from queries, keys and a tile.
        tiles: returns the tiles for queries on the current device.
        forward: the kernel of the output and the log-sum-exp.
        dq: the kernel of the gradient of queries.
        dkdv: the kernel of the gradients of keys and values.
    """

    name: str
    shapes: Callable[[Array, Array, Any], Shapes]
    tiles: Callable[[Array], Any]
    forward: Callable[..., None]
    dq: Callable[..., None]
    dkdv: Callable[..., None]


def forward(
    kernels: Kernels,
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    sinks: Float[Array, " h"] | None,
    variant: Variant,
    *,
    tiles: Any = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b h s"]]:
    """Return the output, and the log-sum-exp in float32."""
    tile = (tiles or kernels.tiles(q)).forward
    _, queries, _, head_dim = q.shape
    q, k, v = (_pad_heads(x) for x in (q, k, v))
    q, first, end = (whole_blocks(x, tile.block_q) for x in (q, first, end))
    k, v = (whole_blocks(x, tile.block_k) for x in (k, v))
    shapes = kernels.shapes(q, k, tile)
    ranges = key_blocks(first, end, shapes.keys, tile.block_q, tile.block_k)
    seen = seen_keys(first, end, shapes.keys)
    sinks = jnp.full(shapes.heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    kernel = triton_call(
        partial(kernels.forward, shapes=shapes, variant=variant),
        grid=(shapes.q_blocks * shapes.splits, shapes.heads, shapes.batch),
        in_specs=[
            shapes.queries_of_head(),
            shapes.keys_of_head(),
            shapes.keys_of_head(),
            shapes.row(),
            shapes.row(),
            shapes.seen_of_row(),
            shapes.range_of_queries(),
            pl.BlockSpec((None,), lambda i, h, b: (h,)),
        ],
        out_specs=[shapes.queries_of_head(), shapes.row_of_head()],
        out_shape=[shapes.like(q), shapes.per_query],
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name=f"{kernels.name}_forward",
    )
    with cost.flops(most_flops(variant, q, k, tile.block_q, tile.block_k, products=shapes.splits + 1)):
        out, lse = kernel(q, k, v, first, end, seen, ranges, sinks)
    return out[:, :queries, :, :head_dim], lse[:, :, :queries]


def backward(
    kernels: Kernels,
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t n d"],
    v: Float[Array, "b t n d"],
    first: Int[Array, "b s"],
    end: Int[Array, "b s"],
    lse: Float[Array, "b h s"],
    delta: Float[Array, "b h s"],
    d_out: Float[Array, "b s h d"],
    variant: Variant,
    *,
    tiles: Any = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b s h d"], Float[Array, "b t n d"], Float[Array, "b t n d"]]:
    """Return gradients of q, k and v."""
    tiles = tiles or kernels.tiles(q)
    (_, queries, _, head_dim), keys = q.shape, k.shape[1]
    q, k, v, d_out = (_pad_heads(x) for x in (q, k, v, d_out))
    arrays = (q, k, v, d_out, lse, delta, first, end)
    dq = _dq(kernels, *all_whole_blocks(*arrays, tiles.dq), variant, tiles.dq, interpret)
    dk, dv = _dkdv(kernels, *all_whole_blocks(*arrays, tiles.dkdv), variant, tiles.dkdv, interpret)
    return dq[:, :queries, :, :head_dim], dk[:, :keys, :, :head_dim], dv[:, :keys, :, :head_dim]


def _pad_heads(x: Float[Array, "b s h d"]) -> Array:
    """Pad heads with zeros to a multiple of 16, which Triton's products need; zeros change no logit."""
    return whole_blocks(x, 16, axis=3)


def _dq(kernels, q, k, v, d_out, lse, delta, first, end, variant, tile, interpret):
    shapes = kernels.shapes(q, k, tile)
    ranges = key_blocks(first, end, shapes.keys, tile.block_q, tile.block_k)
    kernel = triton_call(
        partial(kernels.dq, shapes=shapes, variant=variant),
        grid=(shapes.q_blocks * shapes.splits, shapes.heads, shapes.batch),
        in_specs=[
            shapes.queries_of_head(),
            shapes.keys_of_head(),
            shapes.keys_of_head(),
            shapes.queries_of_head(),
            shapes.row_of_head(),
            shapes.row_of_head(),
            shapes.row(),
            shapes.row(),
            shapes.seen_of_row(),
            shapes.range_of_queries(),
        ],
        out_specs=shapes.queries_of_head(),
        out_shape=shapes.like(q),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name=f"{kernels.name}_dq",
    )
    seen = seen_keys(first, end, shapes.keys)
    with cost.flops(most_flops(variant, q, k, tile.block_q, tile.block_k, products=2 * shapes.splits + 1)):
        return kernel(q, k, v, d_out, lse, delta, first, end, seen, ranges)


def _dkdv(kernels, q, k, v, d_out, lse, delta, first, end, variant, tile, interpret):
    shapes = kernels.shapes(q, k, tile)
    ranges = query_blocks(first, end, shapes.keys, tile.block_q, tile.block_k)
    # A program gets all query heads that share its key head, to sum dk and dv over them.
    queries = pl.BlockSpec((None, shapes.queries, shapes.group, shapes.head_dim), lambda j, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, shapes.keys, None, shapes.head_dim), lambda j, n, b: (b, 0, n, 0))
    row_of_group = pl.BlockSpec((None, shapes.group, shapes.queries), lambda j, n, b: (b, n, 0))
    kernel = triton_call(
        partial(kernels.dkdv, shapes=shapes, variant=variant),
        grid=(shapes.k_blocks * shapes.splits, shapes.kv_heads, shapes.batch),
        in_specs=[
            queries,
            keys,
            keys,
            queries,
            row_of_group,
            row_of_group,
            shapes.row(),
            shapes.row(),
            pl.BlockSpec((None, None, 4), lambda j, n, b: (b, shapes.block_of(j), 0)),
        ],
        out_specs=[keys, keys],
        out_shape=[shapes.like(k), shapes.like(v)],
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        name=f"{kernels.name}_dkdv",
    )
    with cost.flops(most_flops(variant, q, k, tile.block_q, tile.block_k, products=2 * shapes.splits + 2)):
        return kernel(q, k, v, d_out, lse, delta, first, end, ranges)


def all_whole_blocks(q, k, v, d_out, lse, delta, first, end, tile: Tile):
    """Pad the inputs of a backward kernel to whole blocks."""
    q, d_out, first, end = (whole_blocks(x, tile.block_q) for x in (q, d_out, first, end))
    lse, delta = (whole_blocks(x, tile.block_q, axis=2) for x in (lse, delta))
    k, v = (whole_blocks(x, tile.block_k) for x in (k, v))
    return q, k, v, d_out, lse, delta, first, end
