"""Checkpoints whose weights are quantized in the file: bitsandbytes 4-bit, FP8 blocks, compressed-tensors NVFP4, INT4.

Codes and scales are read as they are, a small part at a time, into QuantizedArrays: nothing is quantized again. The
layouts of the formats are described above `_FP8`, `_NVFP4`, `_INT4` and `_BITSANDBYTES`.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from jaxtune.errors import UserError
from jaxtune.hf.model_folder import read_config
from jaxtune.hf.tensors.tensor_reading import Target, choose_chunk_bytes, fill
from jaxtune.hf.tensors.tensor_sources import TensorSource, check_content, open_weights
from jaxtune.models.places import Place
from jaxtune.quant.array import SCALES_PER_OUTER, QuantizedArray
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP
from pallas_kernels.quant_matmul import ELEMENTS

log = logging.getLogger("jaxtune")

_SUPPORTED = (
    "bitsandbytes in 4 bits, fp8 in square blocks of 64, 128 or 256, compressed-tensors nvfp4-pack-quantized and "
    "pack-quantized (symmetric integers of 4 or 8 bits, in groups or channels), mxfp4-pack-quantized, mxfp4"
)
_WAY_OUT = "use the unquantized checkpoint instead, and quantize it on loading with quant.format"
# Fields of quantization_config that an error message quotes to identify the scheme.
_IDENTIFYING = (
    "load_in_8bit",
    "bits",
    "format",
    "transform_config",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "quant_algo",
)
_FP8_BLOCKS = (64, 128, 256)
_BITSANDBYTES_BLOCKS = (64, 128, 256, 512)
_STATE = "weight.quant_state.bitsandbytes__"  # followed by nf4 or fp4
_LARGEST_STATE = 2**16  # bytes; a real one has about 170
# Scales of activations. Activations are not quantized here; the names keep check_tensors from reporting the scales as
# unexpected tensors.
_ACTIVATIONS = ("input_global_scale", "input_scale", "activation_scale")

Decode = Callable[[Shaped[np.ndarray, "..."]], Shaped[np.ndarray, "..."]]


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are quantized.

    Attributes:
        options: the quant options that describe the format.
        modules: Hugging Face names ("model.layers.3.mlp.down_proj") of the modules that are quantized in the files.
    """

    options: QuantOptions
    modules: frozenset[str]

    def weight_of(self, name: str) -> str:
        """Return the name of the weight that a tensor in the files is a part of; for other tensors, their own name.

        "x.down_proj.weight.absmax" and "x.down_proj.weight_packed" are parts of "x.down_proj.weight".
        """
        for ending in (*_tensors(self.options), *_ACTIVATIONS):
            module = name.removesuffix(f".{ending}")
            if module != name and module in self.modules:
                return f"{module}.weight"
        return name


def read_scheme(folder: Path, model_config: Mapping[str, Any] | None = None) -> Scheme | None:
    """Determine how the weights of a Hugging Face folder are quantized, from its config.json and its files' headers.

    Args:
        folder: the Hugging Face folder.
        model_config: the config.json to use instead of the folder's; None: the folder's.

    Returns:
        None if config.json has no quantization_config, or names MXFP4, which quant.format='mxfp4' keeps unchanged.

    Raises:
        UserError: the scheme is not supported; a tensor that a quantized weight needs is missing or has the wrong
            dtype; the blocks do not divide a weight.
    """
    config = (read_config(folder) if model_config is None else model_config).get("quantization_config")
    if config is None:
        return None
    if isinstance(config, dict) and config.get("quant_method") == "mxfp4":
        log.info("weights that are MXFP4 in the files are kept by quant.format='mxfp4', and dequantized otherwise")
        return None
    _check_config(folder / "config.json", config)
    sources = open_weights(folder)
    match config["quant_method"]:
        case "bitsandbytes":  # read from the first weight; `_check_header` compares the others with it
            name = min((name for name in sources if f".{_STATE}" in name), default=None)
            if name is None:
                raise UserError(f"{folder}: config.json says bitsandbytes, but no tensor has {_STATE}; {_WAY_OUT}")
            options = _read_state(name, sources)[0]
        case "fp8":
            options = QuantOptions(format="fp8", block_size=int(config["weight_block_size"][0]))
        case _:
            options = _compressed_tensors(config)
            assert options is not None, "_check_config has passed"
    modules = {
        name.removesuffix(f".{ending}")
        for name, source in sources.items()
        for ending, tensor in _tensors(options).items()
        # Weights that are not quantized end in "weight" too; only the dtype tells them from codes.
        if name.endswith(f".{ending}") and (ending != "weight" or source.dtype in tensor.dtypes)
    }
    if not modules:
        raise UserError(f"{folder}: config.json says {config['quant_method']}, but no weight is quantized; {_WAY_OUT}")
    for module in sorted(modules):
        _check_header(folder, options, module, sources)
    return Scheme(options, frozenset(modules))


