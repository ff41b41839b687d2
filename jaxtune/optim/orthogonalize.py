"""Newton-Schulz orthogonalisation of a stack of matrices, each whole on one device of the mesh."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Quintic of Keller Jordan's Muon (2024), as in torch.optim.Muon and optax.contrib.muon: steepest at 0.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# Matrices are multiplied in batches of up to so many elements; a larger matrix alone.
TOGETHER = 2**24


def orthogonalize(
    matrices: Float[Array, "*layers o i"], steps: int = 5, dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "*layers o i"]:
    """U V^T of each matrix U S V^T, roughly: singular values come out between about 0.7 and 1.2.

    matrices: one or a stack, sharded in any way but over the layers. The result is float32, sharded alike.
    dtype: of what is multiplied; sums are float32. torch and Muon's own code use bfloat16.

    The layers, padded with zeros to a multiple of the number of devices, are spread over all devices: all-to-alls bring
    a device whole matrices, and afterwards its part of every matrix. No device holds more than its share of the stack.
    """
    if matrices.ndim == 2:
        return orthogonalize(matrices[None], steps, dtype)[0]
    own = jax.typeof(matrices).sharding
    if own.mesh.empty:
        return _newton_schulz_by_parts(matrices.astype(dtype), steps).astype(jnp.float32)
    spec = tuple(own.spec)
    if spec[0] is not None:
        raise ValueError(f"orthogonalize: the layers of a stack must not be sharded, but are over {spec[0]!r}")
    # 36 layers on a mesh of 2 x 2 x 4 devices, o sharded over the second axis and i over the third, are padded to 48.
    # The first axis shards neither: over it the layers are divided by a reshard, (24, o/2, i/4) on a device. An
    # all-to-all over the second axis trades half of these layers for the other half of o, (12, o, i/4); one over the
    # third leaves (3, o, i): three whole matrices on each of 16 devices. The way back is the reverse.
    exchanged = [(dimension, _several(axes)) for dimension, axes in enumerate(spec) if axes is not None]
    here = {axis: size for axis, size in own.mesh.shape.items() if axis not in own.mesh.manual_axes}
    replicated = tuple(axis for axis in here if not any(axis in axes for _, axes in exchanged))

    def on_a_device(stack):
        for dimension, axes in exchanged:
            stack = lax.all_to_all(stack, axes, split_axis=0, concat_axis=dimension, tiled=True)
        stack = _newton_schulz_by_parts(stack, steps)
        for dimension, axes in reversed(exchanged):
            stack = lax.all_to_all(stack, axes, split_axis=dimension, concat_axis=0, tiled=True)
        return stack

    layers = len(matrices)
    stack = jnp.pad(matrices.astype(dtype), ((0, -layers % math.prod(here.values())), (0, 0), (0, 0)))
    spread = P(replicated, *spec[1:])
    mapped = jax.shard_map(on_a_device, in_specs=spread, out_specs=spread)
    stack = jax.reshard(mapped(jax.reshard(stack, spread)), own)
    return stack[:layers].astype(jnp.float32)


def _several(axes: "str | tuple[str, ...]") -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def _newton_schulz_by_parts(stack: Float[Array, "layers o i"], steps: int) -> Float[Array, "layers o i"]:
    """A part of the stack after the other, in place, so that temporaries are of one part."""
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
        # Rounded once for both of its uses: without the barrier XLA would skip the rounding for one of them on a CPU.
        gram = lax.optimization_barrier(x @ x.mT)
        # a * I is in the factor, in place of a * x added to the product: as exact, and the largest array is written
        # once.
        square = jnp.matmul(gram, gram, preferred_element_type=jnp.float32)
        factor = a * jnp.eye(x.shape[1]) + b * gram.astype(jnp.float32) + c * square
        return factor.astype(dtype) @ x

    norm = jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))
    # Unrolled: a loop would copy x in every iteration, as a product cannot be written over its own factor.
    x = lax.fori_loop(0, steps, iterate, (x / jnp.maximum(norm, EPSILON)).astype(dtype), unroll=True)
    return x.mT if tall else x
