"""Options of XORL that must be read together (`conversions`)."""

import re
from collections.abc import Mapping

from jaxtune.config.foreign.conversions import NotYet, Options, Settings, conversions_of, names_of, overriding


def xorl_model(o: Options) -> Settings:
    """Weights, or random ones of the shape that config_path describes."""
    model, config = o.get("model.model_path"), o.get("model.config_path")
    tokenizer = o.get("model.tokenizer_path")
    if model is None:
        if config is None:
            return {}
        own = {"model.tokenizer": tokenizer} if tokenizer not in (None, config) else {}
        return {"model.path": config, "model.from_scratch": True} | own
    settings = {"model.path": model}
    if config not in (None, model):
        settings |= {"model.config": config}
    if tokenizer not in (None, config or model):
        settings |= {"model.tokenizer": tokenizer}
    return settings


def xorl_foundation(o: Options) -> Settings:
    """Entries of config.json, as JSON."""
    entries = o["model.foundation"]
    if not isinstance(entries, Mapping):
        raise NotYet("anything but entries of config.json by their names")
    return overriding(entries)


def xorl_packing(o: Options) -> Settings:
    """multipack sorts by length; sample_packing_sequentially comes before the method."""
    sequential = o["data.sample_packing_sequentially"] or o["data.sample_packing_method"] == "sequential"
    return {"data.packing_method": "sequential" if sequential else "first_fit_decreasing"}


def xorl_data_parallel(o: Options) -> Settings:
    """Shards and replicas; -1 is all of the devices for shards, and one for replicas."""
    mode = o["train.data_parallel_mode"]
    if mode == "none":
        return {"mesh.data": 1, "mesh.fsdp": 1}
    if mode == "ddp":
        return {"mesh.data": -1, "mesh.fsdp": 1}
    if mode != "fsdp2":
        raise NotYet("data_parallel_mode is none, ddp or fsdp2")
    replicas = o["train.data_parallel_replicate_size"]
    return {"mesh.data": 1 if replicas == -1 else replicas, "mesh.fsdp": o["train.data_parallel_shard_size"]}


def xorl_pipeline(o: Options) -> Settings:
    """The names of schedules differ in case."""
    schedule = str(o["train.pipeline_parallel_schedule"])
    if schedule.lower() not in ("1f1b", "gpipe"):
        raise NotYet("the schedules are 1F1B and GPipe; Interleaved1F1B is 1F1B with parallel.virtual_stages")
    return {"parallel.pipeline": schedule.lower()} if o["train.pipeline_parallel_size"] > 1 else {}


def xorl_optimizer(o: Options) -> Settings:
    """optimizer_dtype is read by two of the optimizers; SGD is that of torch, without momentum."""
    name = o["train.optimizer"]
    if name not in ("adamw", "anyprecision_adamw", "sgd", "muon"):
        raise NotYet("the optimizers are adamw, anyprecision_adamw, sgd and muon")
    settings: Settings = {"optim.name": "adamw" if name == "anyprecision_adamw" else name}
    if name in ("anyprecision_adamw", "muon"):
        dtype = o["train.optimizer_dtype"]
        settings["optim.state_dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(dtype, dtype)
    return settings | ({"optim.beta1": 0.0} if name == "sgd" else {})


def xorl_rates(o: Options) -> Settings:
    """A constant rate does not end at another one."""
    return {} if o["train.lr_decay_style"] == "constant" else {"optim.min_lr": o["train.lr_min"]}


def xorl_muon_rate(o: Options) -> Settings:
    """Read by Muon alone."""
    return {"optim.muon.learning_rate": o["train.muon_lr"]} if o["train.optimizer"] == "muon" else {}


def xorl_no_decay(o: Options) -> Settings:
    """Parts of names, as one regular expression. Adapters have no norms, biases and embeddings beside them to train."""
    parts = names_of(o["train.no_decay_modules"]) + names_of(o["train.no_decay_params"])
    if xorl_qlora(o)["lora.enabled"]:
        parts = [part for part in parts if not re.search("norm|bias|embed", part)]
    return {"optim.no_decay": "|".join(map(re.escape, parts))} if parts else {}


def xorl_remat(o: Options) -> Settings:
    """What is recomputed, or where it waits."""
    if o["train.enable_activation_offload"]:
        return {"memory.remat": "auto" if o["train.activation_gpu_limit"] > 0 else "offload"}
    if not o["train.enable_gradient_checkpointing"]:
        return {"memory.remat": "none"}
    if o["train.moe_checkpoint_method"] == "moe_act":
        return {"memory.remat": "experts"}
    modules = set(names_of(o["train.recompute_modules"]))
    if not modules <= {"self_attn", "mlp"}:
        raise NotYet("recompute_modules are self_attn and mlp")
    return {"memory.remat": {"self_attn": "attention+qkv", "mlp": "ffn"}.get("".join(modules), "block")}


def xorl_profile(o: Options) -> Settings:
    """Steps are counted, not ended at."""
    first, last = o["train.profile_start_step"], o["train.profile_end_step"]
    if not o["train.enable_profiling"]:
        return {}
    settings = {"prof.enabled": True, "prof.start_step": max(first, 1), "prof.steps": max(last - first, 1)}
    settings |= {"prof.dir": o["train.profile_trace_dir"], "prof.memory": o["train.profile_profile_memory"]}
    return settings | {"prof.every_process": not o["train.profile_rank0_only"]}


def xorl_qlora(o: Options) -> Settings:
    """Quantized weights are frozen, so they imply adapters."""
    if not o["lora.enable_qlora"]:
        return {"lora.enabled": o["lora.enable_lora"]}
    formats = {"nvfp4": "nvfp4", "block_fp8": "fp8", "nf4": "nf4"}
    if o["lora.quant_format"] not in formats:
        raise NotYet(f"quant_format is one of {', '.join(formats)}")
    settings = {"lora.enabled": True, "quant.format": formats[o["lora.quant_format"]]}
    size = o.get("lora.quant_group_size")
    return settings | ({"quant.block_size": size} if size is not None else {})


def xorl_exclude(o: Options) -> Settings:
    """Names of modules, as one regular expression."""
    names = names_of(o.get("lora.exclude_modules"))
    return {"quant.exclude": "|".join(map(re.escape, names))} if names and o["lora.enable_qlora"] else {}


def xorl_noise(o: Options) -> Settings:
    """Read with quantized weights alone; the deviation is a factor of that with which QeRL begins."""
    return {"quant.noise": 0.01 * o["lora.aqn_alpha"]} if o["lora.enable_aqn"] and o["lora.enable_qlora"] else {}


def xorl_resume(o: Options) -> Settings:
    """auto: the run of that name goes on; or from the checkpoint of another one, where there is none of that name."""
    path = o["train.load_checkpoint_path"]
    return {"ckpt.resume": "auto"} | ({"ckpt.start": path} if path != "auto" else {})


CONVERSIONS = conversions_of(vars(), "xorl")
