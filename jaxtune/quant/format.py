"""The base class of formats: a block shape, a function from a matrix to codes and scales, layout and checks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxtune.parallel.layout import spec
from jaxtune.quant.array import QuantizedArray, by_block, pack
from pallas_kernels.quant_matmul.elements import ELEMENTS
from pallas_kernels.quant_matmul.layout import block_scales


class EncodedMatrix(NamedTuple):
    """A matrix in a format, before its codes are packed.

    Attributes:
        codes: one byte per element, in blocks.
        scales, outer_scales, offset: as in `QuantizedArray`.
    """

    codes: UInt8[Array, "o/r r i/c c"]
    scales: Any
    outer_scales: Float[Array, " n"] | None = None
    offset: Float[Array, ""] | None = None


@dataclass(frozen=True)
class Format(ABC):
    """A way to quantize: a `Storage` of models.parameters. Hashable: equal instances share a jit cache entry.

    Attributes:
        elements: the kind of element, a name in ELEMENTS of `pallas_kernels.quant_matmul`.
        block: number of rows and columns that share a scale; None: all rows or all columns.
    """

    elements: str
    block: tuple[int | None, int | None]

    @abstractmethod
    def encode(self, weight: Float[Array, "o i"]) -> EncodedMatrix:
        """Return codes and scales of a finite matrix of any float dtype, in pure jax.numpy."""

    def quantize(self, weight: Float[Array, "o i"]) -> QuantizedArray:
        """Quantize a finite matrix of any float dtype."""
        encoded = self.encode(weight)
        codes = pack(encoded.codes) if ELEMENTS[self.elements].packed == 2 else encoded.codes
        encoded = encoded._replace(codes=codes.reshape(len(weight), -1))
        return QuantizedArray(*encoded, self.elements, weight.dtype)

    def round(self, weight: Float[Array, "o i"]) -> Float[Array, "o i"]:
        """Return the dequantized result of `quantize`; XLA fuses it, because no codes are packed."""
        encoded = self.encode(weight)
        scales = QuantizedArray(*encoded, self.elements, weight.dtype).kernel_scales()
        values = ELEMENTS[self.elements].decode(encoded.codes) * by_block(block_scales(*scales))
        return values.reshape(weight.shape).astype(weight.dtype)

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of a block, for a matrix of this shape."""
        rows, columns = self.block
        return rows or shape[0], columns or shape[1]

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Return why a matrix of this shape cannot be divided into whole blocks, or None."""
        rows, columns = self.block_of(shape)
        if shape[0] % rows or shape[1] % columns:
            return f"blocks of {rows} x {columns} do not divide {shape[0]} x {shape[1]}"
        if columns % ELEMENTS[self.elements].packed:
            return f"blocks of {columns} elements separate two that share a byte: a block must have an even number"
        return None

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> QuantizedArray:
        """Return shapes, dtypes and shardings on the current mesh of a parameter of this shape, dtype and axes."""
        matrix, mesh = self._matrix(shape, dtype), jax.sharding.get_mesh()

        def leaf(array: jax.ShapeDtypeStruct, place: jax.P) -> jax.ShapeDtypeStruct:
            where = jax.NamedSharding(mesh, place)
            return jax.ShapeDtypeStruct((*shape[:-2], *array.shape), array.dtype, sharding=where)

        return jax.tree.map(leaf, matrix, self._places(matrix, axes))

    def make(self, weight: Float[Array, "*stack o i"], axes: tuple[str | None, ...]) -> QuantizedArray:
        """Quantize a matrix, or a stack, with these logical axes, on the devices that hold it."""
        return _quantize(weight, self, self._places(self._matrix(weight.shape, weight.dtype), axes))

    def make_together(
        self, weights: Sequence[Float[Array, "*stack o i"]], axes: Sequence[tuple[str | None, ...]]
    ) -> list[QuantizedArray]:
        """Quantize matrices, or stacks, as if each were some rows of one: they share the scale of the whole matrix.

        axes: the logical axes of each. No block of several matrices may have more than one row.
        """
        if len(weights) == 1:
            return [self.make(weights[0], axes[0])]
        assert self.block[0] == 1
        matrices = (self._matrix(weight.shape, weight.dtype) for weight in weights)
        places = [self._places(matrix, of_weight) for matrix, of_weight in zip(matrices, axes)]
        return _quantize_together(tuple(weights), self, tuple(places))

    def round_together(
        self, weights: Sequence[Float[Array, "*stack o i"]], axes: Sequence[tuple[str | None, ...]]
    ) -> list[Float[Array, "*stack o i"]]:
        """Return the dequantized results of `make_together`."""
        return _round_together(tuple(weights), self, tuple(spec(*of_weight) for of_weight in axes))

    def _matrix(self, shape: tuple[int, ...], dtype: Any) -> QuantizedArray:
        """Return shapes and dtypes of one quantized matrix of a stack of this shape."""
        return jax.eval_shape(self.quantize, jax.ShapeDtypeStruct(shape[-2:], dtype))

    def _places(self, matrix: QuantizedArray, axes: tuple[str | None, ...]) -> QuantizedArray:
        """Return the PartitionSpec of each array of a stack of such matrices with these logical axes."""

        def leaf(array: jax.ShapeDtypeStruct) -> jax.P:
            # Codes and scales of blocks are sharded like the matrix. An axis with a single block, scales of scales and
            # offsets are on every device.
            inner = [axis if array.ndim == 2 and size > 1 else None for axis, size in zip(axes[-2:], array.shape)]
            return spec(*axes[:-2], *inner)

        return jax.tree.map(leaf, matrix)


@partial(jax.jit, static_argnames=("format", "place"))
def _quantize(weight: Float[Array, "*stack o i"], format: Format, place: QuantizedArray) -> QuantizedArray:
    """Quantize a matrix or a stack; `place`: the PartitionSpec of each array of the result."""
    quantize = format.quantize
    for _ in range(weight.ndim - 2):
        quantize = jax.vmap(quantize)
    # Formats do not handle shardings, so XLA chooses them inside.
    return cast(QuantizedArray, jax.sharding.auto_axes(quantize, out_sharding=place)(weight))


@partial(jax.jit, static_argnames=("format", "places"))
def _quantize_together(
    weights: tuple[Float[Array, "*stack o i"], ...], format: Format, places: tuple[QuantizedArray, ...]
) -> list[QuantizedArray]:
    """Quantize the concatenation of matrices, and return the rows of each; `places`: as in `_quantize`."""

    def quantize(*weights: Float[Array, "o i"]) -> list[QuantizedArray]:
        whole, arrays, first = format.quantize(jnp.concatenate(weights)), [], 0
        for weight in weights:
            rows = slice(first, first := first + len(weight))
            arrays.append(replace(whole, codes=whole.codes[rows], scales=whole.scales[rows]))
        return arrays

    for _ in range(weights[0].ndim - 2):
        quantize = jax.vmap(quantize)
    return cast(list[QuantizedArray], jax.sharding.auto_axes(quantize, out_sharding=list(places))(*weights))


@partial(jax.jit, static_argnames=("format", "places"))
def _round_together(
    weights: tuple[Float[Array, "*stack o i"], ...], format: Format, places: tuple[jax.P, ...]
) -> list[Float[Array, "*stack o i"]]:
    """Round the concatenation of matrices, and return the rows of each, with these PartitionSpecs."""

    def round_all(*weights: Float[Array, "o i"]) -> list[Float[Array, "o i"]]:
        if len(weights) == 1:
            return [format.round(weights[0])]
        ends = np.cumsum([len(weight) for weight in weights])
        return jnp.split(format.round(jnp.concatenate(weights)), ends[:-1])

    for _ in range(weights[0].ndim - 2):
        round_all = jax.vmap(round_all)
    return cast(list[Array], jax.sharding.auto_axes(round_all, out_sharding=list(places))(*weights))
