"""A weight in low precision, ready for its products, and the interface of a number format, `MatmulFormat`.

Shapes: b batch, s sequence, i inputs and o outputs of the layer, m rows, k contracted elements, t tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.parallel.layout import Entry, P, sharding
from jaxtune.parallel.layout import spec as layout_spec
from jaxtune.parallel.random import Noise
from pallas_kernels.manual_axes import varying_axes

# Both sizes of a weight must be multiples of this, for cuBLASLt's FP8, NVFP4's block scales and the Hadamard rotation.
BLOCK = 16


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "block_scales"), meta_fields=())
@dataclass(frozen=True)
class Operand:
    """One side of a product, contracted over its last dimension; uint8 holds the bits of the codes.

    Attributes:
        codes: one byte per element, or two elements per byte, the first in the high four bits.
        scale: the scale of the whole matrix, which multiplies the elements.
        block_scales: e4m3 scales, one per block; None if blocks have no scales.
    """

    codes: UInt8[Array, "*stack m k_packed"]
    scale: Float[Array, "*stack 1 1"]
    block_scales: UInt8[Array, "*stack m/r k/16"] | None = None


@partial(jax.tree_util.register_dataclass, data_fields=("forward", "backward"), meta_fields=())
@dataclass(frozen=True)
class Operands:
    """A weight (o, i) for x W^T, and for dy W, which contracts over o.

    Attributes:
        forward: the operand of W, (o, i).
        backward: the operand of W^T, (i, o), so that no product transposes a weight; None if `forward` serves both.
    """

    forward: Operand
    backward: Operand | None


class MatmulFormat(ABC):
    """A number format, and how it computes the three products of a linear layer.

    It is a `Storage` of models.parameters that stores operands. Hashable: equal instances share a jit cache entry.

    `forward` and `backward` see the shard of one device: its tokens, and its part of i or of o; the caller sums over
    devices. amax is taken over all devices and ignores values that are not finite.
    """

    delayed: ClassVar[bool]
    """Whether the format can use delayed scales, made from the amax of earlier steps."""

    @abstractmethod
    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Make operands of a weight of any float dtype, in pure jax.numpy; a non-finite value makes products NaN."""

    @abstractmethod
    def forward(
        self, x: Float[Array, "b s i"], weight: Operand, scale: Float[Array, ""] | None
    ) -> tuple[Float[Array, "b s o"], Float[Array, ""]]:
        """Return x W^T in the dtype of x, and the amax of x."""

    @abstractmethod
    def backward(
        self,
        dy: Float[Array, "b s o"],
        x: Float[Array, "b s i"] | None,
        weight: Operand,
        scales: Float[Array, "2"] | None,
        random: Any,
        dtype: Any,
    ) -> tuple[Float[Array, "b s i"], Float[Array, "o i"] | None, Float[Array, ""]]:
        """Return dy W in the dtype of dy, dy^T x in `dtype` (None without x), and the amax of dy."""

    def random(self, noise: Noise | None, shape: tuple[int, ...]) -> Any:
        """Draw the random arrays (b, s, o) that `backward` needs for a dy of this global shape."""
        return None

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of a block, which no mesh may split."""
        return BLOCK, BLOCK

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Return why a matrix of this shape cannot be multiplied in this format, or None."""
        if shape[-2] % BLOCK or shape[-1] % BLOCK:
            return f"blocks of {BLOCK} x {BLOCK} do not divide {shape[-2]} x {shape[-1]}"
        return None

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> Operands:
        """Return shapes, dtypes and shardings on the current mesh of the operands of a weight or a stack of weights."""
        *stack, rows, columns = shape

        def leaf(array: jax.ShapeDtypeStruct, names: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*stack, *array.shape), array.dtype, sharding=sharding(*names))

        matrix = _shapes(self, (rows, columns), dtype)
        return jax.tree.map(leaf, matrix, _names(matrix, axes))

    def make(self, weight: Float[Array, "*stack o i"], axes: tuple[str | None, ...]) -> Operands:
        """Make operands of a weight or a stack with these logical axes, on its devices, eagerly or inside a jit."""
        return operands_at(weight, self, layout_spec(*axes))


def operands_at(weight: Float[Array, "*stack o i"], numbers: MatmulFormat, spec: P) -> Operands:
    """Make the operands of a weight, or a stack, with this PartitionSpec. They have no gradient."""
    specs = _names(_shapes(numbers, weight.shape[-2:], weight.dtype), tuple(spec))
    return _make_operands(jax.lax.stop_gradient(weight), numbers, specs)


@partial(jax.jit, static_argnames=("numbers", "specs"))
def _make_operands(weight: Float[Array, "*stack o i"], numbers: MatmulFormat, specs: Operands) -> Operands:
    make = numbers.operands
    for _ in range(weight.ndim - 2):
        # A stack of layers, or of layers and experts: each matrix has its own scale.
        make = jax.vmap(make)
    # Formats do not handle shardings, so XLA chooses them inside. An axis of stages may be manual here and stays so.
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    return cast(Operands, jax.sharding.auto_axes(make, axes=axes, out_sharding=specs)(weight))


def _shapes(numbers: MatmulFormat, shape: tuple[int, ...], dtype: Any) -> Operands:
    return jax.eval_shape(numbers.operands, jax.ShapeDtypeStruct(shape, dtype))


def _names(operands: Operands, axes: tuple[Entry, ...]) -> Operands:
    """Return the axis of each dimension of each array of a stack of operands; None for a dimension of one element."""
    *stack, out, inner = axes

    def of(operand: Operand | None, *axes: Entry) -> Operand | None:
        def named(array: jax.ShapeDtypeStruct) -> P:
            return P(*stack, *(axis if size > 1 else None for axis, size in zip(axes, array.shape)))

        return jax.tree.map(named, operand)

    forward = of(operands.forward, out, inner)
    assert forward is not None
    return Operands(forward, of(operands.backward, inner, out))


# No jnp.where with a constant below: jax would save that constant, broadcast to the size of x, as a residual of a
# rematerialised scan.


def global_amax(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the amax of x: largest finite magnitude, float32, over all devices with a shard (inside a shard_map)."""
    finite = jnp.isfinite(x)
    magnitudes = jnp.where(finite, jnp.abs(x), finite.astype(x.dtype))  # False, so 0, where x is not finite
    amax, axes = magnitudes.max().astype(jnp.float32), tuple(sorted(varying_axes(x)))
    # Over all devices, so that the scale, and with it the rounding, does not depend on the mesh.
    return jax.lax.pmax(amax, axes) if axes else amax


def nan_unless_finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return 0 where x is finite, else NaN; add it to a result that would hide that x is not finite."""
    return x - x


def by_feature(x: Float[Array, "b s k"]) -> Float[Array, "k t"]:
    """Return x with features first, to contract over tokens; each row's positions are zero-padded to whole blocks."""
    padding = -x.shape[1] % BLOCK
    padded = jnp.pad(x, ((0, 0), (0, padding), (0, 0))) if padding else x
    return padded.reshape(-1, x.shape[2]).T
