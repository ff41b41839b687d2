"""Options of Surogate that are translated together (see `conversions`). Files named below are in its repository."""

import json
import os
from collections.abc import Mapping

from jaxtune.config.foreign.conversions import (
    NOTE,
    Options,
    Settings,
    Unsupported,
    images_of,
    message_key_mappings,
    names_of,
)

TEMPLATES = {
    "chatml": "chatml",
    "qwen": "chatml",
    "qwen2_5": "chatml",
    **{name: name for name in ("qwen3", "qwen3_nothinking", "llama3", "gemma3", "phi4", "gpt_oss", "glm4", "ernie")},
}
"""Our chat templates by Surogate's names."""
OF_MODELS = ("auto", "qwen3_thinking", "llama", "llama3_2", "seed_oss", "minimax_m2", "nemotron_nano")
OF_MODELS += ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Surogate's other names (core/config/enums.py): templates of models, whose tokenizers have them."""

DEFAULT_LENGTH = 2048
"""Our data.seq_len, which an unset sequence_len becomes."""


def surogate_remat(o: Options) -> Settings:
    """The rematerialisation policy: block includes everything, attention includes its projections.

    `recompute` of newer versions takes the place of the others. recompute_lora, if stated, sets recompute_block
    (core/config/sft_config.py).
    """
    if o["offload_residual"]:
        return {"memory.remat": "offload"}
    if o.get("recompute") is not None:
        return {"memory.remat": "block" if o["recompute"] else "none"}
    attention, feed_forward = o["recompute_att"], o["recompute_ffn"]
    block = o["recompute_block"] or (o["lora"] and o.get("recompute_lora"))
    if block or (feed_forward and (attention or o["recompute_qkv"])):
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
    """The highest ZeRO level that any option requests.

    cpu_training and dispatch_pp keep no whole model on a GPU, and neither do experts on several GPUs where our axis of
    experts is not available; here these shard all weights, with the same batch.
    """
    if o["parallelism"] not in (None, "ddp", "dispatch_pp"):
        raise Unsupported("parallelism is ddp or dispatch_pp")
    spread = o["cpu_training"] or o["parallelism"] == "dispatch_pp" or (o["ep_size"] > 1 and not _experts_apart(o))
    # ZeRO 1 shards the optimizer's state, 2 gradients too, 3 weights too.
    level = max(o["zero_level"], 3 if o["shard_weights"] or spread else 1, 2 if o["shard_gradients"] else 1)
    told = {NOTE: "layers are sharded instead of being stages: the same batch"} if o["parallelism"] else {}
    return {"parallel.zero": level} | (told if o["parallelism"] == "dispatch_pp" else {})


def surogate_experts(o: Options) -> Settings:
    """The GPUs among which experts are divided, which are some of those that divide the batch (docs/guides/moe.md)."""
    if o["ep_size"] <= 1:
        return {}
    if _experts_apart(o):
        return {"mesh.expert": o["ep_size"]}
    return surogate_zero(o) | {NOTE: "experts are sharded like other weights: the same losses"}


def surogate_offload(o: Options) -> Settings:
    """Weights, gradients and states that are kept in the host's memory.

    cpu_training streams all weights. In full training its gradients and optimizer state are there too, in float32
    (docs/reference/config.md). qlora_offload_experts offloads quantized experts, here all quantized weights.
    """
    full = o["cpu_training"] and not o["lora"]
    settings = {
        "memory.offload_master": full or o["offload_master"],
        "memory.offload_quants": o["offload_quants"] or bool(o["qlora_offload_experts"] and surogate_qlora(o)),
        "memory.offload_optimizer": full or o["offload_optimizer"],
        "memory.offload_gradients": full or o["offload_grads"],
    }
    told = {NOTE: "a base without quantization stays on the GPUs, sharded"} if o["cpu_training"] and o["lora"] else {}
    return {key: True for key, wanted in settings.items() if wanted} | told


def surogate_optimizer(o: Options) -> Settings:
    """The optimizer; cpu_training's is AdamW in float32 (docs/reference/config.md)."""
    on_host = o["cpu_training"] and not o["lora"] and o["optimizer"] == "adamw_8bit"
    return {"optim.name": "adamw" if on_host else o["optimizer"]}


def surogate_warmup(o: Options) -> Settings:
    """The fraction of warm-up, which a number of steps overrides."""
    overridden = {NOTE: "warmup_steps overrides it"} if o["warmup_ratio"] else {}
    return overridden if o["warmup_steps"] else {"optim.warmup_ratio": o["warmup_ratio"]}


def surogate_decay(o: Options) -> Settings:
    """The weight decay of all parameters but norms and biases; with adapters, neither is trained."""
    return {"optim.weight_decay": o["weight_decay"]} | (
        {} if o["lora"] or not o["weight_decay"] else {"optim.no_decay": "norm|bias"}
    )


