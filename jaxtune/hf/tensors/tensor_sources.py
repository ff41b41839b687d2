"""The tensors of safetensors files: located by reading only the headers, and read in parts.

Only safetensors: a pickle can run code, so .bin weights are refused.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
import xxhash
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxtune.errors import UserError
from jaxtune.json_file import read_json
from jaxtune.models.places import Place

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Further dtypes are allowed for tensors that are not parameters; U8 and F8_E4M3 of quantized weights are read as bits.
ALL_DTYPES = DTYPES | {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)},
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_READ_AS = DTYPES | dict.fromkeys(("U8", "F8_E4M3"), np.dtype(np.uint8))
# Name prefixes in files that differ from those in transformers and peft now: of the decoder in a vision-language model
# and of its tower, as transformers before 4.52 wrote them and later versions still write for some families, and of
# Nemotron-H.
_OLDER = (
    {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."},
    {"vision_tower.vision_model.": "model.vision_tower."},  # of SigLIP; the next one by transformers 4.52 to 4.57
    {"model.vision_tower.vision_model.": "model.vision_tower."},
    {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
    {"backbone.": "model."},
    {"vision_model.": "model.vision_model."},  # of ERNIE 4.5 VL, as published
)
_NOW = {older: now for renamed in _OLDER for older, now in renamed.items()}
CHECKSUM = "xxh3_64"  # key in __metadata__ of exported files: hash, in hex, of all bytes after the header
_COMPARED = 2**24  # bytes compared at a time
_LFS_POINTER = b"version https://git-lfs"


class RowSource(Protocol):
    """A source for a parameter, or for one layer of a stack: a matrix whose rows can be read in any range."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the file."""
        ...

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Rows [first, first + count) and a part of the other dimensions."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """A tensor in a file, any part of which can be read.

    Attributes:
        file: the safetensors file.
        shape: shape of the tensor.
        dtype: safetensors' name of the dtype; F8_E4M3 is read as its bits, uint8.
        begin: offset of the tensor's first byte in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensor."""
        return (self.file,)

    @property
    def itemsize(self) -> int:
        """Bytes of an element; KeyError for a dtype that cannot be read."""
        return _READ_AS[self.dtype].itemsize

    def rows(
        self, first: int, count: int, rest: tuple[slice, ...], place: Place = Place("")
    ) -> Shaped[np.ndarray, "..."]:
        """Read rows [first, first + count) and a part of the other dimensions, of the tensor or its part at `place`.

        Rows beyond the last one are zeros.
        """
        with report_damage(self.file):
            tensor = np.memmap(self.file, _READ_AS[self.dtype], "r", self.begin, self.shape)
            # A copy, so that the mapping ends here and the result keeps no pages of the file.
            values = np.array(place.rows_in(tensor)[(slice(first, first + count), *rest)])
        missing = count - len(values)
        return np.pad(values, [(0, missing)] + [(0, 0)] * len(rest)) if missing else values

    def whole(self) -> Shaped[np.ndarray, "..."]:
        """Read the whole tensor, which may have any dtype of `ALL_DTYPES`."""
        dtype = ALL_DTYPES[self.dtype]
        with report_damage(self.file), self.file.open("rb") as file:
            file.seek(self.begin)
            return np.frombuffer(file.read(math.prod(self.shape) * dtype.itemsize), dtype).reshape(self.shape)

    def equals(self, other: "TensorSource") -> bool:
        """Whether both tensors are the same bit by bit. Reading stops at the first difference."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        size = math.prod(self.shape) * ALL_DTYPES[self.dtype].itemsize
        with (
            report_damage(self.file),
            self.file.open("rb") as ours,
            report_damage(other.file),
            other.file.open("rb") as theirs,
        ):
            ours.seek(self.begin)
            theirs.seek(other.begin)
            parts = (min(_COMPARED, size - first) for first in range(0, size, _COMPARED))
            return all(ours.read(part) == theirs.read(part) for part in parts)


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor, such as the key projection in a fused qkv weight.

    Attributes:
        source: the tensor.
        place: the part's location in the tensor.
    """

    source: TensorSource
    place: Place

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the file."""
        return self.source.itemsize

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Rows [first, first + count) of the part."""
        return self.source.rows(first, count, rest, self.place)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder; a single file takes precedence over an index.

    Raises:
        UserError: the folder has none, a file named by the index is missing, or its name leads out of the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [_inside(folder, single.name)]
    if not index.exists():
        problem = f"{folder} has no model.safetensors and no {index.name}"
        if pickles := sorted(file.name for file in folder.glob("*.bin")):
            problem += f", only {pickles[0]}: pickled weights can run code and are not read; "
            problem += "convert them with transformers' save_pretrained"
        raise UserError(problem)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{index}: weight_map must be an object, tensor name to file name")
    return [_inside(folder, name) for name in sorted(set(weight_map.values()))]


