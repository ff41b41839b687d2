"""Options of TRL that are translated together (see `conversions`)."""

from collections.abc import Mapping
from pathlib import Path

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, conversions_of, lines_of

# Options that only files of `trl dpo` have.
_OF_DPO = (
    *("beta", "label_smoothing", "precompute_ref_log_probs", "sync_ref_model", "ref_model_sync_steps"),
    *("ref_model_mixup_alpha", "disable_dropout", "rpo_alpha", "max_prompt_length"),
)
_OF_SFT = (None, "nll", "chunked_nll")
_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard")
_LOSSES += ("apo_zero", "apo_down")


def _loss(o: Options) -> str | None:
    loss = o.get("loss_type")
    if isinstance(loss, list) and len(loss) != 1:
        raise Unsupported("a sum of several losses")
    return loss[0] if isinstance(loss, list) else loss


def _dpo(o: Options) -> bool:
    return any(o.get(name) is not None for name in _OF_DPO) or _loss(o) in _LOSSES


def trl_objective(o: Options) -> Settings:
    """The objective: a preference loss if the file has an option of DPO, else next tokens."""
    loss = _loss(o)
    if not _dpo(o):
        if loss not in _OF_SFT:
            raise Unsupported(f"loss_type must be nll or chunked_nll, or for DPO one of {', '.join(_LOSSES)}")
        return {}
    loss = loss or "sigmoid"
    if loss not in _LOSSES:
        raise Unsupported(f"for DPO, loss_type must be one of {', '.join(_LOSSES)}")
    settings: Settings = {"preference.loss": loss, "preference.beta": o.get("beta", 0.1)}
    if loss in ("sigmoid", "sigmoid_norm", "robust", "exo_pair"):
        settings["preference.label_smoothing"] = o.get("label_smoothing", 0.0)
    if o.get("precompute_ref_log_probs"):
        settings["preference.precompute_reference"] = True
    if o.get("sync_ref_model"):
        if o.get("ref_model_mixup_alpha", 0.6) != 1:
            raise Unsupported(
                "mixing the model into the reference; set ref_model_mixup_alpha: 1.0 to replace the reference"
            )
        settings["preference.reference_update_steps"] = o.get("ref_model_sync_steps", 512)
    return settings | ({"preference.sft_weight": o["rpo_alpha"]} if o.get("rpo_alpha") else {})


def trl_rate(o: Options) -> Settings:
    """The learning rate, whose default depends on the trainer."""
    rate = o.get("learning_rate")
    return {"optim.learning_rate": (1e-6 if _dpo(o) else 2e-5) if rate is None else rate}


def trl_dtype(o: Options) -> Settings:
    """The dtypes of the loaded weights and of the master weights."""
    dtype = o.get("torch_dtype") or o["dtype"]
    if dtype == "auto":
        return {}
    if dtype not in ("float32", "bfloat16", "float16"):
        raise Unsupported("dtype must be auto, float32, bfloat16 or float16")
    master = {} if o["use_peft"] else {"precision.master_dtype": "bfloat16" if dtype == "bfloat16" else "float32"}
    return {"model.dtype": dtype} | master


def trl_precision(o: Options) -> Settings:
    """The precision: bf16, unless fp16 is true or bf16 is false."""
    if o["fp16"]:
        return {"precision.recipe": "fp16"}
    return {"precision.recipe": "fp32" if o.get("bf16") is False else "bf16"}


def trl_dropout(o: Options) -> Settings:
    """Dropout of adapters; DPO has none, because it compares with a reference."""
    if _dpo(o) and not o.get("disable_dropout", True) and o["use_peft"] and o["lora_dropout"]:
        raise Unsupported("dropout when the model is compared with a reference; set lora_dropout: 0")
    return {"lora.dropout": 0.0 if _dpo(o) else o["lora_dropout"]}


def trl_log(o: Options) -> Settings:
    """Progress lines by steps, or none."""
    return lines_of(o["logging_strategy"], o["logging_steps"])


def trl_targets(o: Options) -> Settings:
    """Target modules; if unset, peft's default for most families."""
    names = o.get("lora_target_modules") or ["q_proj", "v_proj"]
    return {"lora.target_modules": "all-linear" if names in ("all-linear", ["all-linear"]) else names}


def trl_quant(o: Options) -> Settings:
    """The quantization format of the base weights."""
    if o["load_in_8bit"]:
        return {"quant.format": "int8"}
    if not o["load_in_4bit"]:
        return {}
    if o["bnb_4bit_quant_type"] not in ("nf4", "fp4"):
        raise Unsupported("bnb_4bit_quant_type must be nf4 or fp4")
    return {"quant.format": o["bnb_4bit_quant_type"]}


