"""The location of a parameter in Hugging Face's files: the tensors, or parts of tensors, that hold its values."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """An entry of a family's table of names, for a tensor that does not have the parameter's own shape.

    Attributes:
        name: the tensor's name, with {layer}, and with {expert} or {later_expert} if it is of one expert; the latter
            counts on after the experts of the layer.
        stacked: whether a leading dimension has all experts of a layer; for parameters without experts, each parameter
            with this name.
        transposed: whether a matrix is stored as (in, out).
        interleaved: whether the rows of the parameters with this name alternate, instead of following one another.
        loaded: name of the parameter in transformers after loading, and in peft; None: the name in the files.
        scalar: whether the tensor has no dimensions, although the parameter has one, of size 1.
    """

    name: str
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False
    loaded: str | None = None
    scalar: bool = False


@dataclass(frozen=True)
class Place:
    """A Hugging Face tensor, or some rows of a matrix in one.

    Attributes:
        name: name of the tensor.
        first: the part's first row.
        of: number of rows of the whole matrix, if this is a part (of a fused qkv or gate_up); None: it is the whole.
        step: distance between two rows of the part.
        element: index of the matrix in the tensor's leading dimension; None: the tensor is one matrix.
        stack: size of that leading dimension; None: the tensor is one matrix.
        transposed: whether the matrix is stored as (in, out).
        column: the part's first column.
        columns: distance between two columns of the part.
        scalar: as in `Tensor`.
    """

    name: str
    first: int = 0
    of: int | None = None
    step: int = 1
    element: int | None = None
    stack: int | None = None
    transposed: bool = False
    column: int = 0
    columns: int = 1
    scalar: bool = False

    def shape_in_file(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given the shape of the part."""
        if self.scalar:
            return ()
        rows, *rest = part
        matrix = (self.of or rows, *(size * self.columns for size in rest))
        matrix = matrix[::-1] if self.transposed else matrix
        return matrix if self.stack is None else (self.stack, *matrix)

    def rows_in(self, tensor: np.ndarray) -> np.ndarray:
        """Return a view of the tensor that begins with the rows of the part (and may have more)."""
        if self.scalar:
            return tensor.reshape(1)
        matrix = tensor if self.element is None else tensor[self.element]
        rows = (matrix.T if self.transposed else matrix)[self.first :: self.step]
        return rows if self.columns == 1 else rows[:, self.column :: self.columns]
