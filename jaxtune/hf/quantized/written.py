"""Weights quantized while they are written, as bitsandbytes, transformers' FP8 and compressed-tensors read them.

The layouts are described in `hf.quantized.prequantized`, which reads them. Codes and scales are those of jaxtune.quant.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxtune.config.schemes import SCHEMES
from jaxtune.errors import UserError
from jaxtune.hf.quantized.prequantized import swapped, twos_complement
from jaxtune.hf.weights import Tensor
from jaxtune.quant import Format, QuantizedArray, format_of
from pallas_kernels.quant_matmul import ELEMENTS

# transformers 5 puts the experts of a layer into one tensor while it reads them, if files have them apart. It refuses
# those of bitsandbytes then, and forgets weight_global_scale of NVFP4.
OF_EXPERTS = ("fp8", "int4")
# Of what compressed-tensors has quantized, it refuses experts that are not.
WITH_EXPERTS = ("nvfp4", "int4")
# Layers that servers (vLLM, SGLang) multiply as one matrix: of NVFP4 they take the largest weight_global_scale of these
# for all of them, so that they must share one.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
_WEIGHTS = {  # as compressed-tensors describes them
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group"},
}
_COMPRESSED_TENSORS = {"nvfp4": "nvfp4-pack-quantized", "int4": "pack-quantized"}


def together(name: str) -> str:
    """What the weights of layers that are quantized together, or not at all, have in common; of others, their name.

    These are layers that servers multiply as one matrix, and the experts of a layer: "model.layers.3.mlp.experts".
    """
    before, found, _ = name.partition(".experts.")
    if found:
        return f"{before}.experts"
    module, _, last = name.removesuffix(".weight").rpartition(".")
    return next((f"{module}.{'+'.join(names)}" for names in _TOGETHER if last in names), name)


def quantize(tensors: Iterable[Tensor], kind: str, chosen: Collection[str]) -> Iterator[Tensor]:
    """The tensors, with codes and scales in place of weights.

    A weight is quantized when its scales are written, and again when its codes are, as these stand apart in a file: no
    more than one is in memory, or the few that share a scale.

    Args:
        tensors: of a model; those that are chosen are matrices (out, in) of finite numbers.
        kind: one of `SCHEMES`.
        chosen: names of the weights to quantize, "model.layers.3.mlp.down_proj.weight".
    """
    format, groups = format_of(SCHEMES[kind], ""), {}
    last: dict[str, QuantizedArray] = {}
    for tensor in tensors:
        shared = together(tensor.name) if kind == "nvfp4" and tensor.name in chosen else tensor.name
        groups.setdefault(shared, []).append(tensor)

    def value(group: Sequence[Tensor], name: str, ending: str) -> np.ndarray:
        if name not in last:
            last.clear()
            last.update(_quantized(group, format))
        return np.asarray(_arrays(kind, last[name])[ending])

    for group in groups.values():
        for tensor in group:
            if tensor.name not in chosen:
                yield tensor
                continue
            module = tensor.name.removesuffix(".weight")
            arrays = jax.eval_shape(lambda weight: _arrays(kind, format.quantize(weight)), _abstract(tensor))
            for ending, array in arrays.items():
                get = partial(value, group, tensor.name, ending)
                yield Tensor(f"{module}.{ending}", array.shape, array.dtype, get)
            for ending, constant in _constants(kind, tensor).items():
                yield Tensor(f"{module}.{ending}", constant.shape, constant.dtype, partial(np.asarray, constant))


def _abstract(tensor: Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)


def _quantized(group: Sequence[Tensor], format: Format) -> dict[str, QuantizedArray]:
    """The weights by name, with one scale of all of them where the format has a scale of a matrix; on the host."""
    weights = [tensor.get() for tensor in group]
    for tensor, weight in zip(group, weights):
        if not np.isfinite(weight.astype(np.float32)).all():
            raise UserError(f"{tensor.name} holds NaN or infinite values, so it cannot be quantized")
    whole = weights[0] if len(weights) == 1 else np.concatenate(weights)
    everywhere = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
    array = jax.tree.map(np.asarray, format.make(jax.device_put(whole, everywhere), (None, None)))
    if len(group) == 1:
        return {group[0].name: array}
    found, first = {}, 0
    for tensor, weight in zip(group, weights):  # whose blocks are of a row
        rows = slice(first, first := first + len(weight))
        found[tensor.name] = replace(array, codes=array.codes[rows], scales=array.scales[rows])
    return found


def _arrays(kind: str, array: QuantizedArray) -> dict[str, Any]:
    """The tensors of a quantized module that depend on its weight, by the endings of their names."""
    codes: Any = array.codes  # of numpy, or traced by jax
    scales = array.scales
    match kind:
        case "nf4":
            return {"weight": codes.reshape(-1, 1), "weight.absmax": scales.reshape(-1)}
        case "fp8":
            return {"weight": codes.view(jnp.float8_e4m3fn), "weight_scale_inv": scales}
        case "nvfp4":
            assert array.outer_scales is not None
            packed, of_blocks = swapped(codes), scales.view(jnp.float8_e4m3fn)
            return {
                "weight_packed": packed,
                "weight_scale": of_blocks,
                "weight_global_scale": 1 / array.outer_scales,  # a divisor there
            }
    return {"weight_packed": twos_complement(codes).view(jnp.int32), "weight_scale": scales}


def _constants(kind: str, tensor: Tensor) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The others, which depend on its shape alone."""
    shape = list(tensor.shape)
    if kind == "int4":
        return {"weight_shape": np.asarray(shape, np.int64)}
    if kind != "nf4":
        return {}
    state = {
        "quant_type": kind,
        "blocksize": SCHEMES[kind].block_size,
        "dtype": np.dtype(tensor.dtype).name,
        "shape": shape,
    }
    return {
        "weight.quant_map": np.asarray(ELEMENTS[kind].values, np.float32),
        f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def quantization_config(kind: str, dtype: str, others: Sequence[str]) -> Mapping[str, Any]:
    """What config.json says of a model whose linear layers are quantized but these `others`; `dtype`: of those.

    others: names of layers, or of what holds the experts of one.
    """
    block = SCHEMES[kind].block_size
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
    weights = {"symmetric": True, "dynamic": False, "group_size": block, **_WEIGHTS[kind]}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": _COMPRESSED_TENSORS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme | {"format": _COMPRESSED_TENSORS[kind]}},
        "ignore": [rf"re:{re.escape(name)}\..*" if name.endswith(".experts") else name for name in others],
    }
