"""Options of XORL that are translated together (see `conversions`). Files named below are in its src/xorl."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxtune.config.foreign.conversions import (
    FILE,
    NOTE,
    Options,
    Settings,
    Unsupported,
    images_of,
    model_overrides,
    names_of,
)

DUMMY = "dummy"
DUMMY_SAMPLES = 4096
"""The number of made-up samples (data/prepare/prepare_datasets.py)."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that XORL fuses, by their parts in Hugging Face's files, whose names adapters have here."""


def xorl_model(o: Options) -> Settings:
    """The weights, or random weights in the shape of config_path if model_path is unset."""
    model, config = o.get("model.model_path"), o.get("model.config_path")
    tokenizer = o.get("model.tokenizer_path")
    if model is None:
        if config is None:
            return {}
        other_tokenizer = {"model.tokenizer": tokenizer} if tokenizer not in (None, config) else {}
        return {"model.path": config, "model.from_scratch": True} | other_tokenizer
    settings = {"model.path": model}
    if config not in (None, model):
        settings |= {"model.config": config}  # the architecture, without weights
    if tokenizer not in (None, config or model):
        settings |= {"model.tokenizer": tokenizer}
    return settings


def xorl_foundation(o: Options) -> Settings:
    """Overridden entries of config.json."""
    entries = o["model.foundation"]
    if not isinstance(entries, Mapping):
        raise Unsupported("a value other than a mapping of config.json entries")
    return model_overrides(entries)


def xorl_encoders(o: Options) -> Settings:
    """The vision tower; the model's own files have its weights."""
    encoders = o["model.encoders"]
    if not isinstance(encoders, Mapping) or encoders.keys() - {"image"}:
        raise Unsupported("encoders other than image")
    return images_of(o["data.sample_packing_sequence_len"]) if encoders else {}


def xorl_path(o: Options) -> Settings:
    """The path; made-up samples have a number and a length in XORL (data/prepare/prepare_datasets.py)."""
    if o["path"] != DUMMY:
        return {"path": o["path"]}
    longest = o["max_seq_len"] if o.get("max_seq_len") is not None else o[FILE]["data.sample_packing_sequence_len"]
    settings = {"path": DUMMY, "dummy_length": longest, NOTE: "of random tokens; XORL's are up to as long"}
    return settings if o.get("num_samples") is not None else settings | {"samples": DUMMY_SAMPLES}


def xorl_shards(o: Options) -> Settings:
    """The part of a dataset, which is the first one if no index is given (data/prepare/prepare_datasets.py)."""
    return {} if o.get("shards") is None else {"shards": o["shards"], "shard_idx": o.get("shards_idx") or 0}


def xorl_columns(o: Options) -> Settings:
    """The columns of each dataset that is read from somewhere; made-up samples have tokens only."""
    columns = o["data.select_columns"]
    if columns is None:
        return {}
    settings: Settings = {}
    for theirs, ours in (("data.datasets", "data.datasets"), ("data.test_datasets", "data.eval_datasets")):
        entries = _entries(o, theirs)
        real = [i for i, entry in enumerate(entries) if entry.get("path") != DUMMY]
        settings |= {f"{ours}[{i}].select_columns": columns for i in real}
    return settings


def xorl_shuffle(o: Options) -> Settings:
    """The order: without shuffling after the merge, several datasets are shuffled each (data/prepare/shared.py)."""
    if o["data.shuffle_merged_datasets"]:
        return {"data.shuffle": True}
    each = o["data.shuffle_before_merging_datasets"] and len(_entries(o, "data.datasets")) > 1
    return {"data.shuffle": True, "data.shuffle_each": True} if each else {"data.shuffle": False}


def xorl_packing(o: Options) -> Settings:
    """The packing method; sample_packing_sequentially overrides it.

    multipack puts each document into the first row with room. It sorts nothing (data/prepare/packing.py), so in an
    order that is kept it is best_fit here.
    """
    if o["data.sample_packing_sequentially"] or o["data.sample_packing_method"] == "sequential":
        return {"data.packing_method": "sequential"}
    if o["data.sample_packing_method"] != "multipack":
        raise Unsupported("sample_packing_method is sequential or multipack")
    kept = xorl_shuffle(o) != {"data.shuffle": True}
    return {"data.packing_method": "best_fit" if kept else "first_fit_decreasing"}


