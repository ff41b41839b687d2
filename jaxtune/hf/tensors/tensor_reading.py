"""Read safetensors folders directly into shards.

Whatever the dtype and sharding, reading needs no more host memory than the parameters and one chunk of a tensor.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxtune.errors import UserError
from jaxtune.hf.tensors.mxfp4_tensors import Codes, Exponents, Mxfp4Tensors, with_mxfp4
from jaxtune.hf.tensors.tensor_sources import (
    DTYPES,
    RowSource,
    TensorPart,
    TensorSource,
    check_content,
    open_weights,
)
from jaxtune.models.places import Place

_SMALLEST_CHUNK, _LARGEST_CHUNK = 2**20, 32 * 2**20
_LISTED = 10  # names of each kind that an error message lists


@dataclass(frozen=True)
class Conversion:
    """A conversion applied to each tensor of a target right after reading, so one unconverted tensor is in memory.

    Attributes:
        convert: (tensor in its shard, its Hugging Face name) -> pytree of arrays. If leading axes are sharded, the
            argument is a stack of one tensor from each shard.
        stacked: shape, dtype and sharding of each of those arrays, with the target's leading axes in front.
        to_mxfp4: whether the conversion is to MXFP4; a tensor that is MXFP4 in the file keeps its codes and scales.
    """

    convert: Callable[[jax.Array, str], Any]
    stacked: Any
    to_mxfp4: bool = False


@dataclass(frozen=True)
class Target:
    """A parameter to read.

    Attributes:
        shape: the parameter's shape, at least one dimension.
        dtype: the parameter's dtype; values are converted from the file's dtype.
        sharding: the parameter's sharding.
        places: the Hugging Face tensors, or parts of tensors, that make up the parameter.
        lead: number of leading axes (layers, or layers and experts). Each of their elements is one of the `places`, in
            row-major order; 0: a single place.
        rows: first dimension of the Hugging Face tensor if the parameter is padded with zeros beyond it (the
            vocabulary); None: not padded.
        conversion: applied to each tensor; None: tensors are stored as read.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.NamedSharding
    places: tuple[Place, ...]
    lead: int = 0
    rows: int | None = None
    conversion: Conversion | None = None

    def __post_init__(self):
        if len(self.places) != math.prod(self.shape[: self.lead]):
            raise ValueError(f"{len(self.places)} places for a target of shape {self.shape}, lead={self.lead}")

    @property
    def shard_lead(self) -> tuple[int, ...]:
        """Number of elements of each leading axis that a device holds."""
        return self.sharding.shard_shape(self.shape)[: self.lead]

    @property
    def lead_shards(self) -> tuple[int, ...]:
        """Number of shards of each leading axis."""
        return tuple(size // local for size, local in zip(self.shape, self.shard_lead))

    def place_number(self, shard: Sequence[int], index: Sequence[int]) -> int:
        """Return the number, in `places`, of the element at `index` within a shard of the leading axes."""
        position = [number * local + at for number, local, at in zip(shard, self.shard_lead, index)]
        return int(np.ravel_multi_index(position, self.shape[: self.lead])) if position else 0

    def source_shape(self, place: Place) -> tuple[int, ...]:
        """Return the shape of a Hugging Face tensor, before any padding."""
        rows, *rest = self.shape[self.lead :]
        return place.shape_in_file((self.rows or rows, *rest))


def read(folder: Path, targets: Mapping[str, Target], ignorable: Callable[[str], bool]) -> dict[str, Any]:
    """Read the weights of a Hugging Face folder into their shards, tensor by tensor.

    Every process calls this and reads the shards of its own devices. A padded parameter is zero beyond its tensor.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and the files it names.
        targets: parameters by name.
        ignorable: whether a Hugging Face tensor that no target names may be left unread.

    Raises:
        UserError: a file is damaged or missing, or does not agree with its checksum; or the tensors are not the ones
            that the targets need (the message lists the differences). All this is checked before any tensor is read.
    """
    return read_tensors(check_weights(folder, targets, ignorable), targets)


def read_tensors(sources: Mapping[str, TensorSource], targets: Mapping[str, Target]) -> dict[str, Any]:
    """Read targets from tensors by name, which must have passed `check_tensors`; checks the files' checksums first."""
    check_content(sources[place.name] for target in targets.values() for place in target.places)
    chunk_bytes = choose_chunk_bytes(targets.values())

    def read_one(target: Target) -> Any:
        parts = [TensorPart(sources[place.name], place) for place in target.places]
        if target.conversion is None:
            return fill(target, parts, chunk_bytes)
        stored = [(part.source, part.place) for part in parts if isinstance(part.source, Mxfp4Tensors)]
        # A stack has one format, so it keeps the codes of the files only if all of its tensors have them.
        if target.conversion.to_mxfp4 and len(stored) == len(parts):
            return _read_mxfp4(target, stored, chunk_bytes)
        return _read_converted(target, parts, chunk_bytes)

    return {name: read_one(target) for name, target in targets.items()}


def check_weights(
    folder: Path, targets: Mapping[str, Target], ignorable: Callable[[str], bool]
) -> Mapping[str, TensorSource]:
    """Return the tensors of a Hugging Face folder, checked. Reads only file headers; raises UserError like `read`."""
    sources = with_mxfp4(open_weights(folder))
    check_tensors(
        f"the tensors in {folder} are not those of the model in its config.json:", sources, targets, ignorable
    )
    return sources


def choose_chunk_bytes(targets: Iterable[Target]) -> int:
    """Return how many bytes to read at a time: a fraction of the largest tensor."""
    sizes = (math.prod(target.shape[target.lead :]) * np.dtype(target.dtype).itemsize for target in targets)
    return min(max(max(sizes, default=0) // 16, _SMALLEST_CHUNK), _LARGEST_CHUNK)


def check_tensors(
    complaint: str, sources: Mapping[str, TensorSource], targets: Mapping[str, Target], ignorable: Callable[[str], bool]
) -> None:
    """Raise UserError, beginning with `complaint`, unless the tensors are exactly the ones that the targets need."""
    wanted = {place.name: target.source_shape(place) for target in targets.values() for place in target.places}
    present = sorted(wanted.keys() & sources.keys())
    problems = {
        "missing": [name for name in wanted if name not in sources],
        "unexpected": [name for name in sources if name not in wanted and not ignorable(name)],
        "wrong shape": [
            f"{name} {sources[name].shape}, not {wanted[name]}"
            for name in present
            if sources[name].shape != wanted[name]
        ],
        # Without this check, codes of a scheme that config.json does not mention would be read as numbers.
        "wrong dtype": [
            f"{name} {sources[name].dtype}, not {' or '.join(DTYPES)}"
            for name in present
            if sources[name].dtype not in DTYPES
        ],
    }
    lines = [f"  {kind}: {_list(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UserError("\n".join([complaint, *lines]))


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def fill(target: Target, sources: Sequence[RowSource], chunk_bytes: int) -> jax.Array:
    """Read a parameter from one source per place, in chunks of a few rows of every shard."""
    lead = target.lead
    rows, *rest = target.sharding.shard_shape(target.shape)[lead:]
    itemsize = max(np.dtype(target.dtype).itemsize, *(source.itemsize for source in sources))
    # A chunk has rows for every device of this process, in the file's dtype until `_write_chunk` converts them.
    row_bytes = math.prod(rest) * itemsize * len(target.sharding.addressable_devices)
    if math.prod(target.shard_lead) * rows * row_bytes <= chunk_bytes:
        return _fill_at_once(target, sources)
    step = min(max(chunk_bytes // row_bytes, 1), rows)
    # A chunk is sharded like the parameter, so placing it moves nothing between devices: it is not `step` consecutive
    # rows, but `step` rows of every shard. With 8 rows on 2 devices and step 2, the chunks hold rows 0 1 | 4 5 and
    # 2 3 | 6 7 (left and right of the bar: first and second device). Sharded experts work the same way: a chunk has
    # rows of one expert from every shard.
    chunk_shape = (*target.lead_shards, target.shape[lead] // rows * step, *target.shape[lead + 1 :])

    def chunk(element: tuple[int, ...], row: int) -> jax.Array:
        """Rows [row, row + step) of an element of every shard."""

        def part(index: Any) -> np.ndarray:
            bounds = [slice(*bound.indices(size)) for bound, size in zip(index, chunk_shape)]
            source = sources[target.place_number([bound.start for bound in bounds[:lead]], element)]
            row_bounds, *columns = bounds[lead:]
            # row_bounds.start // step is the shard's number along the rows; times `rows` it is the shard's first row in
            # the parameter.
            values = source.rows(row_bounds.start // step * rows + row, step, tuple(columns))
            return values.reshape((1,) * lead + values.shape)

        return jax.make_array_from_callback(chunk_shape, target.sharding, part)

    array = _zeros(target.shape, target.dtype, target.sharding)
    for element in np.ndindex(target.shard_lead):
        for row in range(0, rows, step):
            row = min(row, rows - step)  # the last chunk overlaps the previous one, so that only one shape is compiled
            start = np.array([*element, row] + [0] * len(rest), np.int32)
            array = _write_chunk(array, chunk(element, row), start, target.sharding)
            array.block_until_ready()  # otherwise chunks would pile up in host memory
    return array


def _fill_at_once(target: Target, sources: Sequence[RowSource]) -> jax.Array:
    """Read a small parameter, such as the norms of all layers, without a program for each of its shapes."""
    lead = target.lead

    def shard(index: Any) -> np.ndarray:
        bounds = [slice(*bound.indices(size)) for bound, size in zip(index, target.shape)]
        rows, *columns = bounds[lead:]
        values = np.empty([bound.stop - bound.start for bound in bounds], target.dtype)
        for element in np.ndindex(values.shape[:lead]):
            position = [bound.start + at for bound, at in zip(bounds, element)]
            number = int(np.ravel_multi_index(position, target.shape[:lead])) if position else 0
            values[element] = sources[number].rows(rows.start, rows.stop - rows.start, tuple(columns))
        return values

    return jax.make_array_from_callback(target.shape, target.sharding, shard)


def _read_converted(target: Target, sources: Sequence[RowSource], chunk_bytes: int) -> Any:
    """Read a stack in steps of one tensor from every shard, converting each before the next is read."""
    assert target.conversion is not None
    stacked = jax.tree.map(lambda leaf: _zeros(leaf.shape, leaf.dtype, leaf.sharding), target.conversion.stacked)
    lead, spec = target.lead, target.sharding.spec
    if math.prod(target.lead_shards) == 1:  # no leading axes: XLA would compile a different program for a stack of one
        lead, spec = 0, spec[target.lead :]
    shape = (*target.lead_shards[:lead], *target.shape[target.lead :])
    sharding = jax.NamedSharding(target.sharding.mesh, jax.P(*spec))
    for element in np.ndindex(target.shard_lead):
        numbers = [target.place_number(shard, element) for shard in np.ndindex(target.lead_shards)]
        places, parts = zip(*((target.places[number], sources[number]) for number in numbers))
        one = Target(shape, target.dtype, sharding, places, lead)
        # The conversion sees these tensors as one stack, so any of the names may belong to its error.
        names = " or ".join(place.name for place in places)
        # The unconverted tensor is not bound to a variable, which would keep it alive while the next one is read.
        converted = target.conversion.convert(fill(one, parts, chunk_bytes), names)
        stacked = jax.tree.map(functools.partial(_write_element, element), stacked, converted)
        jax.block_until_ready(stacked)  # otherwise the next tensor would be read before this one is freed
    return stacked


def _read_mxfp4(target: Target, sources: Sequence[tuple[Mxfp4Tensors, Place]], chunk_bytes: int) -> Any:
    """Read a stack whose tensors are MXFP4 in the files, without dequantizing it."""
    assert target.conversion is not None
    array = target.conversion.stacked

    def read(leaf: jax.ShapeDtypeStruct, part: type[Codes | Exponents]) -> jax.Array:
        stored = dataclasses.replace(
            target, shape=leaf.shape, dtype=leaf.dtype, sharding=leaf.sharding, conversion=None
        )
        return fill(stored, [part(*source) for source in sources], chunk_bytes)

    return dataclasses.replace(array, codes=read(array.codes, Codes), scales=read(array.scales, Exponents))


def _write_element(
    index: tuple[int, ...], stack: Shaped[Array, "*stack"], element: Shaped[Array, "*one"]
) -> Shaped[Array, "*stack"]:
    """Write one element of every shard into the stack."""
    start = np.array([*index] + [0] * (stack.ndim - len(index)), np.int32)
    return _write_chunk(stack, element[(None,) * (stack.ndim - element.ndim)], start, stack.sharding)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding) -> Shaped[Array, "..."]:
    """Create zeros shard by shard; jnp.zeros(device=...) would make one shard and copy it to every device."""
    return _zeros_program(shape, jnp.dtype(dtype), sharding)()


@functools.lru_cache
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: jax.NamedSharding) -> Callable[[], Array]:
    """Cached, because a model has many parameters of the same shape."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


# Donated, so that the array is updated in place: otherwise each chunk would copy the whole parameter. `start` is an
# argument and not static, so that all chunks share one program.
@functools.partial(jax.jit, static_argnames="sharding", donate_argnames="array")
def _write_chunk(
    array: Shaped[Array, "..."], chunk: Shaped[Array, "..."], start: Int[Array, "dims"], sharding: jax.NamedSharding
) -> Shaped[Array, "..."]:
    """Write a chunk to the same position in every shard."""

    # As integers: for bfloat16, XLA on CPU would convert the whole array to float32 and back to update a part of it.
    bits = jnp.dtype(f"uint{8 * array.itemsize}")

    def place(shard, chunk, start):
        chunk = jax.lax.bitcast_convert_type(chunk.astype(shard.dtype), bits)
        placed = jax.lax.dynamic_update_slice(jax.lax.bitcast_convert_type(shard, bits), chunk, tuple(start))
        return jax.lax.bitcast_convert_type(placed, shard.dtype)

    specs = (sharding.spec, sharding.spec, jax.P())
    return jax.shard_map(place, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)(array, chunk, start)
