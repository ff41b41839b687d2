"""Which keys a query may see, as a small description: no (sequence, sequence) array is made from it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mask:
    """Visible keys of a query at index i: key <= i, and key > i - window where there is a window.

    Packing adds a lower bound per token, `key_start`, which is an array and so an argument of the op.
    """

    window: int | None = None

    def first_key(self, query: int) -> int:
        """Lowest key index that the query at this index can see."""
        return 0 if self.window is None else max(0, query - self.window + 1)
