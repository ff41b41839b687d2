"""MXFP4, the format of gpt-oss's experts in files (OCP Microscaling 1.0): dequantized while it is read, or kept.

e2m1 elements, 32 of a row with one scale, a power of two. X_blocks (experts, out, in / 32, 16) has two codes a byte,
the first in the low bits; X_scales (experts, out, in / 32) the exponents plus 127. They stand for X (experts, in, out),
in bfloat16 exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt8

from jaxtune.errors import UserError
from jaxtune.hf.tensor_sources import Source
from jaxtune.models.places import Place
from pallas_kernels.quant_matmul import ELEMENTS

BLOCK = 32
_VALUES = np.asarray(ELEMENTS["e2m1"].values, np.float32)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # of each byte, its low and its high code
_NAN = 255  # among the scales


@dataclass(frozen=True)
class Mxfp4(Source):
    """The tensor X that blocks and scales stand for; `file` and `begin` are those of the blocks."""

    scales: Source

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that it is read from."""
        return (self.file, self.scales.file)

    def rows(
        self, first: int, count: int, rest: tuple[slice, ...], place: Place = Place("")
    ) -> Shaped[np.ndarray, "..."]:
        """Rows of a matrix (out, in), float32. Raises UserError for a scale that is NaN."""
        (columns,) = (slice(*part.indices(self.shape[1])) for part in rest)
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        codes = self.codes(first, count, slice(blocks.start * BLOCK // 2, blocks.stop * BLOCK // 2), place)
        exponents = self.exponents(first, count, blocks, place)
        values = np.ldexp(_PAIRS[codes].reshape(*exponents.shape, BLOCK), exponents.astype(np.int32)[..., None] - 127)
        skipped = columns.start - blocks.start * BLOCK
        return values.reshape(count, -1)[:, skipped : skipped + columns.stop - columns.start]

    def codes(self, first: int, count: int, part: slice, place: Place) -> UInt8[np.ndarray, "o i/2"]:
        """Rows of a matrix (out, in / 2), two codes a byte, the first in the low bits."""
        experts, width, rows = self.shape
        codes = Source(self.file, (experts, rows, width // 2), "U8", self.begin)
        return codes.rows(first, count, (part,), _as_stored(place))

    def exponents(self, first: int, count: int, part: slice, place: Place) -> UInt8[np.ndarray, "o i/32"]:
        """Rows of a matrix (out, in / 32). Raises UserError for a scale that is NaN."""
        found = self.scales.rows(first, count, (part,), _as_stored(place))
        if (found == _NAN).any():
            raise UserError(f"{self.scales.file}: a scale of MXFP4 is NaN; the file is damaged")
        return found


@dataclass(frozen=True)
class _Stored:
    """What stands for a matrix in the file, uint8."""

    source: Mxfp4
    place: Place
    itemsize = 1


class Codes(_Stored):
    """Two codes a byte, the first in the high bits, as QuantizedArray has them."""

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> UInt8[np.ndarray, "o i/2"]:
        """Rows of a matrix (out, in / 2)."""
        (part,) = rest
        found = self.source.codes(first, count, part, self.place)
        return (found << 4) | (found >> 4)


class Exponents(_Stored):
    """The scales of blocks, e8m0."""

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> UInt8[np.ndarray, "o i/32"]:
        """Rows of a matrix (out, in / 32). Raises UserError for a scale that is NaN."""
        (part,) = rest
        return self.source.exponents(first, count, part, self.place)


def _as_stored(place: Place) -> Place:
    """Where a matrix is in the file, which has it as it is multiplied here: the tensor it stands for is transposed."""
    if not place.transposed or place.element is None:
        raise ValueError(f"{place} is not one of several transposed matrices")
    return replace(place, transposed=False)


def with_mxfp4(sources: Mapping[str, Source]) -> dict[str, Source]:
    """The tensors, with X in place of X_blocks and X_scales. Raises UserError where these do not fit each other."""
    found = dict(sources)
    for name in [name.removesuffix("_blocks") for name in sources if name.endswith("_blocks")]:
        blocks, scales = found.pop(f"{name}_blocks"), found.pop(f"{name}_scales", None)
        if scales is None:
            raise UserError(f"{blocks.file}: {name}_blocks has no {name}_scales, without which it cannot be read")
        right = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
        if not right or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise UserError(
                f"{blocks.file}: {name}_blocks is {blocks.dtype} {blocks.shape}, {name}_scales {scales.dtype} "
                f"{scales.shape}; they must be U8, (experts, out, in / {BLOCK}, {BLOCK // 2}) and one dimension less"
            )
        experts, rows, count = scales.shape
        found[name] = Mxfp4(blocks.file, (experts, count * BLOCK, rows), "BF16", blocks.begin, scales)
    return found