def open_weights(folder: Path) -> dict[str, TensorSource]:
    """Return the tensors of a Hugging Face folder by their current names in transformers.

    Raises:
        UserError: for the reasons of `weight_files` and `open_sources`.
    """
    return {current_name(name): source for name, source in open_sources(weight_files(folder)).items()}


def current_name(name: str) -> str:
    """Return transformers' current name of a tensor that may have an older name in files."""
    return _with_prefix(name, _NOW)


def older_name(files: Iterable[str]) -> Callable[[str], str]:
    """Return a function from a tensor's current name to its name in a folder whose tensors are named in `files`."""
    found = {_prefix_of(name, _NOW) for name in files}
    renamed = [one for one in _OLDER if not found.isdisjoint(one)]
    # Reversed, so that of two older prefixes of the same one the first is taken, as when files are read.
    prefixes = {now: older for one in reversed(renamed) for older, now in one.items()}
    return functools.partial(_with_prefix, prefixes=prefixes)


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name with the first prefix that it has replaced by the other one."""
    prefix = _prefix_of(name, prefixes)
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


def _prefix_of(name: str, prefixes: Iterable[str]) -> str:
    return next((prefix for prefix in prefixes if name.startswith(prefix)), "")


def open_sources(files: Iterable[Path]) -> dict[str, TensorSource]:
    """Return the tensors of safetensors files by name; only the headers are read.

    Raises:
        UserError: a file is damaged or has an unknown dtype, or two files hold the same tensor.
    """
    sources: dict[str, TensorSource] = {}
    for file in files:
        with report_damage(file), file.open("rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(
                    f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in {file.parent}"
                )
        with report_damage(file):
            # safe_open checks the header, but cannot read F8_E4M3 into numpy: tensors are read by offset instead.
            safe_open(file, framework="numpy")
            header, start_of_data = _read_header(file)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if name in sources:
                    raise UserError(f"tensor {name} is in both {sources[name].file} and {file}")
                if entry["dtype"] not in ALL_DTYPES:
                    raise UserError(f"{file}: {name} is {entry['dtype']}, not one of {', '.join(ALL_DTYPES)}")
                begin = start_of_data + entry["data_offsets"][0]
                sources[name] = TensorSource(file, tuple(entry["shape"]), entry["dtype"], begin)
    return sources


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the tensor data in bytes."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        return json.loads(handle.read(length)), 8 + length


def check_content(sources: Iterable[TensorSource]) -> None:
    """Raise UserError if a file with any of the tensors does not agree with the checksum in its header.

    A file without a checksum passes. Each process of a run checks a share of the files, because it needs only a part of
    each file. A file is read once, however often this is called.
    """
    files = sorted({file for source in sources for file in source.files})
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # threads, as hashing releases the GIL
        # Processes check different files, and together they check all files.
        list(pool.map(_check_file, files[jax.process_index() :: jax.process_count()]))


def _check_file(file: Path) -> None:
    with report_damage(file):
        status = file.stat()
        if not _agrees(file, status.st_size, status.st_mtime_ns):
            raise UserError(f"{file} is damaged: its data does not agree with its checksum; copy or export it again")


@functools.cache
def _agrees(file: Path, size: int, changed: int) -> bool:
    """Whether a file agrees with its checksum, if it has one. Size and modification time are part of the cache key."""
    header, start_of_data = _read_header(file)
    checksum = (header.get("__metadata__") or {}).get(CHECKSUM)
    if checksum is None:
        return True
    with file.open("rb") as handle:
        handle.seek(start_of_data)
        return hashlib.file_digest(handle, xxhash.xxh3_64).hexdigest() == checksum


@contextmanager
def report_damage(file: Path) -> Iterator[None]:
    """Turn errors about a damaged or unreadable safetensors file into a UserError that names the file."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{file} is damaged or not a safetensors file: {error}") from error


def _inside(folder: Path, name: str) -> Path:
    """Return the file of this name in a folder. Raises UserError if the name or a link leads out of the folder."""
    # The index comes with the model, from anybody: its names must not lead to other files of this host.
    if name != Path(name).name or "\\" in name or not name.endswith(".safetensors") or not name.isprintable():
        raise UserError(f"{folder}: {name!r} is not a name for a weight file; it must be plain and end in .safetensors")
    file = folder / name
    if not file.is_file():
        raise UserError(f"{folder} has no {name}, which its index names")
    home = folder.resolve()
    if home.parent.name == "snapshots":  # the hub's cache: <model>/snapshots/<commit> links into <model>/blobs
        home = home.parent.parent
    if not file.resolve().is_relative_to(home):
        raise UserError(f"{file} is a link to {file.resolve()}, out of its folder; put the file itself there")
    return file
