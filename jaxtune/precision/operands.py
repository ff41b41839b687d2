"""A weight in low precision, ready for its products; and the interface of a number format, `Numbers`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxtune.parallel.layout import Entry, P, sharding
from jaxtune.parallel.layout import spec as layout_spec
from pallas_kernels.manual_axes import varying_axes

if TYPE_CHECKING:
    from jaxtune.parallel.random import Noise

# Sizes of a weight must be multiples of this: cuBLASLt's FP8, NVFP4's block scales and the Hadamard rotation need it.
BLOCK = 16


@partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "block_scales"), meta_fields=())
@dataclass(frozen=True)
class Operand:
    """A side of a product, contracted over its last dimension; uint8 holds the bits of the codes.

    Attributes:
        codes: a byte an element, or two elements a byte, the first in the high four bits.
        scale: of the whole matrix; it multiplies the elements.
        block_scales: e4m3, one a block, where blocks have scales of their own.
    """

    codes: UInt8[Array, "*stack m k_packed"]
    scale: Float[Array, "*stack 1 1"]
    block_scales: UInt8[Array, "*stack m/r k/16"] | None = None


@partial(jax.tree_util.register_dataclass, data_fields=("forward", "backward"), meta_fields=())
@dataclass(frozen=True)
class Operands:
    """A weight (o, i) for x W^T, and for dy W, which contracts over o.

    Attributes:
        forward: of W, (o, i).
        backward: of W^T, (i, o), so that no product transposes a weight; None where `forward` serves both.
    """

    forward: Operand
    backward: Operand | None


class Numbers(ABC):
    """How the three products of a linear layer are computed: a `Storage` of models.parameters, as operands.

    Hashable: equal instances share a jit cache entry.

    `forward` and `backward` see the part of one device: its tokens, and its part of i or of o; the caller sums over
    devices. amax is over all devices, and ignores values that are not finite.
    """

    delayed: ClassVar[bool]
    """Whether it can use delayed scales, which earlier steps made."""

    @abstractmethod
    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Of a weight of any float dtype, in pure jax.numpy; a value that is not finite makes products NaN."""

    @abstractmethod
    def forward(
        self, x: Float[Array, "b s i"], weight: Operand, scale: Float[Array, ""] | None
    ) -> tuple[Float[Array, "b s o"], Float[Array, ""]]:
        """x W^T in the dtype of x, and the amax of x."""

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
        """dy W in the dtype of dy, dy^T x in `dtype` (None without x), and the amax of dy."""

    def random(self, noise: "Noise | None", shape: tuple[int, ...]) -> Any:
        """Random arrays (b, s, o) that `backward` needs for a dy of this global shape."""
        return None

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that no mesh may split."""
        return BLOCK, BLOCK

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why a matrix of this shape cannot be multiplied in this format, or None."""
        if shape[-2] % BLOCK or shape[-1] % BLOCK:
            return f"blocks of {BLOCK} x {BLOCK} do not divide {shape[-2]} x {shape[-1]}"
        return None

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> Operands:
        """Shapes, dtypes and shardings of the operands of a weight, or of a stack of them, on the current mesh."""
        *stack, rows, columns = shape

        def leaf(array: jax.ShapeDtypeStruct, names: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*stack, *array.shape), array.dtype, sharding=sharding(*names))

        matrix = _shapes(self, (rows, columns), dtype)
        return jax.tree.map(leaf, matrix, _names(matrix, axes))

    def make(self, weight: Float[Array, "*stack o i"], axes: tuple[str | None, ...]) -> Operands:
        """Of a weight, or a stack, with these logical axes, made where it is: eagerly, or inside a jit."""
        return operands_at(weight, self, layout_spec(*axes))


def operands_at(weight: Float[Array, "*stack o i"], numbers: Numbers, place: P) -> Operands:
    """The operands of a weight, or of a stack, with this PartitionSpec. They have no gradient."""
    places = _names(_shapes(numbers, weight.shape[-2:], weight.dtype), tuple(place))
    return _made(jax.lax.stop_gradient(weight), numbers, places)


@partial(jax.jit, static_argnames=("numbers", "places"))
def _made(weight: Float[Array, "*stack o i"], numbers: Numbers, places: Operands) -> Operands:
    make = numbers.operands
    for _ in range(weight.ndim - 2):
        make = jax.vmap(make)
    # Formats say nothing of shardings: XLA chooses those inside. An axis of stages may be manual here, and stays so.
    axes = jax.sharding.get_abstract_mesh().explicit_axes
    return cast(Operands, jax.sharding.auto_axes(make, axes=axes, out_sharding=places)(weight))


def _shapes(numbers: Numbers, shape: tuple[int, ...], dtype: Any) -> Operands:
    return jax.eval_shape(numbers.operands, jax.ShapeDtypeStruct(shape, dtype))


def _names(operands: Operands, axes: tuple[Entry, ...]) -> Operands:
    """The axis of each dimension of each array of a stack of operands; None for a dimension of one element."""
    *stack, out, inner = axes

    def of(operand: Operand | None, *axes: Entry) -> Operand | None:
        def named(array: jax.ShapeDtypeStruct) -> P:
            return P(*stack, *(axis if size > 1 else None for axis, size in zip(axes, array.shape)))

        return jax.tree.map(named, operand)

    forward = of(operands.forward, out, inner)
    assert forward is not None
    return Operands(forward, of(operands.backward, inner, out))


# No jnp.where with a constant below: jax would save that constant, broadcast to the size of x, through a rematerialised
# scan.


def largest(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The amax of x: largest finite magnitude, float32, over all devices that hold a part (inside a shard_map)."""
    finite = jnp.isfinite(x)
    magnitudes = jnp.where(finite, jnp.abs(x), finite.astype(x.dtype))  # False, so 0, where x is not finite
    found, axes = magnitudes.max().astype(jnp.float32), tuple(sorted(varying_axes(x)))
    return jax.lax.pmax(found, axes) if axes else found


def nan_unless_finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """0 where x is finite, else NaN: to be added to a result that would hide that x is not finite."""
    return x - x


def by_feature(x: Float[Array, "b s k"]) -> Float[Array, "k t"]:
    """x with features first, to be contracted over tokens; each row's positions are zero-padded to whole blocks."""
    short = -x.shape[1] % BLOCK
    filled = jnp.pad(x, ((0, 0), (0, short), (0, 0))) if short else x
    return filled.reshape(-1, x.shape[2]).T
