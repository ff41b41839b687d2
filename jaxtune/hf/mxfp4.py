"""MXFP4, the format of gpt-oss's experts in files (OCP Microscaling 1.0): dequantized while it is read.

e2m1 elements, 32 of a row with one scale, a power of two. X_blocks (experts, out, in / 32, 16) has two codes a byte,
the first in the low bits; X_scales (experts, out, in / 32) the exponents plus 127. They stand for X (experts, in, out),
in bfloat16 exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped

from jaxtune.errors import UserError
from jaxtune.hf.sources import Source
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

    def rows(
        self, first: int, count: int, rest: tuple[slice, ...], place: Place = Place("")
    ) -> Shaped[np.ndarray, "..."]:
        """Rows of a matrix (out, in), float32. Raises UserError for a scale that is NaN."""
        if not place.transposed or place.element is None:
            raise ValueError(f"{place} is not one of several transposed matrices")
        experts, width, rows = self.shape
        # The file has the matrix as it is multiplied here, and not transposed as the tensor that it stands for.
        matrix = Place("", place.first, place.of, place.step, place.element, experts)
        (columns,) = (slice(*part.indices(width)) for part in rest)
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        codes = Source(self.file, (experts, rows, width // BLOCK, BLOCK // 2), "U8", self.begin)
        found = codes.rows(first, count, (blocks, slice(None)), matrix)
        exponents = self.scales.rows(first, count, (blocks,), matrix)
        if (exponents == _NAN).any():
            raise UserError(f"{self.scales.file}: a scale of MXFP4 is NaN; the file is damaged")
        values = np.ldexp(_PAIRS[found].reshape(*exponents.shape, BLOCK), exponents.astype(np.int32)[..., None] - 127)
        skipped = columns.start - blocks.start * BLOCK
        return values.reshape(count, -1)[:, skipped : skipped + columns.stop - columns.start]


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