def read_quantized(
    folder: Path, scheme: Scheme, targets: Mapping[str, tuple[QuantizedArray, tuple[str, ...]]]
) -> dict[str, QuantizedArray]:
    """Read quantized weights into their shards without changing codes or scales.

    Every process calls this and reads the shards of its own devices.

    Args:
        folder: the Hugging Face folder that the scheme describes.
        scheme: from `read_scheme`.
        targets: for each parameter name, the shapes, dtypes and shardings of a stack of matrices (from
            `Format.abstract` with the scheme's options), and the Hugging Face names of the stack's weights
            ("model.layers.3.mlp.down_proj.weight"). Every weight must belong to a module of the scheme.

    Raises:
        UserError: a tensor's shape is not the one that config.json implies, or bitsandbytes' tables are not the known
            ones (both found before any weight is read); a weight or a scale is NaN or infinite, or a float32 scale of
            FP8 or NVFP4 is not positive. The message names the file and the tensor.
    """
    sources = open_weights(folder)
    leaves: dict[tuple[str, str], tuple[Target, list[_Part]]] = {}
    offsets: dict[str, list[float | None]] = {}
    for name, (array, weights) in targets.items():
        modules = [weight.removesuffix(".weight") for weight in weights]
        if not scheme.modules.issuperset(modules):
            raise ValueError(f"{sorted(set(modules) - scheme.modules)} are not quantized")
        if scheme.options.format in ("nf4", "fp4"):
            offsets[name] = [_read_offset(scheme.options, module, array, sources) for module in modules]
        for ending, tensor in _tensors(scheme.options).items():
            if tensor.field is not None:
                leaf = getattr(array, tensor.field)
                lead = array.codes.ndim - 2
                target = Target(leaf.shape, leaf.dtype, leaf.sharding, tuple(map(Place, weights)), lead)
                parts = [_open_part(f"{module}.{ending}", tensor, leaf.shape[lead:], sources) for module in modules]
                leaves[name, tensor.field] = target, parts
    log.info(
        "%d weights are %s in the checkpoint and keep that format; activations are not quantized, even if the "
        "checkpoint's config requests it",
        sum(len(weights) for _, weights in targets.values()),
        scheme.options.format,
    )
    # After the checks of the headers, because this reads the files from beginning to end.
    check_content(sources.values())
    chunk_bytes = choose_chunk_bytes(target for target, _ in leaves.values())
    fields = {name: {} for name in targets}
    for (name, field), (target, parts) in leaves.items():
        fields[name][field] = fill(target, parts, chunk_bytes)
    for name, (array, _) in targets.items():
        # An offset is a number in the JSON, not a tensor that `fill` could read.
        if array.offset is not None:
            values = np.asarray(offsets[name], np.float32).reshape(array.offset.shape)
            fields[name]["offset"] = jax.make_array_from_callback(
                values.shape, array.offset.sharding, values.__getitem__
            )
    return {name: replace(array, **fields[name]) for name, (array, _) in targets.items()}


def _check_config(file: Path, config: Any) -> None:
    """Raise UserError for a quantization_config whose scheme is not supported."""
    if not isinstance(config, dict):
        raise UserError(f"{file}: quantization_config must be an object, not {config!r}")
    supported = {
        "bitsandbytes": config.get("load_in_4bit") is True,
        "fp8": config.get("weight_block_size") in [[size, size] for size in _FP8_BLOCKS]
        and config.get("fmt", "e4m3") == "e4m3",
        # With a transform the activations must be rotated too, which is not supported.
        "compressed-tensors": _compressed_tensors(config) is not None and not config.get("transform_config"),
    }
    method = config.get("quant_method")
    if not (isinstance(method, str) and supported.get(method)):
        details = "".join(f", {key}={config[key]!r}" for key in _IDENTIFYING if config.get(key))
        raise UserError(
            f"{file}: weights quantized with quant_method={method!r}{details} are not supported; supported are "
            f"{_SUPPORTED}; or {_WAY_OUT}"
        )


