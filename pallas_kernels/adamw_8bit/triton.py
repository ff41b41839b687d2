"""The update by one Pallas-Triton kernel, for GPUs from sm_80 on: each array is read once and written once, in place.

The kernel sees a stack of matrices as a list of blocks, (number of blocks, elements of a block). Blocks are contiguous
in memory, so this reshape costs nothing, and one launch updates all layers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.adamw_8bit.adam import SIGNED, Adam, AdamStep, Factors, QuantizedMoment, Updated, block_of, inverse
from pallas_kernels.adamw_8bit.dynamic_map import TABLES, Tables, decode, encode
from pallas_kernels.gpus import Device
from pallas_kernels.manual_axes import vary_over, varying_axes
from pallas_kernels.quant_matmul.triton import AMPERE, span, whole_array_spec
from pallas_kernels.stochastic_rounding import random_bits, round_to_dtype
from pallas_kernels.triton_call import plgpu, triton_call

# Elements that a program updates, and its warps: a thread has 16 elements, which are 16 bytes of codes.
ELEMENTS, WARPS = 2048, 4


@dataclass(frozen=True)
class AdamRequest:
    """A stack of matrices (layers, rows, columns), or its shard, in blocks of (block_rows, block_columns)."""

    layers: int
    rows: int
    columns: int
    block_rows: int
    block_columns: int


def request_for(before: Updated) -> AdamRequest:
    """Return the request for these arrays."""
    parameter, mu, _ = before
    layers, rows, columns = parameter.shape
    return AdamRequest(layers, rows, columns, *block_of(mu))


def refuses(device: Device, request: AdamRequest) -> str | None:
    """Return why this kernel cannot run a request on a device, or None."""
    if device.capability is None or device.capability < AMPERE:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if request.block_rows > 1 and request.block_columns < request.columns:
        block = f"{request.block_rows} x {request.block_columns}"
        return f"blocks of {block} in rows of {request.columns} are not contiguous in memory"
    if 2**31 < request.layers * request.rows * request.columns <= 2**32:
        return "Pallas-Triton has 32-bit offsets in arrays up to 2^32 bytes, and more than 2^31 codes need more bits"
    return None


def update(
    gradient: Float[Array, "l o i"], before: Updated, step: AdamStep, adam: Adam, *, interpret: bool = False
) -> Updated:
    """Return the parameter and the moments after a step; see `adamw_8bit`."""
    request, (parameter, mu, nu) = request_for(before), before
    blocks, size = mu.absmax.size, request.block_rows * request.block_columns

    def by_block(array: Array) -> Array:
        return array.reshape(blocks, size)

    changed = (by_block(parameter), by_block(mu.codes), mu.absmax.ravel(), by_block(nu.codes), nu.absmax.ravel())
    factors = jnp.stack(adam.factors(step))
    # The integers that the kernel reads: whether the step was finite, the key, and the shard's origin.
    words = jnp.concatenate([step.finite.astype(jnp.uint32)[None], step.key, step.origin])
    tables = (jnp.asarray(table) for signed in SIGNED for table in TABLES[signed])
    constants = (factors, words, step.rate, step.decay, *tables)
    operands = (*changed, by_block(gradient), *constants)
    operands = vary_over(varying_axes(*operands), *operands)
    out = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
        for x in operands[: len(changed)]
    ]
    # Sizes of Triton's arrays are powers of 2; elements beyond a block are masked.
    columns = pl.next_power_of_2(size)
    rows = ELEMENTS // columns
    after, *moments = triton_call(
        partial(_kernel, request=request, adam=adam, rows=rows, columns=columns),
        grid=(pl.cdiv(blocks, rows),),
        in_specs=[whole_array_spec(x) for x in operands],
        out_specs=[whole_array_spec(x) for x in out],
        out_shape=out,
        input_output_aliases={number: number for number in range(len(out))},
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        name="adamw_8bit",
    )(*operands)
    moments = [array.reshape(like.shape) for array, like in zip(moments, (*mu, *nu))]
    return after.reshape(parameter.shape), QuantizedMoment(*moments[:2]), QuantizedMoment(*moments[2:])


def _kernel(*refs, request: AdamRequest, adam: Adam, rows: int, columns: int):
    parameter_ref, mu_ref, mu_absmax_ref, nu_ref, nu_absmax_ref, gradient_ref, *constants = refs[:-5]
    factors_ref, words_ref, rate_ref, decay_ref, *tables = constants
    parameter_out, mu_out, mu_absmax_out, nu_out, nu_absmax_out = refs[-5:]
    blocks, size = parameter_ref.shape
    block, element = span(pl.program_id(0), rows), jnp.arange(columns, dtype=jnp.int32)

    @pl.when(words_ref[0] != 0)
    def _():
        in_range = block < blocks
        indices, valid = (block[:, None], element[None, :]), in_range[:, None] & (element < size)[None, :]
        layer, row, column = _places(block, element, request)

        def load(ref) -> Array:
            return plgpu.load(ref.at[indices], mask=valid, other=0)

        def load_per_block(ref, index: Array = block) -> Array:
            return plgpu.load(ref.at[index], mask=in_range, other=0)[:, None]

        def load_moment(beta: float, map_tables: Tables, codes_ref, absmax_ref) -> Array:
            value = decode(load(codes_ref), map_tables, _look_up) * (beta * load_per_block(absmax_ref))
            # A masked element loads code 0, whose value in the signed map is not 0: it must not enter the absmax.
            return value if columns == size else jnp.where(valid, value, 0)

        def store(moment: Array, map_tables: Tables, codes_out, absmax_out) -> None:
            absmax = jnp.max(jnp.abs(moment), axis=1)
            codes = encode(moment * inverse(absmax)[:, None], map_tables, _look_up)
            plgpu.store(codes_out.at[indices], codes, mask=valid)
            plgpu.store(absmax_out.at[block], absmax, mask=in_range)

        signed, unsigned = Tables(*tables[: len(tables) // 2]), Tables(*tables[len(tables) // 2 :])
        after, mean, square = adam(
            load(gradient_ref).astype(jnp.float32),
            load(parameter_ref).astype(jnp.float32),
            (
                load_moment(adam.beta1, signed, mu_ref, mu_absmax_ref),
                load_moment(adam.beta2, unsigned, nu_ref, nu_absmax_ref),
            ),
            Factors(*(factors_ref[number] for number in range(len(Factors._fields)))),
            load_per_block(rate_ref, layer),
            load_per_block(decay_ref, layer),
        )
        key, *origin = (words_ref[1], words_ref[2]), words_ref[3], words_ref[4], words_ref[5]
        places = (place.astype(jnp.uint32) + first for place, first in zip((layer[:, None], row, column), origin))
        new = round_to_dtype(after, parameter_out.dtype, random_bits(key, *places))
        plgpu.store(parameter_out.at[indices], new, mask=valid)
        store(mean, signed, mu_out, mu_absmax_out)
        store(square, unsigned, nu_out, nu_absmax_out)


def _places(block: Array, element: Array, request: AdamRequest) -> tuple[Array, Array, Array]:
    """Return the layers of blocks, and the rows and columns of their elements, in shapes that broadcast."""
    across = request.columns // request.block_columns  # blocks next to each other in a row
    down = request.rows // request.block_rows
    layer, in_layer = jax.lax.div(block, down * across), jax.lax.rem(block, down * across)
    row, column = (
        jax.lax.div(in_layer, across) * request.block_rows,
        jax.lax.rem(in_layer, across) * request.block_columns,
    )
    if request.block_rows == 1:
        return layer, row[:, None], column[:, None] + element[None, :]
    in_row, in_column = jax.lax.div(element, request.columns), jax.lax.rem(element, request.columns)
    return layer, row[:, None] + in_row[None, :], in_column[None, :]


def _look_up(table_ref, index: Array) -> Array:
    """Read a table, which the L1 cache holds: all tables are 6 KiB."""
    return plgpu.load(table_ref.at[index])
