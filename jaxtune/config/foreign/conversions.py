"""Options of other systems whose values must be read together. Each function gets all options of its file or entry."""

import ast
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

Settings = dict[str, Any]
Options = Mapping[str, Any]


class NotYet(Exception):
    """Something that is not there yet; the message says what."""


def _names(value: Any) -> list[str]:
    """One name, several or none."""
    return [value] if isinstance(value, str) else [str(name) for name in value or ()]


# ---- Surogate ----


def surogate_remat(o: Options) -> Settings:
    """A block implies all; attention implies its projections, a feed-forward its activation."""
    if o["offload_residual"]:
        return {"memory.remat": "offload"}
    attention, feed_forward = o["recompute_att"], o["recompute_ffn"]
    if o["recompute_block"] or (feed_forward and (attention or o["recompute_qkv"])):
        return {"memory.remat": "block"}
    chosen = {"attention+qkv": attention, "ffn": feed_forward, "qkv": o["recompute_qkv"]}
    return {"memory.remat": next((policy for policy, wanted in chosen.items() if wanted), "none")}


def surogate_rope(o: Options) -> Settings:
    """A name with max_model_len, or JSON with a factor; without either the positions stay those of config.json."""
    scaling, positions = o["rope_scaling"], o.get("max_model_len")
    if scaling is None:
        return {}
    if isinstance(scaling, Mapping):
        scaling = json.dumps(dict(scaling), default=str)
    if not isinstance(scaling, str) or not isinstance(positions, int | None):
        raise NotYet("rope_scaling is linear, dynamic, yarn or JSON, and max_model_len a number")
    return {"model.rope_scaling": scaling} | ({"model.max_positions": positions} if positions else {})


def surogate_zero(o: Options) -> Settings:
    """The highest level that one of three options asks for."""
    return {"parallel.zero": max(o["zero_level"], 3 if o["shard_weights"] else 1, 2 if o["shard_gradients"] else 1)}


def surogate_gpus(o: Options) -> Settings:
    """0: all; those of a node come before those of the machine."""
    return {"device.gpus": o["distributed.gpus_per_node"] or o["gpus"] or None}


def surogate_qlora(o: Options) -> Settings:
    """Three switches for one format, each with a block size of its own."""
    if o["qlora_fp4"]:
        return {"quant.format": "nvfp4"}
    if o["qlora_fp8"]:
        return {"quant.format": "fp8", "quant.block_size": o["qlora_block_size"]}
    if o["qlora_bnb"]:
        return {"quant.format": "nf4", "quant.block_size": o["qlora_bnb_block_size"]}
    return {}


def surogate_skip(o: Options) -> Settings:
    """Of a quantized base, and of products in low precision."""
    skipped = {"skip_first_layers": o["skip_quant_first_layers"], "skip_last_layers": o["skip_quant_last_layers"]}
    sections = ["quant"] if surogate_qlora(o) else []
    sections += ["precision"] if o["recipe"] != "bf16" else []
    return {f"{section}.{name}": count for section in sections for name, count in skipped.items()}


def surogate_master(o: Options) -> Settings:
    """The dtype of the model, if it is not said; that of most checkpoints is bfloat16."""
    dtype = o["master_dtype"] or o.get("torch_dtype") or "bfloat16"
    named = {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, dtype)
    if named not in ("float32", "bfloat16"):
        raise NotYet("master weights are float32 or bfloat16")
    return {"precision.master_dtype": named}


def surogate_backward(o: Options) -> Settings:
    """The dtype that the recipe's backward products have; there are no others."""
    known = {"bf16": ("bf16", "bfloat16"), "fp8_hybrid": ("e5m2", "fp8_e5m2"), "nvfp4": ("fp4", "fp4_e2m1", "nvfp4")}
    dtype, names = o["gradient_dtype"], known.get(o["recipe"])
    if dtype is not None and names and dtype not in names:
        raise NotYet(f"backward products of another dtype than the recipe's, which is {names[0]}")
    return {}


def surogate_targets(o: Options) -> Settings:
    """A list, in which all-linear is a word for all."""
    names = _names(o["lora_target_modules"])
    return {"lora.target_modules": "all-linear" if names == ["all-linear"] else names}


