"""The update by one Pallas-Triton kernel, for GPUs from sm_80 on: each array is read once and written once, in place.

A stack of matrices is worked on as a list of blocks, (number of blocks, elements of one): blocks are contiguous in
memory, so that this reshape costs nothing, and a launch updates all layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.adamw_8bit.adam import SIGNED, Adam, Factors, Moment, Step, Updated, block_of, inverse
from pallas_kernels.adamw_8bit.dynamic_map import TABLES, Tables, decode, encode
from pallas_kernels.gpus import Capability, Device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.stochastic_rounding import random_bits, stored

AMPERE: Capability = (8, 0)
# Elements that a program updates, and its warps: each thread has 16 elements, 16 bytes of codes.
ELEMENTS, WARPS = 2048, 4


@dataclass(frozen=True)
class Request:
    """A stack of matrices (layers, rows, columns), or a shard of one, in blocks of (block_rows, block_columns)."""

    layers: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int


def request_for(before: Updated) -> Request:
    """The request that these arrays make."""
    parameter, mu, _ = before
    layers, rows, columns = parameter.shape
    return Request(layers, rows, columns, *block_of(mu))


def refuses(device: Device, request: Request) -> str | None:
    """Why this kernel cannot run a request on a device, or None."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if request.block_rows > 1 and request.block_columns < request.columns:
        block = f"{request.block_rows} x {request.block_columns}"
        return f"blocks of {block} in rows of {request.columns} are not contiguous in memory"
    if 2**31 < request.layers * request.rows * request.columns <= 2**32:
        return "Pallas-Triton has 32-bit offsets in arrays up to 2^32 bytes, and more than 2^31 codes need longer ones"
    return None


def update(
    gradient: Float[Array, "l o i"], before: Updated, step: Step, adam: Adam, *, interpret: bool = False
) -> Updated:
    """The parameter and the moments after a step; see `adamw_8bit`."""
    request, (parameter, mu, nu) = request_for(before), before
    blocks, size = mu.absmax.size, request.block_rows * request.block_columns

    def by_block(array: Array) -> Array:
        return array.reshape(blocks, size)

    changed = (by_block(parameter), by_block(mu.codes), mu.absmax.ravel(), by_block(nu.codes), nu.absmax.ravel())
    factors = jnp.stack(adam.factors(step))
    words = jnp.concatenate([step.finite.astype(jnp.uint32)[None], step.key, step.origin])
    tables = (jnp.asarray(table) for signed in SIGNED for table in TABLES[signed])
    constants = (factors, words, step.rate, step.decay, *tables)
    operands = (*changed, by_block(gradient), *constants)
    operands = vary_over(varying_axes(*operands), *operands)
    out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
        for x in operands[: len(changed)]
    ]
    columns = pl.next_power_of_2(size)
    rows = ELEMENTS // columns
    after, *moments = pl.pallas_call(
        partial(_kernel, request=request, adam=adam, rows=rows, columns=columns),
        grid=(pl.cdiv(blocks, rows),),
        in_specs=[_whole(x) for x in operands],
        out_specs=[_whole(x) for x in out],
        out_shape=out,
        input_output_aliases={number: number for number in range(len(out))},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="adamw_8bit",
    )(*operands)
    moments = [array.reshape(like.shape) for array, like in zip(moments, (*mu, *nu))]
    return after.reshape(parameter.shape), Moment(*moments[:2]), Moment(*moments[2:])


def _kernel(*refs, request: Request, adam: Adam, rows: int, columns: int):
    parameter_ref, mu_ref, mu_absmax_ref, nu_ref, nu_absmax_ref, gradient_ref, *constants = refs[:-5]
    factors_ref, words_ref, rate_ref, decay_ref, *tables = constants
    parameter_out, mu_out, mu_absmax_out, nu_out, nu_absmax_out = refs[-5:]
    blocks, size = parameter_ref.shape
    block = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)

    @pl.when(words_ref[0] != 0)
    def _():
        element = jnp.arange(columns, dtype=jnp.int32)
        in_blocks = None if blocks % rows == 0 else block < blocks
        in_block = None if columns == size else jnp.broadcast_to((element < size)[None, :], (rows, columns))
        inside = _both(None if in_blocks is None else in_blocks[:, None], in_block)
        where = block[:, None], element[None, :]

        in_matrix = request.rows * request.columns // size  # blocks
        in_row = request.columns // request.block_columns
        layer, place = jax.lax.div(block, in_matrix), jax.lax.rem(block, in_matrix)
        row = (jax.lax.div(place, in_row) * request.block_rows)[:, None]
        column = (jax.lax.rem(place, in_row) * request.block_columns)[:, None]
        if request.block_rows > 1:
            row += jax.lax.div(element, request.columns)[None, :]
            column = jax.lax.rem(element, request.columns)[None, :]
        else:
            column += element[None, :]

        def kept(beta: float, signed: bool, codes_ref, absmax_ref) -> Array:
            codes = _load(codes_ref.at[where], inside)
            value = decode(codes, maps[signed], _look_up) * (beta * _load(absmax_ref.at[block], in_blocks))[:, None]
            return value if in_block is None else jnp.where(in_block, value, 0)

        def store(moment: Array, signed: bool, codes_ref, absmax_ref) -> None:
            absmax = jnp.max(jnp.abs(moment), axis=1)
            codes = encode(moment * inverse(absmax)[:, None], maps[signed], _look_up)
            plgpu.store(codes_ref.at[where], codes, mask=inside)
            plgpu.store(absmax_ref.at[block], absmax, mask=in_blocks)

        count = len(Tables._fields)
        maps = {True: Tables(*tables[:count]), False: Tables(*tables[count:])}
        after, mean, square = adam(
            _load(gradient_ref.at[where], inside).astype(jnp.float32),
            _load(parameter_ref.at[where], inside).astype(jnp.float32),
            (kept(adam.beta1, True, mu_ref, mu_absmax_ref), kept(adam.beta2, False, nu_ref, nu_absmax_ref)),
            Factors(*(factors_ref[number] for number in range(len(Factors._fields)))),
            _load(rate_ref.at[layer], in_blocks)[:, None],
            _load(decay_ref.at[layer], in_blocks)[:, None],
        )
        key, origin = (words_ref[1], words_ref[2]), (words_ref[3], words_ref[4], words_ref[5])
        indices = (index.astype(jnp.uint32) + first for index, first in zip((layer[:, None], row, column), origin))
        new = stored(after, parameter_out.dtype, random_bits(key, *indices))
        plgpu.store(parameter_out.at[where], new, mask=inside)
        store(mean, True, mu_out, mu_absmax_out)
        store(square, False, nu_out, nu_absmax_out)


def _both(one: Array | None, other: Array | None) -> Array | None:
    """Two masks, of which None masks nothing."""
    return one if other is None else other if one is None else one & other


def _load(ref, mask: Array | None) -> Array:
    """Zeros where it is masked."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _look_up(table_ref, index: Array) -> Array:
    """From the first-level cache, of which the tables take 4 KiB."""
    return plgpu.load(table_ref.at[index])


def _whole(x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """All of an array for every program, which takes its part itself."""
    return pl.BlockSpec(x.shape, lambda *program: (0,) * len(x.shape))
