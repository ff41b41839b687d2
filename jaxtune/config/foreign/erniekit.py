"""Options of ERNIEKit that are translated together (see `conversions`)."""

from typing import Any

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, conversions_of, saves_of, strategy_of


def ernie_train(o: Options) -> Settings:
    """Paths and their probabilities, comma-separated; small datasets repeat until the largest is used up."""
    entries = _ernie_entries(o, "train") if o.get("train_dataset_path") else []
    mixing = {"data.mixing": "interleave_over"} if len(entries) > 1 else {}
    return {"data.datasets": entries} | mixing


def ernie_eval(o: Options) -> Settings:
    """Evaluation runs only with do_eval and a strategy."""
    strategy = strategy_of(o["evaluation_strategy"])
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
    """Preference options apply only with stage: DPO. Reference-free losses have no reference to update."""
    stage = str(o["stage"]).upper()
    if stage in ("SFT", "PT"):
        return {}
    losses = ("sigmoid", "ipo", "kto_pair", "simpo", "orpo")
    if stage != "DPO" or o["loss_type"] not in losses:
        raise Unsupported(f"the stages are SFT, PT and DPO, with loss_type {', '.join(losses)}")
    loss, no_reference = o["loss_type"], o["loss_type"] in ("simpo", "orpo")
    settings: Settings = {"preference.loss": loss, "preference.beta": o["beta"]}
    settings |= {"preference.loss_weight": o["pref_loss_ratio"], "preference.sft_weight": o["sft_loss_ratio"]}
    settings |= {"preference.offset_alpha": o["offset_alpha"]}
    # A setting of every dataset, because theirs is global.
    settings |= {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]}
    if loss in ("sigmoid", "simpo"):
        settings["preference.label_smoothing"] = o["label_smoothing"]
    if loss == "simpo":
        settings["preference.simpo_gamma"] = o["simpo_gamma"]
    if not no_reference and o["reference_free"]:
        settings["preference.reference"] = None
    elif not no_reference and o["ref_model_update_steps"] > 0:
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
        raise Unsupported("probabilities that are not comma-separated numbers") from None
    if unknown := [kind for kind in kinds if kind not in types]:
        raise Unsupported(f"data of type {unknown[0]}; supported are {', '.join(types)}")
    if len(paths) == 1:
        return [{"path": paths[0], "type": types[kinds[0]]}]
    kinds = kinds * len(paths) if len(kinds) == 1 else kinds
    if not len(paths) == len(kinds) == len(shares):
        raise Unsupported(
            f"{len(paths)} paths with {len(shares)} probabilities and {len(kinds)} types; give one to each"
        )
    return [{"path": path, "type": types[kind], "weight": share} for path, kind, share in zip(paths, kinds, shares)]


def _split(text: Any) -> list[str]:
    return [part.strip() for part in str(text).split(",")]


def ernie_rates(o: Options) -> Settings:
    """Some options are read by only one schedule."""
    schedule = o["lr_scheduler_type"]
    if schedule not in ("linear", "cosine", "polynomial", "constant", "constant_with_warmup"):
        raise Unsupported("the schedules are linear, cosine, polynomial, constant and constant_with_warmup")
    settings: Settings = {"optim.schedule": schedule.removesuffix("_with_warmup")}
    if schedule == "cosine":
        settings |= {"optim.min_lr": o["min_lr"], "optim.cycles": o["num_cycles"]}
    if schedule == "polynomial":
        settings |= {"optim.min_lr": o["lr_end"], "optim.power": o["power"]}
    return settings


def ernie_precision(o: Options) -> Settings:
    """compute_type, fp16 and bf16 all set the precision recipe; float32 if none is set."""
    named = "fp16" if o.get("fp16") else "bf16" if o["bf16"] else "fp32"
    named = o.get("compute_type") or named
    if named not in ("bf16", "fp16", "fp32", "fp8"):
        raise Unsupported("compute_type is bf16, fp16, fp32 or fp8")
    stored = {"fp16": "float16", "fp32": "float32"}.get(named, "bfloat16")
    # Paddle's AMP: O1 keeps the weights in float32; O2 also keeps gradients in bfloat16, unless amp_master_grad is set.
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
    """alpha -1 means twice the rank, or 4 with rslora. rslora_plus means rslora, alpha 4 and lr_ratio 4."""
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
    """The format of a frozen base; for trained weights, fp8_linear is a precision recipe."""
    algorithm = o.get("weight_quantize_algo")
    formats = {"weight_only_mix": "weight_only_mix", "weight_only_int8": "int8", "fp8_linear": "fp8"}
    if algorithm is not None and algorithm not in formats:
        raise Unsupported(f"weight_quantize_algo is one of {', '.join(formats)}")
    if algorithm is None or (algorithm == "fp8_linear" and not _ernie_lora(o)):
        return ernie_precision(o) if algorithm else {}
    return {"quant.format": formats[algorithm]}


def ernie_sharding(o: Options) -> Settings:
    """Replicas take the devices that sharding leaves."""
    degree = o.get("sharding_parallel_degree")
    if degree is None or degree == -1:
        return {"mesh.fsdp": -1}
    return {"mesh.fsdp": max(degree, 1), "mesh.data": -1}


def ernie_remat(o: Options) -> Settings:
    """The rematerialisation policy, or none."""
    policies = {"full": "block", "full_attn": "attention+qkv", "core_attn": "dots"}
    if o["recompute_granularity"] not in policies:
        raise Unsupported(f"recompute_granularity is one of {', '.join(policies)}")
    return {"memory.remat": policies[o["recompute_granularity"]] if o["recompute"] else "none"}


def ernie_offload(o: Options) -> Settings:
    """Two switches for one option; offloading here is always layer by layer, like their tensorwise variant."""
    return {"memory.offload_optimizer": bool(o["offload_optim"] or o["tensorwise_offload_optimizer"])}


def ernie_save(o: Options) -> Settings:
    """Checkpoints by steps, by epochs, or never."""
    return saves_of(o["save_strategy"], o.get("save_steps", 0))


CONVERSIONS = conversions_of(vars(), "ernie")
