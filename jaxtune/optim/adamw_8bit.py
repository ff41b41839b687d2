"""AdamW whose moments are kept in 8 bits, as bitsandbytes keeps them (Dettmers et al. 2022, arXiv:2110.02861)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.optim import rules
from jaxtune.optim.rules import At, Rule, RuleState
from jaxtune.parallel.layout import RULES
from jaxtune.parallel.mesh import misfit
from jaxtune.quant.array import block_absmax, divisors, in_blocks
from jaxtune.quant.dynamic_map import decode, encode

if TYPE_CHECKING:
    from jaxtune.models.parameters import Parameter

BLOCK = 256  # elements that share a scale, at most
LEAST = 16  # fewest elements of a row with a scale of their own
DEVICES = 8  # that can shard a row without splitting a block, if they divide it
LEAST_ELEMENTS = 4096  # of a parameter whose moments are in 8 bits; a smaller one keeps float32
SIGNED = {"mu": True, "nu": False}  # the dynamic map: of the mean of gradients, and of the mean of their squares

Block = tuple[int, int]  # rows, columns


class Moment(NamedTuple):
    """A moment in 8 bits: value(code) * absmax of its block. Both arrays are sharded as the parameter is."""

    codes: UInt8[Array, "*shape"]
    absmax: Float[Array, "*blocks"]


def block_of(shape: tuple[int, ...]) -> Block | None:
    """Rows and columns of the blocks of a matrix (o, i) or a vector (n,): a function of the shape alone.

    A block lies in a row, as bitsandbytes' do where i is a multiple of 256: rows may differ in size by orders of
    magnitude. It has as many elements, up to 256, as still let 8 devices shard the row; where rows are shorter than 16,
    a block is several rows. None where the moments stay float32: a small parameter, or rows that no such block divides.
    """
    # (4096, 4096): (1, 256). (4096, 11008): (1, 172), as 11008 / 8 = 8 * 172. (4096, 8): (32, 8).
    width, height = shape[-1], math.prod(shape[:-1])
    columns = _part(width, BLOCK) if width >= LEAST * DEVICES else width
    if height * width < LEAST_ELEMENTS or columns < min(width, LEAST):
        return None
    return (1 if columns >= LEAST else _part(height, BLOCK // columns)), columns


def _part(size: int, most: int) -> int:
    """The largest number up to `most` that divides the size, or the part of each device where 8 can share it."""
    number = size if size % DEVICES else size // DEVICES
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def adamw_8bit(beta1: float, beta2: float, epsilon: float) -> Rule:
    """AdamW for a matrix (o, i) or a vector (n,), with moments in 8 bits or, where `block_of` is None, in float32.

    As in bitsandbytes the parameter is updated by the new moments before these are rounded to the nearest value of
    their map. Unlike there, a mean of squares that is not 0 is never rounded to 0: at the next gradient of 0 its
    element would move by (mean of gradients) / epsilon, as far as in a thousand steps. In bitsandbytes the embeddings
    of tokens that a batch lacks move so. (Its CUDA kernel also differs where rounding would change the sign of a mean
    of gradients.)

    The mesh must not split a block (see `undivided_moments`); then an update needs no communication.
    """
    adamw = rules.adamw(beta1, beta2, epsilon)

    def init(parameter: Float[Array, "*shape"]) -> RuleState:
        if (block := block_of(parameter.shape)) is None:
            return adamw.init(parameter)

        # In a shard_map, here and below: each device quantizes its own blocks, whatever sharding XLA would infer.
        def init_shard(parameter):
            return {name: _zeros(name, parameter.shape, block) for name in SIGNED}

        return jax.shard_map(init_shard, out_specs=jax.typeof(parameter).sharding.spec)(parameter)

    def update(gradient, state, parameter, at):
        if (block := block_of(parameter.shape)) is None:
            return adamw.update(gradient, state, parameter, at)

        def update_shard(gradient, state, parameter, at):
            moments = {name: _dequantize(name, moment, block) for name, moment in state.items()}
            after, moments = adamw.update(gradient, moments, parameter, at)
            return after, {name: _quantize(name, moment, block) for name, moment in moments.items()}

        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, (parameter, state))
        return jax.shard_map(update_shard, out_specs=specs)(gradient, state, parameter, At(*map(jnp.asarray, at)))

    return Rule(init, update, by_layer=True)


def float32_moments(parameters: Mapping[str, "Parameter"]) -> list[str]:
    """Names and shapes of trained parameters of 4096 elements or more that stay float32: no block divides a row."""
    shapes = {name: parameter.matrix for name, parameter in sorted(parameters.items())}
    large = {name: shape for name, shape in shapes.items() if math.prod(shape) >= LEAST_ELEMENTS}
    return [f"{name} {list(shape)}" for name, shape in large.items() if block_of(shape) is None]


def undivided_moments(parameters: Mapping[str, "Parameter"], mesh: jax.sharding.Mesh) -> list[str]:
    """Complaints about trained parameters of which the mesh would split a block."""
    complaints = set()
    for parameter in parameters.values():
        shape, axes = parameter.matrix, parameter.matrix_axes
        for axis_name, size, elements in zip(axes, shape, (block_of(shape) or ())[-len(shape) :]):
            what = f"{axis_name}={size} in blocks of {elements}, which optim.name='adamw_8bit' has"
            if found := misfit(mesh, axis_name, size // elements, what, RULES.value.optimizer):
                complaints.add(f"{found} (mesh.data takes the rest)")
    return sorted(complaints)


# All but amax is computed in the shape of the parameter, not in blocks: on a GPU XLA then fuses it with the rounding of
# the parameter (`build`) into one loop, and stores no float32 moment.


def _quantize(name: str, moment: Float[Array, "*shape"], block: Block) -> Moment:
    absmax = block_absmax(in_blocks(moment.reshape(-1, moment.shape[-1]), block))
    codes = encode(moment / _spread(divisors(absmax), block, moment.shape), SIGNED[name])
    if not SIGNED[name]:  # code 1 at least where it is not 0; by its sign, as XLA would store the zeros to compare with
        codes = jnp.maximum(codes, jnp.sign(moment).astype(codes.dtype))
    return Moment(codes, absmax if moment.ndim == 2 else absmax[0])


def _zeros(name: str, shape: tuple[int, ...], block: Block) -> Moment:
    """`_quantize` of zeros, written out: XLA would spend seconds of compilation on folding the amax of a constant."""
    rows, columns = block
    blocks = (*(size // rows for size in shape[:-1]), shape[-1] // columns)
    return Moment(jnp.broadcast_to(encode(jnp.float32(0), SIGNED[name]), shape), jnp.zeros(blocks))


def _dequantize(name: str, moment: Moment, block: Block) -> Float[Array, "*shape"]:
    return decode(moment.codes, SIGNED[name]) * _spread(moment.absmax, block, moment.codes.shape)


def _spread(absmax: Float[Array, "*blocks"], block: Block, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    """The value of each block, repeated for its elements."""
    rows, columns = block
    by_block = absmax.reshape(-1, 1, absmax.shape[-1], 1)
    return jnp.broadcast_to(by_block, (len(by_block), rows, by_block.shape[2], columns)).reshape(shape)
