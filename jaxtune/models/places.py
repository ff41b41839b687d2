"""Where a parameter stands in Hugging Face's files: each tensor, or the part of one, that it is made of."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """What holds a parameter, in a family's table of names, where it is not simply a tensor of the same shape.

    Attributes:
        name: with {layer}.
        stacked: in a leading dimension are all experts of a layer; or one, where the parameter has none.
        transposed: a matrix is stored as (in, out).
        interleaved: the rows of parameters with this name take turns; otherwise one's rows follow another's.
        loaded: what transformers calls the parameter once it is read, and peft after it; None: as it is in the files.
    """

    name: str
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False
    loaded: str | None = None


@dataclass(frozen=True)
class Place:
    """A Hugging Face tensor, or some rows of a matrix in one.

    Attributes:
        name: of the tensor.
        first: its row at which the part begins.
        of: rows of the whole matrix, where this is a part of it (of a fused qkv or gate_up); None: it is all of it.
        step: from one row of the part to the next.
        element, stack: number of the matrix in the tensor's leading dimension, and how many there are; None: the
            tensor is one matrix.
        transposed: the matrix is stored as (in, out).
        column, columns: of the matrix, the first column of the part; and from one to the next.
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

    def shape_in_file(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, by that of the part."""
        rows, *rest = part
        matrix = (self.of or rows, *(size * self.columns for size in rest))
        matrix = matrix[::-1] if self.transposed else matrix
        return matrix if self.stack is None else (self.stack, *matrix)

    def rows_in(self, tensor: np.ndarray) -> np.ndarray:
        """A view of the tensor, whose first rows are those of the part."""
        matrix = tensor if self.element is None else tensor[self.element]
        rows = (matrix.T if self.transposed else matrix)[self.first :: self.step]
        return rows if self.columns == 1 else rows[:, self.column :: self.columns]
