"""Quantize weights on export, in the file layouts of bitsandbytes, transformers' FP8 and compressed-tensors.

`hf.quantized.prequantized` reads and describes the layouts. jaxtune.quant computes the codes and scales.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxtune.errors import UserError
from jaxtune.hf.quantized.prequantized import convert_int4_codes, convert_int8_codes, swap_codes
from jaxtune.hf.tensors.tensor_writing import OutputTensor
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from pallas_kernels.quant_matmul import ELEMENTS

# Formats in which experts can be quantized. transformers 5 fuses separate experts into one tensor when it reads them;
# it then refuses experts in bitsandbytes' format, and drops the weight_global_scale of NVFP4.
EXPERT_FORMATS = ("fp8", "int4", "int8")
# Formats of compressed-tensors. In such a file transformers refuses experts that are not quantized.
ALL_EXPERTS_FORMATS = ("nvfp4", "mxfp4", "int4", "int8")
# Layers that servers (vLLM, SGLang) fuse into one matrix. For NVFP4 they use the largest weight_global_scale of the
# group for all its layers, so the layers must share one scale.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_WEIGHTS = {  # in the notation of compressed-tensors' config
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "scale_dtype": "torch.uint8"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
}
_COMPRESSED_TENSORS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "int4": "pack-quantized",
    "int8": "pack-quantized",
}


def fusion_group(name: str) -> str:
    """Return a key shared by the weights that must be quantized together or not at all; for others, the name itself.

    These are the layers that servers fuse into one matrix, and the experts of a layer ("model.layers.3.mlp.experts").
    """
    before, separator, _ = name.partition(".experts.")
    if separator:
        return f"{before}.experts"
    module, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{module}.{'+'.join(names)}" for names in _TOGETHER if last in names), name)


def quantize(tensors: Iterable[OutputTensor], options: QuantOptions, chosen: Collection[str]) -> Iterator[OutputTensor]:
    """Replace the chosen weights by tensors of codes and scales.

    A weight is quantized twice, once when its scales are written and once when its codes are, because these are not
    adjacent in the file. So at most one weight is in memory, or the few that share a scale.

    Args:
        tensors: tensors of a model; the chosen ones must be matrices (out, in) of finite numbers.
        options: one of `SCHEMES`, perhaps with another block size.
        chosen: names of the weights to quantize, "model.layers.3.mlp.down_proj.weight".
    """
    kind, format, groups = str(options.format), format_of(options, ""), {}
    last: dict[str, QuantizedArray] = {}
    for tensor in tensors:
        shared = fusion_group(tensor.name) if kind == "nvfp4" and tensor.name in chosen else tensor.name
        groups.setdefault(shared, []).append(tensor)

    def value(group: Sequence[OutputTensor], name: str, ending: str) -> np.ndarray:
        # The writer asks in the order of the file. Neighbours from one group need only one quantization.
        if name not in last:
            last.clear()
            last.update(_quantize_group(group, format))
        return np.asarray(_arrays(kind, last[name])[ending])

    for group in groups.values():
        for tensor in group:
            if tensor.name not in chosen:
                yield tensor
                continue
            module = tensor.name.removesuffix(".weight")
            # Only shapes and dtypes, for the header; the weight itself is read when its tensors are written.
            arrays = jax.eval_shape(lambda weight: _arrays(kind, format.quantize(weight)), _abstract(tensor))
            for ending, array in arrays.items():
                get = partial(value, group, tensor.name, ending)
                yield OutputTensor(f"{module}.{ending}", array.shape, array.dtype, get)
            for ending, constant in _constants(options, tensor).items():
                yield OutputTensor(f"{module}.{ending}", constant.shape, constant.dtype, partial(np.asarray, constant))


def _abstract(tensor: OutputTensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)


def _quantize_group(group: Sequence[OutputTensor], format: Format) -> dict[str, QuantizedArray]:
    """Quantize weights, and return them by name, on the host. They share the scale of the whole matrix, if any."""
    weights = [tensor.get() for tensor in group]
    for tensor, weight in zip(group, weights):
        if not np.isfinite(weight.astype(np.float32)).all():
            raise UserError(f"{tensor.name} holds NaN or infinite values, so it cannot be quantized")
    # Replicated, so that the result can be copied to this host whole.
    everywhere = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    placed = [jax.device_put(weight, everywhere) for weight in weights]
    arrays = format.make_together(placed, [(None, None)] * len(placed))
    return {tensor.name: jax.tree.map(np.asarray, array) for tensor, array in zip(group, arrays)}


def _arrays(kind: str, array: QuantizedArray) -> dict[str, Any]:
    """The tensors of a quantized module that depend on its weight, by the endings of their names."""
    codes: Any = array.codes  # a numpy array, or traced by jax
    scales = array.scales
    match kind:
        case "nf4":
            return {"weight": codes.reshape(-1, 1), "weight.absmax": scales.reshape(-1)}
        case "fp8":
            return {"weight": codes.view(jnp.float8_e4m3fn), "weight_scale_inv": scales}
        case "nvfp4":
            assert array.outer_scales is not None
            packed, block_scales = swap_codes(codes), scales.view(jnp.float8_e4m3fn)
            return {
                "weight_packed": packed,
                "weight_scale": block_scales,
                "weight_global_scale": 1 / array.outer_scales,  # compressed-tensors stores a divisor
            }
        case "mxfp4":
            return {"weight_packed": swap_codes(codes), "weight_scale": scales}
        case "int8":
            return {"weight_packed": convert_int8_codes(codes).view(jnp.int32), "weight_scale": scales}
    # Four bytes with eight codes are one little-endian word.
    return {"weight_packed": convert_int4_codes(codes).view(jnp.int32), "weight_scale": scales}


def _constants(options: QuantOptions, tensor: OutputTensor) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of a quantized module that depend only on its weight's shape and dtype."""
    kind, shape = str(options.format), list(tensor.shape)
    if kind in ("int4", "int8"):
        return {"weight_shape": np.asarray(shape, np.int64)}
    if kind != "nf4":
        return {}
    # The fields that bitsandbytes' QuantState.from_dict reads, except for nested scales.
    state = {
        "quant_type": kind,
        "blocksize": options.block_size,
        "dtype": np.dtype(tensor.dtype).name,
        "shape": shape,
    }
    return {
        "weight.quant_map": np.asarray(ELEMENTS[kind].values, np.float32),
        f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def quantization_config(options: QuantOptions, dtype: str, others: Sequence[str]) -> Mapping[str, Any]:
    """Return the quantization_config of config.json for a model whose linear layers are quantized.

    Args:
        options: as in `quantize`.
        dtype: dtype of computation, and of the layers that are not quantized.
        others: names of the layers that are not quantized, or of the modules that hold a layer's experts.
    """
    kind, block = str(options.format), options.block_size
    if kind == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(others),
        }
    if kind == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
            "modules_to_not_convert": list(others),
        }
    group = block if isinstance(block, int) else None
    weights = {"symmetric": True, "dynamic": False, "group_size": group, **_WEIGHTS[kind]}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": _COMPRESSED_TENSORS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"format": _COMPRESSED_TENSORS[kind]}},
        # A name that ends in .experts is a module of many layers, so a regular expression matches them.
        "ignore": [rf"re:{re.escape(name)}\..*" if name.endswith(".experts") else name for name in others],
    }