def surogate_input(o: Options) -> Settings:
    """Instructions have no input unless its column is named."""
    return {"input_field": o["input_field"]} if o.get("type") == "instruction" else {}


def surogate_mappings(o: Options) -> Settings:
    """Names of keys that are other ones in the data."""
    pairs = o["message_property_mappings"] or {}
    return {"message_property_mappings": tuple(f"{ours}={theirs}" for ours, theirs in pairs.items() if ours != theirs)}


def surogate_checkpoints(o: Options) -> Settings:
    """Where they are if not in the run's folder, which is in output_dir."""
    elsewhere = o["checkpoint_dir"]
    return {} if os.path.abspath(str(elsewhere)) == os.path.abspath(o["output_dir"]) else {"ckpt.dir": elsewhere}


# ---- XORL ----


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
    return (
        {"model.overrides": [f"{name}={json.dumps(value, default=str)}" for name, value in entries.items()]}
        if entries
        else {}
    )


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
    parts = _names(o["train.no_decay_modules"]) + _names(o["train.no_decay_params"])
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
    modules = set(_names(o["train.recompute_modules"]))
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
    names = _names(o.get("lora.exclude_modules"))
    return {"quant.exclude": "|".join(map(re.escape, names))} if names and o["lora.enable_qlora"] else {}


def xorl_noise(o: Options) -> Settings:
    """Read with quantized weights alone; the deviation is a factor of that with which QeRL begins."""
    return {"quant.noise": 0.01 * o["lora.aqn_alpha"]} if o["lora.enable_aqn"] and o["lora.enable_qlora"] else {}


def xorl_resume(o: Options) -> Settings:
    """auto: the run of that name goes on; or from the checkpoint of another one, where there is none of that name."""
    path = o["train.load_checkpoint_path"]
    return {"ckpt.resume": "auto"} | ({"ckpt.start": path} if path != "auto" else {})


# ---- ERNIEKit ----


def ernie_train(o: Options) -> Settings:
    """Paths and their shares, separated by commas; small datasets are repeated until the largest is used up."""
    entries = _ernie_entries(o, "train") if o.get("train_dataset_path") else []
    mixing = {"data.mixing": "interleave_over"} if len(entries) > 1 else {}
    return {"data.datasets": entries} | mixing


def ernie_eval(o: Options) -> Settings:
    """Evaluation takes place with do_eval and a strategy."""
    strategy = o["evaluation_strategy"]
    if strategy not in ("steps", "epoch", "no"):
        raise NotYet("the strategies are steps, epoch and no")
    if not o["do_eval"] or strategy == "no" or not o.get("eval_dataset_path"):
        return {}
    most = o["max_evaluate_steps"]
    settings: Settings = {
        "data.eval_datasets": _ernie_entries(o, "eval"),
        "eval.max_batches": most if most > 0 else None,
    }
    if strategy == "epoch":
        return settings | {"eval.epochs": 1.0}
    return settings | ({"eval.steps": o["eval_steps"]} if o.get("eval_steps") else {})


def ernie_stage(o: Options) -> Settings:
    """Preferences are learned with stage: DPO alone. Without a reference there is nothing to update."""
    stage = str(o["stage"]).upper()
    if stage in ("SFT", "PT"):
        return {}
    losses = ("sigmoid", "ipo", "kto_pair", "simpo", "orpo")
    if stage != "DPO" or o["loss_type"] not in losses:
        raise NotYet(f"the stages are SFT, PT and DPO, with a loss_type of {', '.join(losses)}")
    loss, alone = o["loss_type"], o["loss_type"] in ("simpo", "orpo")
    settings: Settings = {"preference.loss": loss, "preference.beta": o["beta"]}
    settings |= {"preference.loss_weight": o["pref_loss_ratio"], "preference.sft_weight": o["sft_loss_ratio"]}
    settings |= {"preference.offset_alpha": o["offset_alpha"]}
    settings |= {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]}
    if loss in ("sigmoid", "simpo"):
        settings["preference.label_smoothing"] = o["label_smoothing"]
    if loss == "simpo":
        settings["preference.simpo_gamma"] = o["simpo_gamma"]
    if not alone and o["reference_free"]:
        settings["preference.reference"] = None
    elif not alone and o["ref_model_update_steps"] > 0:
        settings["preference.reference_update_steps"] = o["ref_model_update_steps"]
    return settings