def _compressed_tensors(config: Mapping[str, Any]) -> QuantOptions | None:
    """Return the options for a compressed-tensors format; None: the format is not supported."""
    if config.get("format") == "nvfp4-pack-quantized":
        return QuantOptions(format="nvfp4", block_size=16)
    if config.get("format") == "mxfp4-pack-quantized":
        return QuantOptions(format="mxfp4", block_size=32)
    # With several groups, layers differ in format, and a Scheme has one.
    groups = config.get("config_groups")
    if config.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
        return None
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        return None
    formats: dict[Any, Any] = {4: "int4", 8: "int8"}
    format = formats.get(weights.get("num_bits"))
    # Other values of actorder permute the columns: the file would pass the checks, but be read wrongly.
    if (
        format is None
        or weights.get("symmetric", True) is not True
        or weights.get("actorder") not in (None, "weight", "static")
    ):
        return None
    size = weights.get("group_size")
    match weights.get("strategy"):
        case "channel":
            return QuantOptions(format=format, block_size="channel")
        case "group" if isinstance(size, int) and size > 1:
            return QuantOptions(format=format, block_size=size)
    return None


# Decoders from the file's values to a QuantizedArray's. They raise ValueError with a description of a bad value.


def swap_codes(codes: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Swap the two 4-bit codes in each byte.

    compressed-tensors packs the first code into the low bits, QuantizedArray into the high bits.
    """
    return (codes << 4) | (codes >> 4)


def convert_int4_codes(codes: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Convert between compressed-tensors' and QuantizedArray's packing of two signed 4-bit integers in a byte.

    compressed-tensors stores value + 8, the first in the low bits; QuantizedArray two's complement, the first in the
    high bits. The function is its own inverse.
    """
    # Flipping the highest of four bits adds 8 modulo 16.
    return swap_codes(codes) ^ 0x88


def convert_int8_codes(codes: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Convert between compressed-tensors' value + 128 and QuantizedArray's two's complement; its own inverse."""
    return codes ^ 0x80


def _e4m3(bits: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    if ((bits & 0x7F) == 0x7F).any():  # e4m3 has no infinity, and one NaN of each sign
        raise ValueError("NaN")
    return bits


def _e8m0(exponents: UInt8[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    if (exponents == 255).any():
        raise ValueError("NaN")
    return exponents


def _finite(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinity")
    return values


def _positive(scales: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    scales = scales.astype(np.float32)
    if not ((scales >= np.finfo(np.float32).tiny) & (scales < np.inf)).all():  # XLA may flush subnormals to 0
        raise ValueError("a scale that is zero, negative, NaN or infinite")
    return scales


def _reciprocal(divisor: Float[np.ndarray, " 1"]) -> Float[np.ndarray, " 1"]:
    """The scale of a whole matrix: compressed-tensors stores a divisor, QuantizedArray a factor."""
    return _positive(1 / _positive(divisor))


@dataclass(frozen=True)
class _Tensor:
    """How a tensor of a quantized module is stored in the files.

    Attributes:
        dtypes: dtypes allowed in the file.
        field: the field of QuantizedArray that it becomes; None: it is only checked.
        decode: maps the file's values to the field's.
        flat: whether the file stores it as a list or a column; the field has the shape of the weight or of its blocks.
        words: whether its elements are 32-bit words, read as four bytes each.
    """

    dtypes: tuple[str, ...]
    field: str | None = None
    decode: Decode = lambda values: values
    flat: bool = False
    words: bool = False


# FP8 in square blocks, as DeepSeek-V3 and Qwen3-FP8 store it. W = weight * weight_scale_inv of its block: despite its
# name, the scale is a factor, not a divisor. weight is (out, in), weight_scale_inv (out / block, in / block).
_FP8 = {
    "weight": _Tensor(("F8_E4M3",), "codes", _e4m3),
    "weight_scale_inv": _Tensor(("F32", "BF16"), "scales", _positive),
}
# compressed-tensors' nvfp4-pack-quantized. W = e2m1(code) * weight_scale / weight_global_scale. weight_packed is
# (out, in / 2), two codes a byte, the first in the low bits; weight_scale (out, in / 16); weight_global_scale (1,).
_NVFP4 = {
    "weight_packed": _Tensor(("U8",), "codes", swap_codes),
    "weight_scale": _Tensor(("F8_E4M3",), "scales", _e4m3),
    "weight_global_scale": _Tensor(("F32",), "outer_scales", _reciprocal),
}
# compressed-tensors' pack-quantized of symmetric 4-bit integers. W = (code - 8) * weight_scale. weight_packed is
# (out, in / 8), eight codes an int32, the first in the lowest bits; weight_scale (out, in / group), or (out, 1).
_INT4 = {
    "weight_packed": _Tensor(("I32",), "codes", convert_int4_codes, words=True),
    "weight_scale": _Tensor(("F32", "BF16", "F16"), "scales", _positive),
    "weight_shape": _Tensor(("I64", "I32")),
}
# The same of 8-bit integers. W = (code - 128) * weight_scale; four codes an int32.
_INT8 = _INT4 | {"weight_packed": _Tensor(("I32",), "codes", convert_int8_codes, words=True)}
# compressed-tensors' mxfp4-pack-quantized. W = e2m1(code) * 2^(weight_scale - 127). weight_packed is (out, in / 2), two
# codes a byte, the first in the low bits; weight_scale (out, in / 32).
_MXFP4 = {
    "weight_packed": _Tensor(("U8",), "codes", swap_codes),
    "weight_scale": _Tensor(("U8",), "scales", _e8m0),
}
# bitsandbytes in 4 bits. The matrix is one long list, row after row: weight is (out * in / 2, 1), two codes a byte, the
# first in the high bits; absmax has one float32 scale for each block of the list; W = quant_map[code] * absmax. The
# matrix's shape and the block size are in JSON, stored as a tensor whose name begins with _STATE.
_BITSANDBYTES = {
    "weight": _Tensor(("U8",), "codes", flat=True),
    "weight.absmax": _Tensor(("F32",), "scales", _finite, flat=True),
    "weight.quant_map": _Tensor(("F32",)),
}
# With double quantization absmax is uint8 codes, in groups of 256 (SCALES_PER_OUTER) that share a nested_absmax:
# scale = nested_quant_map[absmax] * nested_absmax + nested_offset, where nested_offset is a number in the JSON.
_DOUBLE_QUANT = {
    "weight.absmax": _Tensor(("U8",), "scales", flat=True),
    "weight.nested_absmax": _Tensor(("F32",), "outer_scales", _finite, flat=True),
    "weight.nested_quant_map": _Tensor(("F32",)),
}


def _tensors(options: QuantOptions) -> dict[str, _Tensor]:
    """The tensors of a quantized module in the files, by the endings of their names; the codes come first."""
    if options.format in ("nf4", "fp4"):
        nested = _DOUBLE_QUANT if options.double_quant else {}
        return _BITSANDBYTES | nested | {f"{_STATE}{options.format}": _Tensor(("U8",))}
    return {"fp8": _FP8, "nvfp4": _NVFP4, "mxfp4": _MXFP4, "int4": _INT4, "int8": _INT8}[str(options.format)]


def _check_header(folder: Path, options: QuantOptions, module: str, sources: Mapping[str, TensorSource]) -> None:
    """Raise UserError unless a module has every tensor that it needs, and its blocks divide its shape."""
    for ending, tensor in _tensors(options).items():
        name = f"{module}.{ending}"
        if name not in sources:
            raise UserError(f"{folder}: {name} is missing, so {module} cannot be read; {_WAY_OUT}")
        if sources[name].dtype not in tensor.dtypes:
            dtype, must = sources[name].dtype, " or ".join(tensor.dtypes)
            raise UserError(f"{sources[name].file}: {name} is {dtype}; it must be {must}; {_WAY_OUT}")
    codes = f"{module}.{next(iter(_tensors(options)))}"
    if options.format in ("nf4", "fp4"):
        stated, shape, _ = _read_state(f"{module}.{_STATE}{options.format}", sources)
        if stated != options:
            raise UserError(
                f"{sources[codes].file}: {module}.weight is in blocks of {stated.block_size}, double_quant="
                f"{stated.double_quant}, others in {options.block_size}, {options.double_quant}; {_WAY_OUT}"
            )
    else:
        shape = sources[codes].shape
        if len(shape) != 2:
            raise UserError(f"{sources[codes].file}: {codes} has shape {shape}; only matrices are quantized")
        # Codes in an element of the file: two of 4 bits in a byte; eight, or four of 8 bits, in a 32-bit word.
        packed = {"nvfp4": 2, "mxfp4": 2, "int4": 8, "int8": 4}
        shape = (shape[0], shape[1] * packed.get(str(options.format), 1))
    misfit = format_of(options, "weight").misfit(shape)
    if misfit is not None:
        raise UserError(f"{sources[codes].file}: {module}.weight: {misfit}; {_WAY_OUT}")


@dataclass(frozen=True)
class _Part:
    """A tensor in a file, reshaped on reading to its shape in a QuantizedArray."""

    name: str
    source: TensorSource
    shape: tuple[int, ...]
    decode: Decode

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the file."""
        return self.source.itemsize

    def rows(self, first: int, count: int, rest: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        """Rows [first, first + count) and a part of the other dimensions. Raises UserError for an impossible value."""
        width = self.source.shape[0] // self.shape[0]  # file rows per row: 1, or a row's length if the file has a list
        # Whole rows are read and columns cut after the reshape: in a list, columns of several rows are not one range.
        whole = tuple(slice(0, size) for size in self.source.shape[1:])
        stored = self.source.rows(first * width, count * width, whole).reshape(count, *self.shape[1:])
        try:
            return self.decode(stored[(slice(None), *rest)])
        except ValueError as error:
            raise UserError(f"{self.source.file}: {self.name} holds {error}; {_WAY_OUT}") from error


def _open_part(name: str, tensor: _Tensor, shape: tuple[int, ...], sources: Mapping[str, TensorSource]) -> _Part:
    source, size = sources[name], math.prod(shape)
    if tensor.words:
        # Words are little-endian and the first code is in the lowest bits, so the bytes hold the codes in order, two
        # each.
        source = replace(source, shape=(*source.shape[:-1], 4 * source.shape[-1]), dtype="U8")
    if source.shape not in (((size,), (size, 1)) if tensor.flat else (shape,)):
        must = f"{size} elements" if tensor.flat else shape
        raise UserError(f"{source.file}: {name} has shape {source.shape}; the model of config.json needs {must}")
    return _Part(name, source, shape, tensor.decode)


def _read_state(name: str, sources: Mapping[str, TensorSource]) -> tuple[QuantOptions, tuple[int, int], float | None]:
    """Read bitsandbytes' JSON about a weight, stored as a tensor: (options, shape of the weight, offset of scales)."""
    source = sources[name]
    if source.dtype != "U8" or len(source.shape) != 1 or source.shape[0] > _LARGEST_STATE:
        raise UserError(f"{source.file}: {name} is {source.dtype} {source.shape}; it must be a few bytes of JSON")
    try:
        # The file may come from anybody, so each field may be missing or of another type.
        state = json.loads(source.rows(0, source.shape[0], ()).tobytes())
        kind, block_size, (rows, columns) = state["quant_type"], state["blocksize"], state["shape"]
        offset = float(state["nested_offset"]) if "nested_offset" in state else None
        shape = (int(rows), int(columns))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise UserError(f"{source.file}: {name} cannot be read: {error!r}") from error
    if (
        kind not in ("nf4", "fp4")
        or block_size not in _BITSANDBYTES_BLOCKS
        or (offset is not None and not (math.isfinite(offset) and state.get("nested_blocksize") == SCALES_PER_OUTER))
    ):
        raise UserError(
            f"{source.file}: {name}: quant_type={kind!r}, blocksize={block_size!r}, nested_offset={offset}, "
            f"nested_blocksize={state.get('nested_blocksize')!r}; supported are nf4 and fp4 in blocks of "
            f"{_BITSANDBYTES_BLOCKS}, and scales quantized by {SCALES_PER_OUTER} with a finite offset; {_WAY_OUT}"
        )
    return QuantOptions(format=kind, block_size=int(block_size), double_quant=offset is not None), shape, offset


def _read_offset(
    options: QuantOptions, module: str, array: QuantizedArray, sources: Mapping[str, TensorSource]
) -> float | None:
    """Return the offset of a weight's scales. Raises UserError if its shape is wrong or one of its tables unknown."""
    name = f"{module}.{_STATE}{options.format}"
    _, shape, offset = _read_state(name, sources)
    if shape != array.shape[-2:]:
        raise UserError(
            f"{sources[name].file}: {name} has shape {shape}; the model of config.json needs {array.shape[-2:]}"
        )
    tables = {"quant_map": np.asarray(ELEMENTS[array.elements].values, np.float32)}
    if options.double_quant:
        # Kernels have these tables built in, so codes of another table would decode to wrong values.
        tables["nested_quant_map"] = DYNAMIC_MAP
    for ending, table in tables.items():
        name = f"{module}.weight.{ending}"
        source = sources[name]
        # Approximately, because torch.linspace, which makes the map, may round differently on another device.
        if source.shape != table.shape or not np.allclose(source.rows(0, len(table), ()), table, rtol=1e-6, atol=0):
            raise UserError(f"{source.file}: {name} is not the table of {options.format}; {_WAY_OUT}")
    return offset
