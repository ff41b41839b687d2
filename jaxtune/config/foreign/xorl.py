"""Options of XORL that are translated together (see `conversions`)."""

import re
from collections.abc import Mapping

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, conversions_of, model_overrides, names_of


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
        settings |= {"model.config": config}
    if tokenizer not in (None, config or model):
        settings |= {"model.tokenizer": tokenizer}
    return settings


def xorl_foundation(o: Options) -> Settings:
    """Overridden entries of config.json."""
    entries = o["model.foundation"]
    if not isinstance(entries, Mapping):
        raise Unsupported("a value other than a mapping of config.json entries")
    return model_overrides(entries)


def xorl_packing(o: Options) -> Settings:
    """The packing method: multipack sorts by length; sample_packing_sequentially overrides it."""
    sequential = o["data.sample_packing_sequentially"] or o["data.sample_packing_method"] == "sequential"
    return {"data.packing_method": "sequential" if sequential else "first_fit_decreasing"}


def xorl_data_parallel(o: Options) -> Settings:
    """Shards and replicas; -1 means all devices for shards, and one for replicas."""
    mode = o["train.data_parallel_mode"]
    if mode == "none":
        return {"mesh.data": 1, "mesh.fsdp": 1}
    if mode == "ddp":
        return {"mesh.data": -1, "mesh.fsdp": 1}
    if mode != "fsdp2":
        raise Unsupported("data_parallel_mode is none, ddp or fsdp2")
    replicas = o["train.data_parallel_replicate_size"]
    return {"mesh.data": 1 if replicas == -1 else replicas, "mesh.fsdp": o["train.data_parallel_shard_size"]}


def xorl_pipeline(o: Options) -> Settings:
    """The pipeline schedule, whose name differs only in case."""
    schedule = str(o["train.pipeline_parallel_schedule"])
    if schedule.lower() not in ("1f1b", "gpipe"):
        raise Unsupported("the schedules are 1F1B and GPipe; Interleaved1F1B is 1F1B with parallel.virtual_stages")
    return {"parallel.pipeline": schedule.lower()} if o["train.pipeline_parallel_size"] > 1 else {}


def xorl_optimizer(o: Options) -> Settings:
    """The optimizer; two optimizers read optimizer_dtype, and SGD has no momentum, as in torch."""
    name = o["train.optimizer"]
    if name not in ("adamw", "anyprecision_adamw", "sgd", "muon"):
        raise Unsupported("the optimizers are adamw, anyprecision_adamw, sgd and muon")
    settings: Settings = {"optim.name": "adamw" if name == "anyprecision_adamw" else name}
    if name in ("anyprecision_adamw", "muon"):
        dtype = o["train.optimizer_dtype"]
        settings["optim.state_dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    return settings | ({"optim.beta1": 0.0} if name == "sgd" else {})


def xorl_rates(o: Options) -> Settings:
    """The final learning rate, which a constant schedule does not have."""
    return {} if o["train.lr_decay_style"] == "constant" else {"optim.min_lr": o["train.lr_min"]}


def xorl_muon_rate(o: Options) -> Settings:
    """The learning rate of Muon, which no other optimizer reads."""
    return {"optim.muon.learning_rate": o["train.muon_lr"]} if o["train.optimizer"] == "muon" else {}


def xorl_no_decay(o: Options) -> Settings:
    """Name parts, as one regular expression.

    With adapters, parts for norms, biases and embeddings are dropped, because those are not trained.
    """
    parts = names_of(o["train.no_decay_modules"]) + names_of(o["train.no_decay_params"])
    if xorl_qlora(o)["lora.enabled"]:
        parts = [part for part in parts if not re.search("norm|bias|embed", part)]
    return {"optim.no_decay": "|".join(map(re.escape, parts))} if parts else {}


def xorl_remat(o: Options) -> Settings:
    """The rematerialisation policy, or offloading."""
    if o["train.enable_activation_offload"]:
        # With a limit, part of the activations stays on the GPU, which 'auto' decides from the memory.
        return {"memory.remat": "auto" if o["train.activation_gpu_limit"] > 0 else "offload"}
    if not o["train.enable_gradient_checkpointing"]:
        return {"memory.remat": "none"}
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
    formats = {"nvfp4": "nvfp4", "block_fp8": "fp8", "nf4": "nf4"}
    if o["lora.quant_format"] not in formats:
        raise Unsupported(f"quant_format is one of {', '.join(formats)}")
    settings = {"lora.enabled": True, "quant.format": formats[o["lora.quant_format"]]}
    size = o.get("lora.quant_group_size")
    return settings | ({"quant.block_size": size} if size is not None else {})


def xorl_exclude(o: Options) -> Settings:
    """Module names, as one regular expression."""
    names = names_of(o.get("lora.exclude_modules"))
    return {"quant.exclude": "|".join(map(re.escape, names))} if names and o["lora.enable_qlora"] else {}


def xorl_noise(o: Options) -> Settings:
    """QeRL's noise, only with quantized weights; aqn_alpha multiplies its initial deviation, 0.01."""
    return {"quant.noise": 0.01 * o["lora.aqn_alpha"]} if o["lora.enable_aqn"] and o["lora.enable_qlora"] else {}


def xorl_resume(o: Options) -> Settings:
    """auto continues the run of that name; a path is the checkpoint to start from if that run has none."""
    path = o["train.load_checkpoint_path"]
    return {"ckpt.resume": "auto"} | ({"ckpt.start": path} if path != "auto" else {})


CONVERSIONS = conversions_of(vars(), "xorl")