def _ernie_entries(o: Options, part: str) -> list[Settings]:
    types = {"erniekit": "conversation", "alpaca": "instruction", "messages": "conversation"}
    if str(o["stage"]).upper() == "DPO":
        types = {"erniekit": "preference"}
    paths = _split(o[f"{part}_dataset_path"])
    kinds = _split(o[f"{part}_dataset_type"])
    try:
        shares = [float(share) for share in _split(o[f"{part}_dataset_prob"])]
    except ValueError:
        raise NotYet("probabilities that are not numbers with commas between them") from None
    if unknown := [kind for kind in kinds if kind not in types]:
        raise NotYet(f"data of type {unknown[0]}; there are {', '.join(types)}")
    if len(paths) == 1:
        return [{"path": paths[0], "type": types[kinds[0]]}]
    kinds = kinds * len(paths) if len(kinds) == 1 else kinds
    if not len(paths) == len(kinds) == len(shares):
        raise NotYet(f"{len(paths)} paths with {len(shares)} probabilities and {len(kinds)} types; give one to each")
    return [{"path": path, "type": types[kind], "weight": share} for path, kind, share in zip(paths, kinds, shares)]


def _split(text: Any) -> list[str]:
    return [part.strip() for part in str(text).split(",")]


def ernie_rates(o: Options) -> Settings:
    """Some options are read by one schedule alone."""
    schedule = o["lr_scheduler_type"]
    if schedule not in ("linear", "cosine", "polynomial", "constant", "constant_with_warmup"):
        raise NotYet("the schedules are linear, cosine, polynomial, constant and constant_with_warmup")
    settings: Settings = {"optim.schedule": schedule.removesuffix("_with_warmup")}
    if schedule == "cosine":
        settings |= {"optim.min_lr": o["min_lr"], "optim.cycles": o["num_cycles"]}
    if schedule == "polynomial":
        settings |= {"optim.min_lr": o["lr_end"], "optim.power": o["power"]}
    return settings


def ernie_precision(o: Options) -> Settings:
    """Three ways to say the format of products, of which float32 is what is left."""
    named = "fp16" if o.get("fp16") else "bf16" if o["bf16"] else "fp32"
    named = o.get("compute_type") or named
    if named not in ("bf16", "fp16", "fp32", "fp8"):
        raise NotYet("compute_type is bf16, fp16, fp32 or fp8")
    stored = {"fp16": "float16", "fp32": "float32"}.get(named, "bfloat16")
    stored = "float32" if o.get("fp16_opt_level") == "O1" else stored
    fp8 = named == "fp8" or (o.get("weight_quantize_algo") == "fp8_linear" and not _ernie_lora(o))
    settings: Settings = {"precision.recipe": "fp8_hybrid" if fp8 else named, "model.dtype": stored}
    if named == "bf16" and o.get("fp16_opt_level") == "O2" and not o["amp_master_grad"]:
        settings["precision.gradient_dtype"] = "bfloat16"
    if fp8:
        steps = o["apply_online_actscale_step"]
        settings |= {"precision.fp8.hadamard": o["apply_hadamard"], "precision.fp8.online_scale_steps": steps}
    return settings


def ernie_lora(o: Options) -> Settings:
    """alpha = -1: twice the rank, or 4 with rslora. rslora_plus: rslora, B matrices 4 times as fast, alpha 4."""
    if not _ernie_lora(o):
        return {"lora.enabled": False}
    plus = bool(o["rslora_plus"])
    scaled, rate = o["rslora"] or plus, 4.0 if plus else float(o["lora_plus_scale"])
    alpha = o["lora_alpha"]
    alpha = (4 if scaled else 2 * o["lora_rank"]) if alpha == -1 or plus else alpha
    settings: Settings = {"lora.enabled": True, "lora.rank": o["lora_rank"], "lora.alpha": float(alpha)}
    return settings | {"lora.use_rslora": bool(scaled), "lora.lr_ratio": rate}


