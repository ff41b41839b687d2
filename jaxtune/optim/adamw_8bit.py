"""AdamW with moments in 8 bits, as in bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861)."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxtune.optim import rules
from jaxtune.optim.driver import apply_rule
from jaxtune.optim.rules import Hyperparameters, Rule, RuleState, Updated, UpdateInputs
from jaxtune.parallel.layout import RULES, axes_in, spec
from jaxtune.parallel.mesh import misfit
from pallas_kernels import adamw_8bit as kernel
from pallas_kernels.adamw_8bit import Adam, QuantizedMoment
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP, UNSIGNED_DYNAMIC_MAP

if TYPE_CHECKING:
    from jaxtune.models.parameters import Parameter

BLOCK = 256  # elements that share a scale, at most
LEAST = 16  # elements of a block in a row, at least
DEVICES = 8  # this many devices can shard a row without splitting a block, if they divide it
LEAST_ELEMENTS = 4096  # a parameter with fewer elements keeps its moments in float32
# The code of zero in the map of mu (mean of gradients) and in the map of nu (mean of squared gradients).
ZERO = {"mu": int(np.searchsorted(DYNAMIC_MAP, 0)), "nu": int(np.searchsorted(UNSIGNED_DYNAMIC_MAP, 0))}

Block = tuple[int, int]  # rows, columns


def block_of(shape: tuple[int, ...]) -> Block | None:
    """Return rows and columns of the blocks of a matrix (o, i) or a vector (n,); they depend only on the shape.

    A block is part of one row, as in bitsandbytes if i is a multiple of 256, because rows may differ in size by orders
    of magnitude. It has as many elements, up to 256, as still let 8 devices shard the row. If rows are shorter than 16,
    a block is several rows. None if the moments stay float32: a small parameter, rows that no such block divides, or a
    kernel of a convolution, which has more than two dimensions.
    """
    if shape[2:]:
        return None
    # (4096, 4096): (1, 256). (4096, 11008): (1, 172), because 11008 / 8 = 8 * 172. (4096, 8): (32, 8).
    width, height = shape[-1], math.prod(shape[:-1])
    # An eighth of a shorter row would have fewer elements than the smallest block.
    columns = _part(width, BLOCK) if width >= LEAST * DEVICES else width
    if height * width < LEAST_ELEMENTS or columns < min(width, LEAST):
        return None
    return (1 if columns >= LEAST else _part(height, BLOCK // columns)), columns


def _part(size: int, most: int) -> int:
    """Return the largest number up to `most` that divides the size, or its eighth if 8 devices can share it."""
    number = size if size % DEVICES else size // DEVICES
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def adamw_8bit(beta1: float, beta2: float, epsilon: float) -> Rule:
    """AdamW for a matrix (o, i) or a vector (n,), with moments in 8 bits, or in float32 if `block_of` is None.

    As in bitsandbytes, the parameter is updated with the new moments before they are rounded to the nearest value of
    their map. Unlike in bitsandbytes, a mean of squares that is not 0 is never rounded to 0. Otherwise, at the next
    gradient of 0, its element would move by (mean of gradients) / epsilon, as far as in a thousand steps. In
    bitsandbytes the embeddings of tokens that a batch lacks move like this. (Its CUDA kernel also differs if rounding
    would change the sign of a mean of gradients.)

    The mesh must not split a block (see `undivided_moments`); then an update needs no communication.
    """
    adamw, adam = rules.adamw(beta1, beta2, epsilon), Adam(beta1, beta2, epsilon)

    def init(parameter: Float[Array, "*shape"]) -> RuleState:
        if (block := block_of(parameter.shape)) is None:
            return adamw.init(parameter)

        # In a shard_map, so that each device makes the moments of its own blocks; XLA might infer another sharding.
        def init_shard(parameter):
            return {name: _zeros(parameter.shape, block, value) for name, value in ZERO.items()}

        spec = jax.typeof(parameter).sharding.spec
        return jax.shard_map(init_shard, in_specs=spec, out_specs=spec)(parameter)

    def update(gradient, state, parameter, at):
        step = UpdateInputs(at.rate, jnp.float32(1), jnp.bool(True), jax.random.key(0))
        return whole((parameter, state), gradient, at, step, stacked=False)

    def whole(before: Updated, gradient: Array, at: Hyperparameters, step: UpdateInputs, stacked: bool) -> Updated:
        if block_of(before[0].shape[stacked:]) is None:
            return apply_rule(adamw, before, gradient, at, step)
        return _whole(adam, before, gradient, at, step, stacked)

    return Rule(init, update, by_layer=True, whole=whole)


def _whole(
    adam: Adam, before: Updated, gradient: Array, at: Hyperparameters, step: UpdateInputs, stacked: bool
) -> Updated:
    """Update a parameter or a stack with `pallas_kernels.adamw_8bit`: each device updates its shard."""
    spec = tuple(jax.typeof(before[0]).sharding.spec)
    # Mesh axes of layers, rows and columns; None for a dimension that the parameter does not have.
    # Three entries also for a single matrix or a vector: the kernel has (layers, rows, columns).
    axes = (*(spec[:1] if stacked else (None,)), *(None,) * (2 + stacked - len(spec)), *spec[stacked:])
    layers = len(gradient) if stacked else 1

    def by_layer(value: Any) -> Float32[Array, " l"]:
        return jax.reshard(jnp.broadcast_to(jnp.asarray(value, jnp.float32), layers), jax.P(axes[0]))

    kernel_step = kernel.AdamStep(
        count=jnp.asarray(at.count),
        rate=by_layer(at.rate * jnp.asarray(at.multiplier)),
        decay=by_layer(at.decay),
        factor=jnp.asarray(step.factor),
        finite=jnp.asarray(step.finite),
        key=jax.random.bits(step.key, (2,), jnp.uint32),  # two words, for the kernel's hash
        origin=jnp.asarray([step.first, 0, 0], jnp.uint32),
    )

    def of_shard(before: Updated, gradient: Array, kernel_step: kernel.AdamStep) -> Updated:
        def as_stack(leaf: Array) -> Array:
            return leaf.reshape(len(kernel_step.rate), -1, leaf.shape[-1])

        # The kernel sees (layers, rows, columns), and needs the global index of the shard's first element, so that
        # random bits do not depend on the sharding.
        (parameter, state), gradient = jax.tree.map(as_stack, (before, gradient))
        first = (0 if axis is None else jax.lax.axis_index(axis) * size for axis, size in zip(axes, gradient.shape))
        kernel_step = kernel_step._replace(
            origin=kernel_step.origin + jnp.stack([jnp.asarray(index, jnp.uint32) for index in first])
        )
        after, mu, nu = kernel.adamw_8bit(gradient, (parameter, state["mu"], state["nu"]), kernel_step, adam)
        return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), (after, {"mu": mu, "nu": nu}), before)

    arguments = before, gradient, kernel_step
    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
    return jax.shard_map(of_shard, in_specs=specs, out_specs=specs[0])(*arguments)


def float32_moments(parameters: Mapping[str, "Parameter"]) -> list[str]:
    """Return names and shapes of trained parameters with at least 4096 elements whose moments stay float32.

    No block divides their rows, or they are kernels of convolutions.
    """
    shapes = {name: parameter.matrix for name, parameter in sorted(parameters.items())}
    large = {name: shape for name, shape in shapes.items() if math.prod(shape) >= LEAST_ELEMENTS}
    return [f"{name} {list(shape)}" for name, shape in large.items() if block_of(shape) is None]


def undivided_moments(parameters: Mapping[str, "Parameter"], mesh: jax.sharding.Mesh) -> list[str]:
    """Return complaints about trained parameters with a block that the mesh would split."""
    complaints = set()
    for parameter in parameters.values():
        shape, lead = parameter.matrix, len(parameter.lead)
        entries = spec(*parameter.axes, layout=RULES.value.optimizer)[lead:]
        blocks = (block_of(shape) or ())[-len(shape) :]
        for axis_name, size, elements, entry in zip(parameter.matrix_axes, shape, blocks, entries):
            what = f"{axis_name}={size} in blocks of {elements}, which optim.name='adamw_8bit' has"
            if text := misfit(mesh, axes_in(entry), size // elements, what):
                complaints.add(f"{text} (mesh.data takes the rest)")
    return sorted(complaints)


def _zeros(shape: tuple[int, ...], block: Block, value: int) -> QuantizedMoment:
    """Return a moment of zeros, built directly: XLA would spend seconds on folding the amax of a constant."""
    rows, columns = block
    blocks = (*(size // rows for size in shape[:-1]), shape[-1] // columns)  # a float32 scale for each
    return QuantizedMoment(jnp.full(shape, value, jnp.uint8), jnp.zeros(blocks))
