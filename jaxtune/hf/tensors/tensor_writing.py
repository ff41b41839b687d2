"""Write tensors to safetensors files as a stream; several processes write different files.

Tensors are gathered from the devices one at a time, so a model need not fit into the host's memory.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash

from jaxtune.hf.model_folder import STAGE, staging_folder
from jaxtune.hf.tensors.tensor_sources import ALL_DTYPES, CHECKSUM
from jaxtune.parallel import multihost

MAX_SHARD_BYTES = 5 * 10**9


class OutputTensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: name in the file.
        shape, dtype: of the value.
        get: returns the value; called once, right before the data is written.
        take_part: what processes that do not write the tensor call meanwhile, for the collectives of `get`; the tensor
            may then be gathered in any order. None: they call `get`, and all tensors are gathered file by file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    get: Callable[[], np.ndarray]
    take_part: Callable[[], object] | None = None


def write(
    folder: Path, tensors: Iterable[OutputTensor], max_shard_bytes: int | None = MAX_SHARD_BYTES, stem: str = "model"
) -> None:
    """Write <stem>.safetensors, or numbered files and their index if one file would exceed max_shard_bytes.

    Holds two tensors at a time: one is written while the next one is gathered. The files appear when all are complete,
    and replace files of the same stem. Every process of a run calls this, on one shared folder, and writes a
    share of the files.

    Args:
        folder: created if it does not exist.
        tensors: the tensors to write; in the files they are in order of decreasing item size, then in the order given.
        max_shard_bytes: size limit of a file, without its header; a larger tensor gets its own file. None: one file.
        stem: beginning of the file names.

    Raises:
        UserError: a process cannot write to the folder; all processes raise it.
    """
    # Larger items first: readers map the file into memory and need every tensor aligned to its item size.
    tensors = sorted((OutputTensor(*tensor) for tensor in tensors), key=lambda tensor: -np.dtype(tensor.dtype).itemsize)
    shards: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        size += _size(tensor)
        if max_shard_bytes is not None and shards[-1] and size > max_shard_bytes:
            shards.append([])
            size = _size(tensor)
        shards[-1].append(tensor)
    single = f"{stem}.safetensors"
    names = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = dict(zip(names if len(shards) > 1 else [single], shards))
    with ExitStack() as at_end:
        stage = folder / STAGE
        with multihost.write_together(folder):
            if multihost.is_main():
                replaces = re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
                at_end.enter_context(staging_folder(folder, replaces))
        _write_files(stage, files)
        with multihost.write_together(folder):
            if multihost.is_main():
                if len(files) > 1:
                    weight_map = {tensor.name: file for file, shard in files.items() for tensor in shard}
                    index = {"metadata": {"total_size": sum(map(_size, tensors))}, "weight_map": weight_map}
                    (stage / f"{single}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
                for file in files:
                    (stage / file).stat()  # NFS may list files of other hosts late, but finds them by name
                at_end.close()  # gives the files their names


def _size(tensor: OutputTensor) -> int:
    return math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize


def _write_files(stage: Path, files: Mapping[str, Sequence[OutputTensor]]) -> None:
    """Write the files. Processes take turns: in each, a process writes one file in the background.

    `get` may be a collective: a process that skipped one, or took another order, would leave the others waiting. So
    all gather in the same order, also after a failure, until they stop together at the end of the turn.
    """
    this, count = jax.process_index(), jax.process_count()
    headers = {name: _header(tensors) for name, tensors in files.items()}
    alternate = all(tensor.take_part is not None for tensors in files.values() for tensor in tensors)
    with ThreadPoolExecutor(1, thread_name_prefix="export") as background:
        for first in range(0, len(files), count):
            turn = list(files)[first : first + count]
            name = turn[this] if this < len(turn) else None
            with multihost.write_together(stage.parent), ExitStack() as opened:
                file = _File(stage / name, headers[name], opened) if name else None
                written = background.submit(file.begin) if file else None
                for owner, tensor in _in_order([files[name] for name in turn], alternate):
                    if owner != this or file is None or written is None:
                        (tensor.take_part or tensor.get)()
                        continue
                    value = tensor.get()
                    if written.exception() is None:  # waits for the tensor before, so that two are held and not more
                        written = background.submit(file.append, tensor, value)
                if file and written:
                    written.result()
                    file.finish()


def _in_order(shards: Sequence[Sequence[OutputTensor]], alternate: bool) -> Iterator[tuple[int, OutputTensor]]:
    """Yield the tensors, each with the number of its shard: one after another, or a tensor of each shard in turn."""
    if not alternate:
        yield from ((number, tensor) for number, shard in enumerate(shards) for tensor in shard)
        return
    for tensors in itertools.zip_longest(*shards):
        yield from ((number, tensor) for number, tensor in enumerate(tensors) if tensor is not None)


def _header(tensors: Sequence[OutputTensor]) -> dict[str, Any]:
    """Return a file's header. Raises ValueError if a tensor is given twice."""
    names = {dtype: name for name, dtype in ALL_DTYPES.items()}
    # The digest of nothing holds the place: all digests have 16 digits, so the final header has the same length.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUM: xxhash.xxh3_64().hexdigest()}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _size(tensor)
        entry = {"dtype": names[np.dtype(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
        if header.setdefault(tensor.name, entry) is not entry:
            raise ValueError(f"tensor {tensor.name} is given twice")
    return header


class _File:
    """A file that is written tensor by tensor, which the safetensors library cannot do: it takes all tensors at once.

    The format: length of the header (8 bytes), the header (JSON, padded with spaces), the data. The checksum of the
    data is in the header, so the header is written again at the end, when the checksum is known.
    """

    def __init__(self, path: Path, header: dict[str, Any], opened: ExitStack):
        self._path, self._header, self._opened, self._checksum = path, header, opened, xxhash.xxh3_64()

    def begin(self) -> None:
        self._file = self._opened.enter_context(self._path.open("wb"))
        self._file.write(_encode(self._header))

    def append(self, tensor: OutputTensor, value: np.ndarray) -> None:
        value = np.asarray(value)
        if value.shape != tuple(tensor.shape) or value.dtype != np.dtype(tensor.dtype):
            raise ValueError(f"{tensor.name} is {value.dtype}{value.shape}, not {tensor.dtype}{tensor.shape}")
        # As bytes, because arrays of bfloat16 and FP8 export no buffer.
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        self._checksum.update(content)
        self._file.write(content)

    def finish(self) -> None:
        self._header["__metadata__"][CHECKSUM] = self._checksum.hexdigest()
        self._file.seek(0)
        self._file.write(_encode(self._header))
        # On disk before the staging folder's files get their names: after a crash a file is whole or absent.
        self._file.flush()
        os.fsync(self._file.fileno())


def _encode(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data begin at a multiple of 8 bytes, because readers map them as arrays.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