def _ernie_lora(o: Options) -> bool:
    return bool(o["lora"]) or str(o.get("fine_tuning")).lower() == "lora"


def ernie_quant(o: Options) -> Settings:
    """Of a frozen base; of trained weights, fp8_linear is a recipe of precision."""
    algorithm = o.get("weight_quantize_algo")
    formats = {"weight_only_mix": "weight_only_mix", "weight_only_int8": "int8", "fp8_linear": "fp8"}
    if algorithm is not None and algorithm not in formats:
        raise NotYet(f"weight_quantize_algo is one of {', '.join(formats)}")
    if algorithm is None or (algorithm == "fp8_linear" and not _ernie_lora(o)):
        return ernie_precision(o) if algorithm else {}
    return {"quant.format": formats[algorithm]}


def ernie_sharding(o: Options) -> Settings:
    """Replicas take what shards leave."""
    degree = o.get("sharding_parallel_degree")
    if degree is None or degree == -1:
        return {"mesh.fsdp": -1}
    return {"mesh.fsdp": max(degree, 1), "mesh.data": -1}


def ernie_remat(o: Options) -> Settings:
    """What is recomputed, if anything is."""
    policies = {"full": "block", "full_attn": "attention+qkv", "core_attn": "dots"}
    if o["recompute_granularity"] not in policies:
        raise NotYet(f"recompute_granularity is one of {', '.join(policies)}")
    return {"memory.remat": policies[o["recompute_granularity"]] if o["recompute"] else "none"}


def ernie_offload(o: Options) -> Settings:
    """Two switches, of which one goes tensor by tensor, as it is done here."""
    return {"memory.offload_optimizer": bool(o["offload_optim"] or o["tensorwise_offload_optimizer"])}


def ernie_save(o: Options) -> Settings:
    """By steps, by epochs, or never."""
    return _saved(o["save_strategy"], o.get("save_steps", 0))


def _saved(strategy: Any, steps: int) -> Settings:
    if strategy not in ("steps", "epoch", "no"):
        raise NotYet("the strategies are steps, epoch and no")
    by = {"steps": {"ckpt.save_steps": steps}, "epoch": {"ckpt.save_epochs": 1.0}, "no": {"ckpt.at_end": False}}
    return {"ckpt.save_steps": 0} | by[strategy]


# ---- QEfficient ----


def qefficient_data(o: Options) -> Settings:
    """A file comes before a name. Validation data are the split that is named, or a part of the training data."""
    file, name, label = o["dataset.json_file_path"], o["dataset.dataset_name"], o.get("dataset.target_column")
    entry = {"path": file or name, "type": "classification" if label else "instruction"}
    if label:
        columns = _names(o["dataset.input_columns"])
        text = columns[0] if len(columns) == 1 else " ".join(f"{{{column}}}" for column in columns)
        entry |= {"target_column": label, "text_field": text}
    subset = o["dataset.dataset_subset"]
    if not file:
        entry |= {"split": o["dataset.train_split"]} | ({"subset": subset} if subset != "default" else {})
    settings: Settings = {"data.datasets": [entry]} | ({"model.head": "classification"} if label else {})
    if not o["training.do_eval"] or o["training.eval_strategy"] == "no":
        return settings
    if o.get("dataset.test_split") and not file:
        return settings | {"data.eval_datasets": [entry | {"split": o["dataset.test_split"]}]}
    return settings | {"data.validation_split": round(1 - o["dataset.split_ratio"], 6)}


def qefficient_function(o: Options) -> Settings:
    """FILE:NAME of a function that writes a text, of the prompt or of the completion."""
    prompt, completion = o["dataset.prompt_func"], o["dataset.completion_func"]
    if prompt and completion:
        raise NotYet(
            "a function each; write one that returns {'prompt': ..., 'completion': ...}, and name it by "
            "data.datasets[i].function = 'FILE.py:NAME'"
        )
    if not (prompt or completion):
        return {}
    place, _, name = str(prompt or completion).rpartition(":")
    if not place:
        raise NotYet("a function that is not named as FILE:NAME")
    function = f"{place}:{name}" if place.endswith(".py") or "/" not in place else f"{place}.py:{name}"
    written = {"prompt_format": "{returned}"} if prompt else {"output_field": "returned"}
    return {f"data.datasets[i].{key}": value for key, value in {"function": function, **written}.items()}


