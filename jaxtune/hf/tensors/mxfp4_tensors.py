"""MXFP4, the file format of gpt-oss's experts (OCP Microscaling 1.0): dequantized on reading, or kept.

Elements are e2m1; each block of 32 elements of a row shares one scale, a power of two. X_blocks (experts, out, in / 32,
16) packs two codes into a byte, the first in the low bits. X_scales (experts, out, in / 32) holds the exponents plus
127. Together they represent X (experts, in, out) exactly in bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt8

from jaxtune.errors import UserError
from jaxtune.hf.tensors.tensor_sources import TensorSource
from jaxtune.models.places import Place
from pallas_kernels.quant_matmul import ELEMENTS

BLOCK = 32
_VALUES = np.asarray(ELEMENTS["e2m1"].values, np.float32)
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=-1)  # values of a byte's low and high code
_NAN = 255  # the e8m0 code of NaN


@dataclass(frozen=True)
class Mxfp4Tensors(TensorSource):
    """The tensor X that blocks and scales represent; `file` and `begin` locate the blocks.

    Attributes:
        scales: the tensor of scales.
    """

    scales: TensorSource

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensor."""
        return (self.file, self.scales.file)

    def rows(
        self, first: int, count: int, rest: tuple[slice, ...], place: Place = Place("")
    ) -> Shaped[np.ndarray, "..."]:
        """Rows of a matrix (out, in), float32. Raises UserError for a scale that is NaN."""
        (columns,) = (slice(*part.indices(self.shape[1])) for part in rest)
        # Read whole blocks; then drop the columns before the first one and after the last one that are wanted.
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        codes = self.codes(first, count, slice(blocks.start * BLOCK // 2, blocks.stop * BLOCK // 2), place)
        exponents = self.exponents(first, count, blocks, place)
        values = np.ldexp(_PAIRS[codes].reshape(*exponents.shape, BLOCK), exponents.astype(np.int32)[..., None] - 127)
        skipped = columns.start - blocks.start * BLOCK
        return values.reshape(count, -1)[:, skipped : skipped + columns.stop - columns.start]

    def codes(self, first: int, count: int, part: slice, place: Place) -> UInt8[np.ndarray, "o i/2"]:
        """Rows of a matrix (out, in / 2), two codes a byte, the first in the low bits."""
        experts, width, rows = self.shape
        codes = TensorSource(self.file, (experts, rows, width // 2), "U8", self.begin)
        return codes.rows(first, count, (part,), _as_stored(place))

    def exponents(self, first: int, count: int, part: slice, place: Place) -> UInt8[np.ndarray, "o i/32"]:
        """Rows of a matrix (out, in / 32). Raises UserError for a scale that is NaN."""
        exponents = self.scales.rows(first, count, (part,), _as_stored(place))
        if (exponents == _NAN).any():
            raise UserError(f"{self.scales.file}: a scale of MXFP4 is NaN; the file is damaged")
        return exponents


@dataclass(frozen=True)
class _Stored:
    """Base of the two uint8 tensors that represent a matrix in the file."""

    source: Mxfp4Tensors
    place: Place
    itemsize = 1


class Codes(_Stored):
    """Two codes a byte, the first in the high bits, which is QuantizedArray's order."""

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> UInt8[np.ndarray, "o i/2"]:
        """Rows of a matrix (out, in / 2)."""
        (part,) = rest
        codes = self.source.codes(first, count, part, self.place)
        return (codes << 4) | (codes >> 4)


class Exponents(_Stored):
    """The block scales, e8m0."""

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> UInt8[np.ndarray, "o i/32"]:
        """Rows of a matrix (out, in / 32). Raises UserError for a scale that is NaN."""
        (part,) = rest
        return self.source.exponents(first, count, part, self.place)


def _as_stored(place: Place) -> Place:
    """The place of a matrix in the file.

    X is (in, out), so its place is transposed. Blocks and scales are stored (out, in), the orientation that is
    multiplied here, so theirs is not.
    """
    if not place.transposed or place.element is None:
        raise ValueError(f"{place} is not one of several transposed matrices")
    return replace(place, transposed=False)


def with_mxfp4(sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Replace X_blocks and X_scales by X. Raises UserError if blocks and scales do not fit together."""
    merged = dict(sources)
    for name in [name.removesuffix("_blocks") for name in sources if name.endswith("_blocks")]:
        blocks, scales = merged.pop(f"{name}_blocks"), merged.pop(f"{name}_scales", None)
        if scales is None:
            raise UserError(f"{blocks.file}: {name}_blocks has no {name}_scales, so it cannot be read")
        right = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
        if not right or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise UserError(
                f"{blocks.file}: {name}_blocks is {blocks.dtype} {blocks.shape}, {name}_scales {scales.dtype} "
                f"{scales.shape}; they must be U8, (experts, out, in / {BLOCK}, {BLOCK // 2}) and one dimension less"
            )
        experts, rows, count = scales.shape
        merged[name] = Mxfp4Tensors(blocks.file, (experts, count * BLOCK, rows), "BF16", blocks.begin, scales)
    return merged