def trl_data(o: Options) -> Settings:
    """One dataset by name, with its test split if the file enables evaluations."""
    if not o.get("dataset_name"):
        return {}
    entry: Settings = {"path": o["dataset_name"]} | ({"type": "preference"} if _dpo(o) else {})
    entry |= {"subset": o["dataset_config"]} if o.get("dataset_config") else {}
    settings: Settings = {"data.datasets": [entry | {"split": o["dataset_train_split"]}]}
    if _strategy(o) != "no":
        settings["data.eval_datasets"] = [entry | {"split": o["dataset_test_split"]}]
    return settings


def trl_length(o: Options) -> Settings:
    """Row length; longer documents are cut, except in DPO, which leaves them out."""
    modes = {"keep_start": "right", "keep_end": "left"}
    if o["truncation_mode"] not in modes:
        raise Unsupported("truncation_mode must be keep_start or keep_end")
    split = o["packing"] and o["packing_strategy"] in ("bfd_split", "wrapped")
    cut = {} if _dpo(o) or split else {"data.truncation": modes[o["truncation_mode"]]}
    return cut if "max_seq_length" in o else {"data.seq_len": o["max_length"], **cut}


def trl_packing(o: Options) -> Settings:
    """The packing method; bfd_split and wrapped continue a document that does not fit in the next row."""
    methods = {"bfd": "best_fit", "bfd_split": "best_fit", "wrapped": "sequential"}
    if not o["packing"]:
        return {}
    if o["packing_strategy"] not in methods:
        raise Unsupported(f"packing_strategy must be one of {', '.join(methods)}")
    split = {"data.truncation": "split"} if o["packing_strategy"] != "bfd" else {}
    return {"data.packing_method": methods[o["packing_strategy"]]} | split


def trl_trained(o: Options) -> Settings:
    """The loss mask: all of a conversation, unless an option restricts it to answers."""
    only_answers = o["assistant_only_loss"] or o.get("completion_only_loss") or _dpo(o)
    return {} if only_answers else {"chat.loss_scale": "all"}


def trl_order(o: Options) -> Settings:
    """The data order: random, as stored, or grouped by length."""
    orders: dict[str, Settings] = {
        "random": {},
        "sequential": {"data.shuffle": False},
        "group_by_length": {"data.group_by_length": True},
    }
    if o["train_sampling_strategy"] not in orders:
        raise Unsupported(f"train_sampling_strategy must be one of {', '.join(orders)}")
    return orders[o["train_sampling_strategy"]]


def trl_seeds(o: Options) -> Settings:
    """The seeds of dropout and weights, and of the data order, which is the same unless data_seed is set."""
    order = o.get("data_seed")
    return {"train.seed": o["seed"], "data.seed": o["seed"] if order is None else order}


def trl_schedule(o: Options) -> Settings:
    """The schedule and its arguments."""
    schedule, given = o["lr_scheduler_type"], dict(o.get("lr_scheduler_kwargs") or {})
    named = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
    name = named.get(schedule, schedule)
    schedules = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "inverse_sqrt", "wsd")
    if name not in schedules or schedule == "wsd":
        raise Unsupported(f"the schedules are {', '.join((*schedules[:-1], *named))}")
    keys = {
        "min_lr": "optim.min_lr",
        "min_lr_rate": "optim.final_lr_fraction",
        "lr_end": "optim.min_lr",
        "num_cycles": "optim.cycles",
        "power": "optim.power",
        "num_decay_steps": "optim.cooldown_steps",
        "min_lr_ratio": "optim.final_lr_fraction",
    }
    if unknown := given.keys() - keys.keys():
        raise Unsupported(f"lr_scheduler_kwargs {', '.join(sorted(unknown))}; supported are {', '.join(keys)}")
    # transformers' polynomial schedule ends at lr_end = 1e-7 by default.
    if name == "polynomial":
        given = {"lr_end": 1e-7} | given
    return {"optim.schedule": name} | {keys[argument]: value for argument, value in given.items()}


def trl_warmup(o: Options) -> Settings:
    """Warm-up steps; a value below 1 is a fraction of all steps, which older files set as warmup_ratio."""
    steps, ratio = o["warmup_steps"], o.get("warmup_ratio") or 0.0
    if 0 < steps < 1:
        return {"optim.warmup_ratio": steps}
    return {"optim.warmup_steps": int(steps)} if steps else {"optim.warmup_ratio": ratio}


OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
    "adafactor": "adafactor",
    "sgd": "sgd",
    "schedule_free_adamw": "schedule_free",
}