def xorl_mesh(o: Options) -> Settings:
    """Replicas, shards, and the devices of the experts.

    XORL's devices are stages x replicas x shards x ring x Ulysses x tensor (arguments.py), whatever the number of
    devices of the experts: experts are divided among the devices of a stage (distributed/parallel_state.py). Those
    that shard rows can be our axis of experts. Over all others, experts are sharded like other weights.
    """
    mode, experts = o["train.data_parallel_mode"], o["train.expert_parallel_size"]
    if mode not in ("none", "ddp", "fsdp2"):
        raise Unsupported("data_parallel_mode is none, ddp or fsdp2")
    if mode != "fsdp2":
        if experts > 1:
            raise Unsupported("experts on several devices without data_parallel_mode fsdp2")
        return {"mesh.data": 1 if mode == "none" else -1, "mesh.fsdp": 1}
    replicas, shards = o["train.data_parallel_replicate_size"], o["train.data_parallel_shard_size"]
    if experts <= 1:
        apart = 1
    elif shards > 0:
        apart = math.gcd(experts, shards)  # the part of the experts' devices that shards rows
    else:
        apart = experts if o["train.ulysses_parallel_size"] * o["train.ringattn_parallel_size"] == 1 else 1
    # Of replicas and shards, XORL computes the one that is not given; if neither is, all devices are shards.
    data = replicas if replicas > 0 else -1 if shards > 0 else 1
    mesh = {"mesh.data": data, "mesh.fsdp": shards // apart if shards > 0 else -1}
    if apart == experts or experts <= 1:
        return mesh | ({"mesh.expert": apart} if experts > 1 else {})
    told = "the same devices and losses: over the others experts are sharded like other weights, and gathered"
    return mesh | {"mesh.expert": apart, NOTE: told}


def xorl_pipeline(o: Options) -> Settings:
    """The pipeline schedule, whose name differs in case; Interleaved1F1B is 1F1B with several stages a device."""
    schedules = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "1f1b"}
    schedule = str(o["train.pipeline_parallel_schedule"]).lower()  # torch's names: 1F1B, GPipe, Interleaved1F1B
    if schedule not in schedules:
        raise Unsupported("the schedules are 1F1B, Interleaved1F1B and GPipe")
    return {"parallel.pipeline": schedules[schedule]} if o["train.pipeline_parallel_size"] > 1 else {}


