"""Options of Surogate that are translated together (see `conversions`)."""

import json
import os
from collections.abc import Mapping

from jaxtune.config.foreign.conversions import (
    Options,
    Settings,
    Unsupported,
    conversions_of,
    message_key_mappings,
    names_of,
)


def surogate_remat(o: Options) -> Settings:
    """The rematerialisation policy: block includes everything, attention includes its projections."""
    if o["offload_residual"]:
        return {"memory.remat": "offload"}
    attention, feed_forward = o["recompute_att"], o["recompute_ffn"]
    if o["recompute_block"] or (feed_forward and (attention or o["recompute_qkv"])):
        return {"memory.remat": "block"}
    chosen = {"attention+qkv": attention, "ffn": feed_forward, "qkv": o["recompute_qkv"]}
    return {"memory.remat": next((policy for policy, wanted in chosen.items() if wanted), "none")}


def surogate_rope(o: Options) -> Settings:
    """RoPE scaling: a name with max_model_len, or JSON with a factor; otherwise config.json decides."""
    scaling, positions = o["rope_scaling"], o.get("max_model_len")
    if scaling is None:
        return {}
    if isinstance(scaling, Mapping):
        scaling = json.dumps(dict(scaling), default=str)
    if not isinstance(scaling, str) or not isinstance(positions, int | None):
        raise Unsupported("rope_scaling must be linear, dynamic, yarn or JSON, and max_model_len a number")
    return {"model.rope_scaling": scaling} | ({"model.max_positions": positions} if positions else {})


def surogate_zero(o: Options) -> Settings:
    """The highest ZeRO level that any of three options requests."""
    return {"parallel.zero": max(o["zero_level"], 3 if o["shard_weights"] else 1, 2 if o["shard_gradients"] else 1)}


def surogate_gpus(o: Options) -> Settings:
    """The number of GPUs, 0 for all; gpus_per_node overrides gpus."""
    return {"device.gpus": o["distributed.gpus_per_node"] or o["gpus"] or None}


def surogate_qlora(o: Options) -> Settings:
    """The quantization format, from three switches with separate block sizes."""
    # In the order of precedence if several switches are true.
    if o["qlora_fp4"]:
        return {"quant.format": "nvfp4"}
    if o["qlora_fp8"]:
        return {"quant.format": "fp8", "quant.block_size": o["qlora_block_size"]}
    if o["qlora_bnb"]:
        return {"quant.format": "nf4", "quant.block_size": o["qlora_bnb_block_size"]}
    return {}


def surogate_skip(o: Options) -> Settings:
    """Layers that are neither quantized nor computed in low precision."""
    skipped = {"skip_first_layers": o["skip_quant_first_layers"], "skip_last_layers": o["skip_quant_last_layers"]}
    sections = ["quant"] if surogate_qlora(o) else []
    sections += ["precision"] if o["recipe"] != "bf16" else []
    return {f"{section}.{name}": count for section in sections for name, count in skipped.items()}


def surogate_master(o: Options) -> Settings:
    """The dtype of master weights; if unset, the model's dtype, which is bfloat16 for most checkpoints."""
    dtype = o["master_dtype"] or o.get("torch_dtype") or "bfloat16"
    named = {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype)
    if named not in ("float32", "bfloat16"):
        raise Unsupported("master weights are float32 or bfloat16")
    return {"precision.master_dtype": named}


def surogate_backward(o: Options) -> Settings:
    """The dtype of backward products, which is fixed by the recipe."""
    known = {"bf16": ("bf16", "bfloat16"), "fp8_hybrid": ("e5m2", "fp8_e5m2"), "nvfp4": ("fp4", "fp4_e2m1", "nvfp4")}
    dtype, names = o["gradient_dtype"], known.get(o["recipe"])
    if dtype is not None and names and dtype not in names:
        raise Unsupported(f"backward products in a dtype other than the recipe's, which is {names[0]}")
    return {}


def surogate_targets(o: Options) -> Settings:
    """A list of module names, or all-linear."""
    names = names_of(o["lora_target_modules"])
    return {"lora.target_modules": "all-linear" if names == ["all-linear"] else names}


def surogate_input(o: Options) -> Settings:
    """The input column; without it, instructions have no input."""
    return {"input_field": o["input_field"]} if o.get("type") == "instruction" else {}


def surogate_mappings(o: Options) -> Settings:
    """Message keys that have other names in the data."""
    return message_key_mappings(o["message_property_mappings"] or {})


def surogate_checkpoints(o: Options) -> Settings:
    """The checkpoint folder, if it differs from output_dir."""
    elsewhere = o["checkpoint_dir"]
    return {} if os.path.abspath(str(elsewhere)) == os.path.abspath(o["output_dir"]) else {"ckpt.dir": elsewhere}


CONVERSIONS = conversions_of(vars(), "surogate")