def surogate_gpus(o: Options) -> Settings:
    """The number of GPUs, 0 for all; gpus_per_node overrides gpus."""
    return {"device.gpus": o["distributed.gpus_per_node"] or o["gpus"] or None}


def surogate_nodes(o: Options) -> Settings:
    """The devices of all nodes, so that a run on fewer is refused."""
    nodes, gpus = o["distributed.num_nodes"], surogate_gpus(o)["device.gpus"]
    if nodes <= 1:
        return {}
    if gpus is None:
        raise Unsupported("several nodes without gpus_per_node; leave num_nodes out, and launch/ starts the processes")
    apart = surogate_experts(o).get("mesh.expert", 1) * o["sequence_parallel_size"]
    if nodes * gpus % apart:
        raise Unsupported(f"{nodes * gpus} GPUs that ep_size and sequence_parallel_size, {apart}, do not divide")
    told = f"launch/ starts a process on each node: launch/ray_train.py --workers={nodes} --gpus_per_worker={gpus}"
    return {"mesh.fsdp": nodes * gpus // apart, NOTE: told}


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
    """The dtype of gradients of activations, bfloat16, or of backward products, which is fixed by the recipe."""
    known = {"fp8_hybrid": ("e5m2", "fp8_e5m2"), "nvfp4": ("fp4", "fp4_e2m1", "nvfp4")}
    of_recipe = known.get(str(o["recipe"]).replace("-", "_"), ())
    if _dpo(o) and o["gradient_dtype"] in ("fp32", "float32"):
        # DPO's default, for the gradients of its adapters (dpo/config.py), which are float32 here too.
        return {NOTE: "of the adapters' gradients"}
    if o["gradient_dtype"] not in (None, "bf16", "bfloat16", *of_recipe):
        names = ", ".join(("bf16", *of_recipe[:1]))
        raise Unsupported(f"gradients of activations in another dtype; with this recipe they are {names}")
    return {}


def surogate_targets(o: Options) -> Settings:
    """A list of module names, or all-linear."""
    names = names_of(o["lora_target_modules"])
    return {"lora.target_modules": "all-linear" if names in (["all-linear"], ["all"]) else names}


def surogate_input(o: Options) -> Settings:
    """The input column; without it, instructions have no input."""
    return {"input_field": o["input_field"]} if o.get("type") == "instruction" else {}


def surogate_mappings(o: Options) -> Settings:
    """Message keys that have other names in the data."""
    return message_key_mappings(o["message_property_mappings"] or {})


def surogate_system(o: Options) -> Settings:
    """The system prompt of instructions: a column, a text for all samples, or none (core/config/dataset_config.py)."""
    kind, column, text = o["system_prompt_type"], o["system_prompt_field"], o["system_prompt"]
    if kind not in (None, "field", "fixed"):
        raise Unsupported("system_prompt_type is field or fixed")
    if kind is not None and not (column if kind == "field" else text):
        missing = "system_prompt_field" if kind == "field" else "system_prompt"
        raise Unsupported(f"system_prompt_type {kind} without {missing}")
    if kind is None:
        return {NOTE: "not used without system_prompt_type"} if column or text else {}
    return {"system_field": column} if kind == "field" else {"system_prompt": _with_lines(text)}


def surogate_default_system(o: Options) -> Settings:
    """The system prompt of samples without one."""
    return {} if o["system"] is None else {"data.datasets[i].system_prompt": _with_lines(o["system"])}


def surogate_prefix(o: Options) -> Settings:
    """The beginning of each answer."""
    return {} if o["response_prefix"] is None else {"chat.response_prefix": _with_lines(o["response_prefix"])}


def surogate_template(o: Options) -> Settings:
    """The chat template: a name of ours, a file, or the tokenizer's own, which models have under Surogate's names."""
    name = str(o["template"])
    if name in TEMPLATES:
        return {"chat.template": TEMPLATES[name], NOTE: "no system prompt is added to the data"}
    if name in OF_MODELS:
        return {NOTE: "the tokenizer's own"} if name != "auto" else {}
    if "{%" in name or "{{" in name:
        raise Unsupported("a template as text; write it into a file, and name the file")
    if "/" in name or name.endswith((".jinja", ".j2")):
        return {"chat.template": name}
    names = ", ".join((*TEMPLATES, *OF_MODELS))
    raise Unsupported(f"template is one of {names}, or a Jinja file; auto is the tokenizer's own")


def surogate_length(o: Options) -> Settings:
    """Documents that are too long: more than max_length, or than a row."""
    ways = ("delete", "left", "right", "split")
    way, most = o["truncation_strategy"], o["max_length"]
    if way not in ways:
        raise Unsupported(f"truncation_strategy is one of {', '.join(ways)}")
    settings: Settings = {"data.truncation": way}
    if most is None or most >= o.get("sequence_len", DEFAULT_LENGTH):
        return settings
    settings["data.datasets[i].max_tokens"] = most
    return settings if way == "delete" else settings | {"data.datasets[i].longer": way}


def surogate_dpo(o: Options) -> Settings:
    """The loss of pairs (docs/reference/config.md); without a reference and by length it is SimPO's."""
    if not _dpo(o):
        return {}
    if o["loss.type"] not in (None, "dpo"):
        raise Unsupported("loss.type is dpo")
    free, by_length, margin = o["loss.reference_free"], o["loss.length_norm"], o["loss.target_margin"]
    if margin and not (free and by_length):
        raise Unsupported("target_margin without reference_free and length_norm, which are SimPO")
    settings = {"preference.beta": o["loss.dpo_beta"]}
    if free and by_length:
        return settings | {"preference.loss": "simpo", "preference.simpo_gamma": margin}
    settings |= {"preference.loss": "sigmoid_norm" if by_length else "sigmoid"}
    return settings | ({"preference.reference": None} if free else {})


def surogate_rows(o: Options) -> Settings:
    """The length of a row, which holds both answers of a pair."""
    return {"data.seq_len": o["sequence_len"] * (2 if _dpo(o) else 1)}


def surogate_images(o: Options) -> Settings:
    """Images, which Surogate trains on if the model sees them; here an option about them turns them on."""
    if o["max_pixels"] is None and o["norm_bbox"] is None:
        return {}
    if o["norm_bbox"] not in (None, "norm1000", "none"):
        raise Unsupported("norm_bbox is norm1000 or none")
    if "sequence_len" not in o:
        raise Unsupported("without sequence_len")
    settings = images_of(surogate_rows(o)["data.seq_len"])
    return settings | {"vision.max_pixels": o["max_pixels"], "vision.norm_bbox": o["norm_bbox"]}


def surogate_batch(o: Options) -> Settings:
    """The rows of a micro-batch; Surogate counts the two answers of a pair (docs/getting-started/quickstart-dpo.md)."""
    rows = o["per_device_train_batch_size"]
    if _dpo(o) and rows % 2:
        raise Unsupported("an odd number: DPO counts two rows a pair")
    return {"train.micro_batch_size": rows // 2 if _dpo(o) else rows}


def surogate_packing(o: Options) -> Settings:
    """Whether rows are packed, which they are by default; pairs are not."""
    if o["sample_packing"] not in (None, True, False, "bin"):
        raise Unsupported("sample_packing is true, false or bin")
    return {"data.packing": o["sample_packing"] is not False and not _dpo(o)}


def surogate_distillation(o: Options) -> Settings:
    """The teacher, and its share in the loss.

    Surogate's loss is kd_weight * temperature^2 * KL + ce_weight * CE (docs/guides/distillation.md); ours has weights
    that add up to 1.
    """
    teacher, of_teacher = o.get("distillation.teacher_model"), o["distillation.kd_weight"]
    if teacher is None:
        return {}
    of_targets = o["distillation.ce_weight"] if o.get("distillation.ce_weight") is not None else 1 - of_teacher
    if of_teacher <= 0 or of_targets < 0:
        raise Unsupported("kd_weight of 0, or a negative ce_weight")
    temperature = o["distillation.temperature"]
    share = of_teacher * temperature**2  # T^2 undoes the 1 / T^2 of the gradient of softened logits
    scale = share + of_targets
    settings: Settings = {"distill.teacher": teacher, "distill.weight": share / scale}
    settings |= {"distill.top_k": o["distillation.top_k"], "distill.temperature": temperature}
    return settings if scale == 1 else settings | {NOTE: f"the loss is divided by {scale:g}, the sum of its weights"}


def surogate_checkpoints(o: Options) -> Settings:
    """The checkpoint folder, if it differs from output_dir."""
    elsewhere = o["checkpoint_dir"]
    return {} if os.path.abspath(str(elsewhere)) == os.path.abspath(o["output_dir"]) else {"ckpt.dir": elsewhere}


def _dpo(o: Options) -> bool:
    """Whether the file is for `surogate dpo`: it names that loss, or has pairs of answers."""
    entries = o.get("datasets")
    named = entries if isinstance(entries, list) else []
    pairs = any(isinstance(entry, Mapping) and entry.get("type") == "preference" for entry in named)
    return o["loss.type"] is not None or pairs


def _experts_apart(o: Options) -> bool:
    """Whether our axis of experts is available: not with offloaded weights."""
    offloads = any(o[f"offload_{part}"] for part in ("master", "quants", "optimizer", "grads")) or o["cpu_training"]
    return not (offloads or (o["qlora_offload_experts"] and surogate_qlora(o)))


def _with_lines(text: object) -> str:
    r"""Return a text with line breaks for each \n (core/config/ct_config.py)."""
    return str(text).replace("\\n", "\n")