def xorl_optimizer(o: Options) -> Settings:
    """The optimizer; two optimizers read optimizer_dtype, SGD has no momentum, AdamW's second beta is 0.95.

    No option sets the betas; these are the defaults of optim/optimizer.py, with Muon too.
    """
    name = o["train.optimizer"]
    if name not in ("adamw", "anyprecision_adamw", "sgd", "muon"):
        raise Unsupported("the optimizers are adamw, anyprecision_adamw, sgd and muon")
    settings: Settings = {"optim.name": "adamw" if name == "anyprecision_adamw" else name}
    if name in ("anyprecision_adamw", "muon"):
        dtype = o["train.optimizer_dtype"]
        settings["optim.state_dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    return settings | ({"optim.beta1": 0.0} if name == "sgd" else {"optim.beta2": 0.95})


def xorl_rates(o: Options) -> Settings:
    """The final learning rate, which a constant schedule does not have."""
    return {} if o["train.lr_decay_style"] == "constant" else {"optim.min_lr": o["train.lr_min"]}


def xorl_muon_rate(o: Options) -> Settings:
    """The learning rate of Muon, which no other optimizer reads."""
    return {"optim.muon.learning_rate": o["train.muon_lr"]} if o["train.optimizer"] == "muon" else {}


def xorl_no_decay(o: Options) -> Settings:
    """Name parts, as one regular expression. Without any, every parameter decays (optim/optimizer.py)."""
    parts = names_of(o["train.no_decay_modules"]) + names_of(o["train.no_decay_params"])
    if xorl_qlora(o)["lora.enabled"]:
        # Parts of what is not trained with adapters would match nothing.
        trained = [part for part in parts if not re.search("norm|bias|embed", part, re.IGNORECASE)]
        told = {NOTE: "norms, biases and embeddings are not trained with adapters"} if len(trained) < len(parts) else {}
        return told if not trained else {"optim.no_decay": "|".join(map(re.escape, trained))}
    # Modules may be named by their class, such as Qwen3RMSNorm and Embedding.
    for pattern, ours in {"norm$": "norm", "^embedding$": "embed_tokens"}.items():
        parts = [ours if re.search(pattern, part, re.IGNORECASE) else part for part in parts]
    if parts:
        return {"optim.no_decay": "|".join(map(re.escape, dict.fromkeys(parts)))}
    if not o["train.weight_decay"]:
        return {}
    return {"optim.no_decay": "", NOTE: "every parameter decays, norms and embeddings too, as in XORL"}


def xorl_remat(o: Options) -> Settings:
    """The rematerialisation policy, or offloading."""
    if o["train.enable_activation_offload"]:
        # With a limit, part of the activations stays on the GPU, which 'auto' decides from the memory.
        return {"memory.remat": "auto" if o["train.activation_gpu_limit"] > 0 else "offload"}
    methods = {"recompute_full_layer": "block", "recompute_before_dispatch": "attention+qkv", "no_recompute": "none"}
    method = o.get("train.gradient_checkpointing_method")
    if method is not None and method not in methods:
        raise Unsupported(f"gradient_checkpointing_method is one of {', '.join(methods)}")
    if not o["train.enable_gradient_checkpointing"]:
        return {"memory.remat": "none"}
    if method is not None:
        return {"memory.remat": methods[method]}
    # moe_act recomputes only the experts, whatever recompute_modules lists.
    if o["train.moe_checkpoint_method"] == "moe_act":
        return {"memory.remat": "experts"}
    modules = set(names_of(o["train.recompute_modules"]))
    if not modules <= {"self_attn", "mlp"}:
        raise Unsupported("recompute_modules are self_attn and mlp")
    return {"memory.remat": {"self_attn": "attention+qkv", "mlp": "ffn"}.get("".join(modules), "block")}


def xorl_profile(o: Options) -> Settings:
    """The trace; our option is the number of steps, theirs the last step."""
    first, last = o["train.profile_start_step"], o["train.profile_end_step"]
    if not o["train.enable_profiling"]:
        return {}
    settings = {"prof.enabled": True, "prof.start_step": max(first, 1), "prof.steps": max(last - first, 1)}
    settings |= {"prof.dir": o["train.profile_trace_dir"], "prof.memory": o["train.profile_profile_memory"]}
    return settings | {"prof.every_process": not o["train.profile_rank0_only"]}


def xorl_qlora(o: Options) -> Settings:
    """Adapters and quantization; quantized weights are frozen, so QLoRA implies adapters."""
    if not o["lora.enable_qlora"]:
        return {"lora.enabled": o["lora.enable_lora"]}
    formats = {"nvfp4": "nvfp4", "block_fp8": "fp8", "nf4": "nf4"}  # block_fp8: a scale for each block, as ours has
    if o["lora.quant_format"] not in formats:
        raise Unsupported(f"quant_format is one of {', '.join(formats)}")
    settings = {"lora.enabled": True, "quant.format": formats[o["lora.quant_format"]]}
    size = o.get("lora.quant_group_size")
    return settings | ({"quant.block_size": size} if size is not None else {})


def xorl_targets(o: Options) -> Settings:
    """Module names; a fused layer is replaced by the names of its parts."""
    names = [part for name in names_of(o["lora.lora_target_modules"]) for part in FUSED.get(name, (name,))]
    return {"lora.target_modules": list(dict.fromkeys(names))} if names else {}


def xorl_merge(o: Options) -> Settings:
    """The whole model as the result, unless only adapters are saved; with merges on the way it always is."""
    adapters = xorl_qlora(o)["lora.enabled"] and not o["lora.merge_lora_interval"]
    return {"export.merge": True} if adapters and not o["lora.save_lora_only"] else {}


def xorl_exclude(o: Options) -> Settings:
    """Layers that stay unquantized, by the last part of their names, as one regular expression (qlora/utils.py).

    The head and the routers are never quantized, in XORL either, and a name with a dot matches nothing there.
    """
    names = [part for name in names_of(o.get("lora.exclude_modules")) for part in FUSED.get(name, (name,))]
    names = [name for name in names if name not in ("lm_head", "gate") and "." not in name]
    if not names or not o["lora.enable_qlora"]:
        return {NOTE: "the head and routers are never quantized"}
    return {"quant.exclude": rf"\.({'|'.join(map(re.escape, names))})$"}  # names are paths with dots


def xorl_noise(o: Options) -> Settings:
    """QeRL's noise, only with quantized weights; aqn_alpha multiplies its initial deviation, 0.01."""
    return {"quant.noise": 0.01 * o["lora.aqn_alpha"]} if o["lora.enable_aqn"] and o["lora.enable_qlora"] else {}


def xorl_distillation(o: Options) -> Settings:
    """The teacher, which scores the documents once before the first step."""
    if not o["distill.enable_distillation"]:
        return {}
    path = "distill.teacher_model_path"
    if o.get(path) is None:
        raise Unsupported(f"distillation without {path}: jaxtune lets the teacher score the data", path)
    if o["distill.distillation_loss_weight"] != 1.0:
        raise Unsupported("distillation_loss_weight other than 1.0; distill.weight mixes it with the cross-entropy")
    kinds = ("forward_kl", "reverse_kl")
    if o["distill.distillation_loss_type"] not in kinds:
        raise Unsupported(f"distillation_loss_type is one of {', '.join(kinds)}")
    teacher = {"distill.teacher": o[path]}
    return teacher | {"distill.divergence": o["distill.distillation_loss_type"]}


def xorl_resume(o: Options) -> Settings:
    """auto continues the run of that name; a path is the checkpoint to start from if that run has none."""
    path = o["train.load_checkpoint_path"]
    if not path:
        return {}
    return {"ckpt.resume": "auto"} | ({"ckpt.start": path} if path != "auto" else {})


def _entries(o: Options, name: str) -> list[Mapping[str, Any]]:
    """Return the entries of a list of datasets."""
    entries = o.get(name)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
