"""Safetensors folders, read straight into shards and written as a stream.

Only a chunk of a tensor is ever in host memory beside the parameters themselves, whatever their dtype and sharding.
Safetensors only: a pickle can run code, so .bin weights are refused.
"""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Int, Shaped
from safetensors import SafetensorError, safe_open

from jaxtune.errors import UserError
from jaxtune.hf.folder import read_json, staged

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_READ_AS = DTYPES | dict.fromkeys(("U8", "F8_E4M3"), np.dtype(np.uint8))  # bytes, of quantized weights alone
MAX_SHARD_BYTES = 5 * 10**9
_LARGEST_CHUNK = 32 * 2**20
_LFS_POINTER = b"version https://git-lfs"
_LISTED = 10  # names of each kind in an error


@dataclass(frozen=True)
class Conversion:
    """What each tensor of a stacked target becomes as soon as it is read, so that no two are in memory as they were.

    Attributes:
        convert: (tensor in its shard, its Hugging Face name) -> pytree of arrays.
        stacked: shape, dtype and sharding of each of those arrays, with the stack's axis in front.
    """

    convert: Callable[[jax.Array, str], Any]
    stacked: Any


@dataclass(frozen=True)
class Target:
    """A parameter to be read.

    Attributes:
        shape: of the parameter, one dimension at least.
        dtype: of the parameter; the file's dtype is converted.
        sharding: where it goes; a stack axis is unsharded.
        names: Hugging Face tensors it is made of.
        stacked: the first axis has one slice for each of `names`; otherwise there is one name.
        rows: first dimension of the Hugging Face tensors where the parameter is padded with zeros beyond it (the
            vocabulary); None: not padded.
        conversion: what the tensors of a stack become; None: they stay.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.NamedSharding
    names: tuple[str, ...]
    stacked: bool
    rows: int | None = None
    conversion: Conversion | None = None

    def __post_init__(self):
        if len(self.names) != (self.shape[0] if self.stacked else 1):
            raise ValueError(f"{len(self.names)} names for a target of shape {self.shape}, stacked={self.stacked}")
        if self.stacked and self.sharding.shard_shape(self.shape)[0] != self.shape[0]:
            raise ValueError(f"the stack axis of {self.names[0]} ... must be unsharded, not {self.sharding.spec}")

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of each Hugging Face tensor, before any padding."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape if self.rows is None else (self.rows, *shape[1:])


class Tensor(NamedTuple):
    """A tensor to be written; `get` is called once, when its turn has come."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    get: Callable[[], np.ndarray]


class Rows(Protocol):
    """What a parameter, or a slice of its stack, is read from."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the file."""
        ...

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Rows [first, first + count) and a part of the other dimensions."""
        ...


@dataclass(frozen=True)
class Source:
    """A tensor in a file, of which any part can be read; of F8_E4M3 the bits, as uint8."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it
    begin: int  # of its bytes in the file

    @property
    def itemsize(self) -> int:
        """Bytes of an element; of a dtype that can be read."""
        return _READ_AS[self.dtype].itemsize

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Read rows [first, first + count) and a part of the other dimensions; zeros beyond the last row."""
        held = min(max(self.shape[0] - first, 0), count)
        with damage(self.file):
            tensor = np.memmap(self.file, _READ_AS[self.dtype], "r", self.begin, self.shape)
            found = np.array(tensor[(slice(first, first + held), *rest)])
        return np.pad(found, [(0, count - held)] + [(0, 0)] * len(rest)) if held < count else found


def read(folder: Path, targets: Mapping[str, Target], ignorable: Callable[[str], bool]) -> dict[str, Any]:
    """Read the weights of a Hugging Face folder into their shards, tensor by tensor.

    Every process calls it and reads what its devices hold. Zeros fill what a padded parameter has beyond its tensor.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and the files it names.
        targets: parameters by name.
        ignorable: whether a Hugging Face tensor that no target names may be left unread.

    Raises:
        UserError: a file is damaged or missing; or the tensors are not those that the targets need, in which case it
            lists the difference, before anything is read.
    """
    sources = check_weights(folder, targets, ignorable)
    chunk_bytes = bytes_of_chunks(targets.values())
    return {
        name: (fill if target.conversion is None else _converted)(
            target, [sources[source] for source in target.names], chunk_bytes
        )
        for name, target in targets.items()
    }


def check_weights(
    folder: Path, targets: Mapping[str, Target], ignorable: Callable[[str], bool]
) -> Mapping[str, Source]:
    """The tensors of a Hugging Face folder. Raises UserError as `read` does; nothing but the headers is read."""
    sources = open_sources(weight_files(folder))
    _check(folder, sources, targets, ignorable)
    return sources


def bytes_of_chunks(targets: Iterable[Target]) -> int:
    """How much is read at a time: a part of the largest tensor, in bytes."""
    sizes = (math.prod(target.source_shape) * np.dtype(target.dtype).itemsize for target in targets)
    return min(max(sizes, default=0) // 16, _LARGEST_CHUNK)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder; where both are there, a single file goes before an index.

    Raises:
        UserError: there are none, a file that the index names is missing, or its name leads out of the folder.
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


def open_sources(files: Iterable[Path]) -> dict[str, Source]:
    """The tensors of safetensors files by name; nothing but the headers is read.

    Raises:
        UserError: a file is damaged, or two files hold the same tensor.
    """
    sources: dict[str, Source] = {}
    for file in files:
        with damage(file), file.open("rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(
                    f"{file} is a pointer of git-lfs, not the file itself; run `git lfs pull` in {file.parent}"
                )
        with damage(file):
            safe_open(file, framework="numpy")  # checks the header; it does not read F8_E4M3 into numpy
            with file.open("rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if name in sources:
                    raise UserError(f"tensor {name} is in both {sources[name].file} and {file}")
                begin = 8 + length + entry["data_offsets"][0]
                sources[name] = Source(file, tuple(entry["shape"]), entry["dtype"], begin)
    return sources


@contextmanager
def damage(file: Path) -> Iterator[None]:
    """Turn what safetensors says about a damaged or unreadable file into a UserError that names it."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{file} is damaged or no safetensors file: {error}") from error