def qefficient_prompt(o: Options) -> Settings:
    """A text with columns; their example of grammar has one as Python writes it, f"...\\n"."""
    return _qefficient_text("prompt_format", o["dataset.prompt_template"])


def qefficient_completion(o: Options) -> Settings:
    """A text with columns."""
    return _qefficient_text("output_field", o["dataset.completion_template"])


def _qefficient_text(key: str, template: Any) -> Settings:
    if template is None:
        return {}
    text = str(template)
    if re.fullmatch(r'f"(?:[^"\\]|\\.)*"', text):
        text = ast.literal_eval(text[1:])
    return {f"data.datasets[i].{key}": text}


def qefficient_eval(o: Options) -> Settings:
    """By steps, or by epochs."""
    strategy = o["training.eval_strategy"] if o["training.do_eval"] else "no"
    if strategy not in ("steps", "epoch", "no"):
        raise NotYet("the strategies are steps, epoch and no")
    by = {"steps": {"eval.steps": o.get("training.eval_steps", 0)}, "epoch": {"eval.epochs": 1.0}}
    return {"eval.steps": 0} | by.get(strategy, {})


def qefficient_early(o: Options) -> Settings:
    """Read where the callback is listed."""
    if "callbacks.early_stopping" not in o:
        return {}
    patience, least = (o[f"callbacks.early_stopping.early_stopping_{part}"] for part in ("patience", "threshold"))
    return {"eval.patience": patience, "eval.min_improvement": least}


def qefficient_save(o: Options) -> Settings:
    """By steps, by epochs, or never."""
    return _saved(o["training.save_strategy"], o["training.save_steps"])


def qefficient_log(o: Options) -> Settings:
    """A line each so many steps, or none."""
    strategy = o["training.logging_strategy"]
    if strategy not in ("steps", "no"):
        raise NotYet("lines of progress by epochs; 'steps' and 'no' are there, and metrics.jsonl has every step")
    return {"log.every": o["training.logging_steps"] if strategy == "steps" else 0}


def qefficient_devices(o: Options) -> Settings:
    """Without FSDP, every device has a replica."""
    return {"mesh.fsdp": -1} if o["training.fsdp_config"] else {"mesh.fsdp": 1, "mesh.data": -1}


def qefficient_device(o: Options) -> Settings:
    """use_cpu comes before device; XLA has no backend for qaic."""
    if o["training.use_cpu"]:
        return {"device.platform": "cpu"}
    return {"device.platform": o["training.device"]} if o["training.device"] in ("cuda", "cpu") else {}


def qefficient_warmup(o: Options) -> Settings:
    """Below one it is a part of the steps."""
    warmup = o["scheduler.warmup_steps"]
    return {"optim.warmup_ratio": warmup} if 0 < warmup < 1 else {"optim.warmup_steps": int(warmup)}


def qefficient_workers(o: Options) -> Settings:
    """Two options for one thing; the one that names the loader counts."""
    return {"data.num_workers": o.get("dataset.dataloader_num_workers", o.get("dataset.num_workers"))}


def qefficient_length(o: Options) -> Settings:
    """What is longer is cut at its end."""
    return {"data.seq_len": o["dataset.max_seq_length"], "data.truncation": "right"}


def qefficient_tokenizer(o: Options) -> Settings:
    """That of the model, or another one."""
    name = o["dataset.tokenizer_name"]
    return {"model.tokenizer": name} if name != o["model.model_name"] else {}


def conversions_of(names: Mapping[str, Any], *systems: str) -> dict[str, Callable[[Options], Settings]]:
    """The functions of a module that are named for one of these systems."""
    starts = tuple(f"{system}_" for system in systems)
    return {name: function for name, function in list(names.items()) if name.startswith(starts)}


CONVERSIONS = conversions_of(vars(), "surogate", "xorl", "ernie", "qefficient")
