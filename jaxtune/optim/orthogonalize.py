"""Newton-Schulz orthogonalisation of a stack of matrices, with each matrix whole on one device of the mesh."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxtune.parallel.layout import axes_in

# The quintic of Keller Jordan's Muon (2024), as in torch.optim.Muon and optax.contrib.muon: the steepest one at 0.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # as in torch.optim.Muon
# Matrices are multiplied in batches of at most this many elements; a larger matrix is a batch by itself.
TOGETHER = 2**24


def orthogonalize(
    matrices: Float[Array, "*layers o i"], steps: int = 5, dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "*layers o i"]:
    """Return approximately U V^T for each matrix U S V^T: singular values end up between about 0.7 and 1.2.

    matrices: one matrix or a stack, sharded in any way. The result is float32, with the same sharding.
    dtype: dtype of the factors of products; sums are float32. torch and Muon's own code use bfloat16.

    The layers are spread over all devices. Layers that are sharded (experts) stay on the devices of their shard, each
    shard being padded with zeros to a multiple of the number of its devices. All-to-alls give each device whole
    matrices, and afterwards its part of every matrix. No device holds more than its share of the stack.
    """
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], steps, dtype)[0]
    sharding = jax.typeof(matrices).sharding
    if sharding.mesh.empty:
        return _newton_schulz_by_parts(matrices.astype(dtype), steps).astype(jnp.float32)
    by_layer, *by_side = sharding.spec
    # Example: 36 layers on a mesh of 2 x 2 x 4 devices, with o sharded over the second axis and i over the third, are
    # padded to 48. The first axis shards neither, so a reshard divides the layers over it: (24, o/2, i/4) on a device.
    # An all-to-all over the second axis exchanges half of a device's layers for the other half of o: (12, o, i/4).
    # Another over the third axis leaves (3, o, i): three whole matrices on each of 16 devices. The way back is the
    # reverse.
    exchanged = [(side, axes_in(axes)) for side, axes in enumerate(by_side, 1) if axes is not None]
    axis_sizes = {axis: size for axis, size in sharding.mesh.shape.items() if axis not in sharding.mesh.manual_axes}
    sharded = {*axes_in(by_layer), *(axis for _, axes in exchanged for axis in axes)}
    replicated = tuple(axis for axis in axis_sizes if axis not in sharded)

    def on_a_device(stack):
        stack = stack[0]
        for side, axes in exchanged:
            stack = lax.all_to_all(stack, axes, split_axis=0, concat_axis=side, tiled=True)
        stack = _newton_schulz_by_parts(stack, steps)
        for side, axes in reversed(exchanged):
            stack = lax.all_to_all(stack, axes, split_axis=side, concat_axis=0, tiled=True)
        return stack[None]

    shards = math.prod(axis_sizes[axis] for axis in axes_in(by_layer))
    by_shard = jnp.reshape(
        matrices.astype(dtype), (shards, -1, *matrices.shape[1:]), out_sharding=P(by_layer, None, *by_side)
    )
    layers, devices = by_shard.shape[1], math.prod(axis_sizes.values()) // shards
    stack = jnp.pad(by_shard, ((0, 0), (0, -layers % devices), (0, 0), (0, 0)))
    spread = P(by_layer, replicated, *by_side)
    mapped = jax.shard_map(on_a_device, in_specs=spread, out_specs=spread)
    stack = jax.reshard(mapped(jax.reshard(stack, spread)), jax.typeof(by_shard).sharding)[:, :layers]
    return jnp.reshape(stack, matrices.shape, out_sharding=sharding.spec).astype(jnp.float32)


def _newton_schulz_by_parts(stack: Float[Array, "layers o i"], steps: int) -> Float[Array, "layers o i"]:
    """Orthogonalise one part of the stack after another, in place, so that temporaries are of one part."""
    layers, rows, columns = stack.shape
    most = max(1, TOGETHER // (rows * columns))
    part = max(size for size in range(1, layers + 1) if layers % size == 0 and size <= most)

    def one(index, stack):
        matrices = lax.dynamic_slice_in_dim(stack, index * part, part)
        return lax.dynamic_update_slice_in_dim(stack, _newton_schulz(matrices, steps), index * part, 0)

    return lax.fori_loop(0, layers // part, one, stack)


def _newton_schulz(matrices: Float[Array, "layers o i"], steps: int) -> Float[Array, "layers o i"]:
    a, b, c = COEFFICIENTS
    dtype = matrices.dtype
    tall = matrices.shape[1] > matrices.shape[2]  # the Gram matrix is of the smaller side
    x = (matrices.mT if tall else matrices).astype(jnp.float32)

    def iterate(_, x):
        # The barrier makes both uses of the Gram matrix see it rounded: on a CPU, XLA would skip the rounding in one.
        gram = lax.optimization_barrier(x @ x.mT)
        # a * I is added to the factor instead of a * x to the product: equally exact, and the largest array is written
        # only once.
        square = jnp.matmul(gram, gram, preferred_element_type=jnp.float32)
        factor = a * jnp.eye(x.shape[1]) + b * gram.astype(jnp.float32) + c * square
        return factor.astype(dtype) @ x

    # The Frobenius norm is at least the largest singular value, so all singular values begin between 0 and 1.
    norm = jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))
    # Unrolled, because a loop would copy x in every iteration: a product cannot be written over its own factor.
    x = lax.fori_loop(0, steps, iterate, (x / jnp.maximum(norm, EPSILON)).astype(dtype), unroll=True)
    return x.mT if tall else x