def _inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder, refused where it would be anywhere else."""
    if name != Path(name).name or "\\" in name or not name.endswith(".safetensors") or not name.isprintable():
        raise UserError(f"{folder}: {name!r} is no name for a weight file; it must be plain and end in .safetensors")
    file = folder / name
    if not file.is_file():
        raise UserError(f"{folder} has no {name}, which its index names")
    home = folder.resolve()
    if home.parent.name == "snapshots":  # in the hub's cache files are links into the model's blobs
        home = home.parent.parent
    if not file.resolve().is_relative_to(home):
        raise UserError(f"{file} is a link to {file.resolve()}, out of its folder; put the file itself there")
    return file


def _check(
    folder: Path, sources: Mapping[str, Source], targets: Mapping[str, Target], ignorable: Callable[[str], bool]
) -> None:
    wanted = {source: target for target in targets.values() for source in target.names}
    both = sorted(wanted.keys() & sources.keys())
    problems = {
        "missing": [name for name in wanted if name not in sources],
        "unexpected": [name for name in sources if name not in wanted and not ignorable(name)],
        "wrong shape": [
            f"{name} {sources[name].shape}, not {wanted[name].source_shape}"
            for name in both
            if sources[name].shape != wanted[name].source_shape
        ],
        "wrong dtype": [
            f"{name} {sources[name].dtype}, not {' or '.join(DTYPES)}"
            for name in both
            if sources[name].dtype not in DTYPES
        ],
    }
    lines = [f"  {kind}: {_list(found)}" for kind, found in problems.items() if found]
    if lines:
        raise UserError("\n".join([f"the tensors in {folder} are not those of the model in its config.json:", *lines]))


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def fill(target: Target, sources: Sequence[Rows], chunk_bytes: int) -> jax.Array:
    """Read a parameter from a source for each of its names, the same few rows of every shard at a time."""
    lead = int(target.stacked)
    rows, *rest = target.sharding.shard_shape(target.shape)[lead:]
    itemsize = max(np.dtype(target.dtype).itemsize, *(source.itemsize for source in sources))
    row_bytes = math.prod(rest) * itemsize * len(target.sharding.addressable_devices)
    step = min(max(chunk_bytes // row_bytes, 1), rows)
    chunk_shape = (1,) * lead + (target.shape[lead] // rows * step, *target.shape[lead + 1 :])

    def chunk(source: Rows, row: int) -> jax.Array:
        """Rows [row, row + step) of every shard."""

        def part(index: Any) -> np.ndarray:
            at, *others = [slice(*bound.indices(size)) for bound, size in zip(index, chunk_shape)][lead:]
            found = source.rows(at.start // step * rows + row, step, tuple(others))
            return found.reshape((1,) * lead + found.shape)

        return jax.make_array_from_callback(chunk_shape, target.sharding, part)

    array = _zeros(target.shape, target.dtype, target.sharding)
    for i, source in enumerate(sources):
        for row in range(0, rows, step):
            row = min(row, rows - step)  # the last chunk overlaps the one before: one shape to compile
            start = np.array([i] * lead + [row] + [0] * len(rest), np.int32)
            array = _place(array, chunk(source, row), start, target.sharding)
            array.block_until_ready()  # or chunks would pile up in host memory
    return array


def _converted(target: Target, sources: list[Source], chunk_bytes: int) -> Any:
    """Read a stack, one tensor after the other, each converted before the next is read."""
    assert target.conversion is not None
    place = jax.NamedSharding(target.sharding.mesh, jax.P(*target.sharding.spec[1:]))
    stacked = jax.tree.map(lambda leaf: _zeros(leaf.shape, leaf.dtype, leaf.sharding), target.conversion.stacked)
    for i, (name, source) in enumerate(zip(target.names, sources)):
        one = Target(target.shape[1:], target.dtype, place, (name,), stacked=False)
        converted = target.conversion.convert(fill(one, [source], chunk_bytes), name)
        stacked = jax.tree.map(functools.partial(_place_slice, i), stacked, converted)
        jax.block_until_ready(stacked)  # or the next tensor would be read before this one is gone
    return stacked


def _place_slice(i: int, stack: Shaped[Array, "n ..."], slice_: Shaped[Array, "..."]) -> Shaped[Array, "n ..."]:
    """Put an array into a stack of them."""
    start = np.array([i] + [0] * slice_.ndim, np.int32)
    return _place(stack, slice_[None], start, stack.sharding)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding) -> Shaped[Array, "..."]:
    """Zeros made in their shards; jnp.zeros(device=...) would make a shard and copy it."""
    return _zeros_program(shape, jnp.dtype(dtype), sharding)()


@functools.lru_cache
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding) -> Callable[[], Array]:
    """Compiled once: a model has many parameters of a shape."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.partial(jax.jit, static_argnames="sharding", donate_argnames="array")
