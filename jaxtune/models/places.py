"""Where a parameter stands in Hugging Face's files: each tensor, or the part of one, that it is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A Hugging Face tensor, or some rows of one.

    Attributes:
        name: of the tensor.
        first: its row at which the part begins.
        of: rows of the whole tensor, where this is a part of it (of a fused qkv or gate_up); None: it is all of it.
    """

    name: str
    first: int = 0
    of: int | None = None