def trl_optimizer(o: Options) -> Settings:
    """The optimizer, by transformers' name."""
    if o["optim"] not in OPTIMIZERS:
        raise Unsupported(f"the optimizers are {', '.join(OPTIMIZERS)}")
    return {"optim.name": OPTIMIZERS[o["optim"]]}


def trl_beta1(o: Options) -> Settings:
    """The first moment's decay; torch's SGD has no momentum."""
    return {"optim.beta1": 0.0 if o["optim"] == "sgd" else o["adam_beta1"]}


def trl_remat(o: Options) -> Settings:
    """The rematerialisation policy, or offloading."""
    if o["activation_offloading"]:
        return {"memory.remat": "offload"}
    newer = o.get("activation_checkpointing")
    return {"memory.remat": "block" if (o["gradient_checkpointing"] if newer is None else newer) else "none"}


def trl_devices(o: Options) -> Settings:
    """Sharding by FSDP or DeepSpeed, else a replica on every device."""
    if o.get("deepspeed"):
        return zero_of(o["deepspeed"])
    # `fsdp` may be a word, words in one text ("full_shard auto_wrap"), or a list of words.
    words = str(o.get("fsdp") or "").replace("[", " ").replace("]", " ").replace("'", " ").replace(",", " ").split()
    if not words or words[0] in ("False", "no_shard"):
        return {"mesh.fsdp": 1, "mesh.data": -1}
    return {"mesh.fsdp": -1, "parallel.zero": 2 if "shard_grad_op" in words else 3}


def zero_of(config: object) -> Settings:
    """Translate the ZeRO options of a DeepSpeed config."""
    stage = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(stage, Mapping) or stage.get("stage", 0) not in (1, 2, 3):
        raise Unsupported(
            "a DeepSpeed file, or a config without ZeRO 1, 2 or 3; write its zero_optimization: {stage: 3} here"
        )
    settings: Settings = {"mesh.fsdp": -1, "parallel.zero": stage["stage"]}
    places = {"offload_optimizer": "memory.offload_optimizer", "offload_param": "memory.offload_master"}
    for name, key in places.items():
        if isinstance(stage.get(name), Mapping) and stage[name].get("device", "none") != "none":
            settings[key] = True
    return settings


def _strategy(o: Options) -> str:
    return str(o.get("evaluation_strategy") or o["eval_strategy"])


def trl_eval(o: Options) -> Settings:
    """Evaluation by steps or epochs."""
    strategy = _strategy(o)
    if strategy not in ("no", "steps", "epoch"):
        raise Unsupported("eval_strategy must be no, steps or epoch")
    if strategy == "steps":
        return {"eval.steps": _steps("eval_steps", o.get("eval_steps") or o["logging_steps"])}
    return {"eval.epochs": 1.0} if strategy == "epoch" else {}


def trl_save(o: Options) -> Settings:
    """Checkpoints by steps or epochs, or only the best one."""
    strategy = o["save_strategy"]
    if strategy == "steps":
        return {"ckpt.save_steps": _steps("save_steps", o["save_steps"])}
    more: dict[str, Settings] = {
        "no": {"ckpt.at_end": False},
        "epoch": {"ckpt.save_epochs": 1.0},
        "best": {"ckpt.keep_best": True},
    }
    if strategy not in more:
        raise Unsupported("save_strategy must be no, steps, epoch or best")
    return {"ckpt.save_steps": 0} | more[strategy]


def trl_metric(o: Options) -> Settings:
    """The metric that ranks evaluations, with or without the prefix eval_."""
    name = o.get("metric_for_best_model")
    return {} if name is None else {"eval.best_metric": f"eval_{str(name).removeprefix('eval_')}"}


def trl_resume(o: Options) -> Settings:
    """Whether to resume, or the path of a run to start from if this one has no checkpoint."""
    place = o.get("resume_from_checkpoint")
    if isinstance(place, str):
        return {"ckpt.start": place}
    return {} if place is None else {"ckpt.resume": "auto" if place else "never"}


def trl_hub(o: Options) -> Settings:
    """The hub repository of the export; without a name, it is named after the output folder."""
    if not o["push_to_hub"]:
        return {}
    name = o.get("hub_model_id") or Path(o.get("output_dir") or "trainer_output").absolute().name
    return {"export.push_to_hub": name, "export.private": bool(o.get("hub_private_repo"))}


def _steps(name: str, steps: float) -> int:
    if steps != int(steps):
        raise Unsupported(f"{name} as a fraction of all steps; set a number of steps")
    return int(steps)


CONVERSIONS = conversions_of(vars(), "trl")