def _place(
    array: Shaped[Array, "..."], chunk: Shaped[Array, "..."], start: Int[Array, "dims"], sharding: jax.NamedSharding
) -> Shaped[Array, "..."]:
    """Put a chunk at the same place of every shard."""

    bits = jnp.dtype(f"uint{8 * array.itemsize}")  # XLA on CPU would convert a whole bfloat16 array to place a part

    def place(shard, chunk, start):
        chunk = jax.lax.bitcast_convert_type(chunk.astype(shard.dtype), bits)
        placed = jax.lax.dynamic_update_slice(jax.lax.bitcast_convert_type(shard, bits), chunk, tuple(start))
        return jax.lax.bitcast_convert_type(placed, shard.dtype)

    specs = (sharding.spec, sharding.spec, jax.P())
    return jax.shard_map(place, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)(array, chunk, start)


def write(
    folder: Path, tensors: Iterable[Tensor], max_shard_bytes: int | None = MAX_SHARD_BYTES, stem: str = "model"
) -> None:
    """Write <stem>.safetensors, or numbered files and their index where that would exceed max_shard_bytes.

    Holds one tensor at a time. The files appear once all of them are complete, in place of those of the same stem.
    Every process of a run calls it, so that `get` may gather over processes; process 0 writes.

    Args:
        folder: made where it is not there.
        tensors: what to write; `get` is called in order of falling item size, otherwise in the order given.
        max_shard_bytes: largest file, without its header; a larger tensor has a file of its own. None: one file.
        stem: beginning of the file names.

    Raises:
        UserError: the folder cannot be written to.
    """
    # Larger items first: readers map the file and need every tensor aligned to its item size.
    tensors = sorted((Tensor(*tensor) for tensor in tensors), key=lambda tensor: -np.dtype(tensor.dtype).itemsize)
    if jax.process_index() != 0:
        for tensor in tensors:
            tensor.get()
        return
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += _size(tensor)
        if max_shard_bytes is not None and shards[-1] and size > max_shard_bytes:
            shards.append([])
            size = _size(tensor)
        shards[-1].append(tensor)
    single = f"{stem}.safetensors"
    with staged(folder, replaces=re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")) as stage:
        weight_map = {}
        for i, shard in enumerate(shards, start=1):
            file = single if len(shards) == 1 else f"{stem}-{i:05}-of-{len(shards):05}.safetensors"
            _write_file(stage / file, shard)
            weight_map |= {tensor.name: file for tensor in shard}
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(map(_size, tensors))}, "weight_map": weight_map}
            (stage / f"{single}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _size(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    """The safetensors format: length of the header, header, data. The library itself wants all tensors at once."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _size(tensor)
        entry = {"dtype": names[np.dtype(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
        if header.setdefault(tensor.name, entry) is not entry:
            raise ValueError(f"tensor {tensor.name} is given twice")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = np.asarray(tensor.get())
            if value.shape != tuple(tensor.shape) or value.dtype != np.dtype(tensor.dtype):
                raise ValueError(f"{tensor.name} is {value.dtype}{value.shape}, not {tensor.dtype}{tensor.shape}")
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        os.fsync(file.fileno())
