"""Training options of TRL that are translated together (see `conversions`); its data are in `trl_data`."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.config.foreign.conversions import (
    NOTE,
    Options,
    Settings,
    Unsupported,
    conversions_of,
    lines_of,
    names_of,
    word_of,
)

# Options that identify the trainer of a file, because its command (`trl grpo`, `trl dpo`) is not in it.
_OF_GRPO = (
    *("reward_funcs", "reward_weights", "num_generations", "num_iterations", "epsilon", "epsilon_high", "use_vllm"),
    *("scale_rewards", "mask_truncated_completions", "importance_sampling_level", "steps_per_generation"),
)
_OF_GKD = ("teacher_model_name_or_path", "lmbda", "seq_kd")
_OF_KTO = ("desirable_weight", "undesirable_weight")
_OF_DPO = (
    *("beta", "label_smoothing", "precompute_ref_log_probs", "sync_ref_model", "ref_model_sync_steps"),
    *("ref_model_mixup_alpha", "disable_dropout", "rpo_alpha", "max_prompt_length", "simpo_gamma", "cpo_alpha"),
)
_OF_SFT = (None, "nll", "chunked_nll", "dft")
_GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard")
LOSSES += ("apo_zero", "apo_down")
# Names that the scripts of open-r1 and TRL give to their reward functions (open_r1/rewards.py, trl/scripts/grpo.py).
_REWARDS = {
    **{name: f"trl.rewards:{name}" for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")},
    **{name: f"open_r1.rewards:{name}_reward" for name in ("accuracy", "format", "reasoning_steps", "tag_count")},
    "length": "open_r1.rewards:len_reward",
}


def _loss(o: Options) -> str | None:
    loss = o.get("loss_type")
    if isinstance(loss, list) and len(loss) != 1:
        raise Unsupported("a sum of several losses")
    return loss[0] if isinstance(loss, list) else loss


def trainer_of(o: Options) -> str:
    """Return the trainer that a file is for, by its options: grpo, gkd, reward, kto, dpo or sft."""
    has_one = {
        trainer: any(o.get(name) is not None for name in names)
        for trainer, names in (("grpo", _OF_GRPO), ("gkd", _OF_GKD), ("kto", _OF_KTO), ("dpo", _OF_DPO))
    }
    loss = _loss(o)
    if has_one["grpo"] or loss in _GRPO_LOSSES:
        return "grpo"
    if has_one["gkd"]:
        return "gkd"
    if o["lora_task_type"] == "SEQ_CLS" or o.get("center_rewards_coefficient") is not None:
        return "reward"
    if has_one["kto"] or loss == "kto":
        return "kto"
    return "dpo" if has_one["dpo"] or loss in (*LOSSES, "simpo") else "sft"


def trl_objective(o: Options) -> Settings:
    """The objective of the file's trainer."""
    loss, trainer = _loss(o), trainer_of(o)
    if trainer == "sft":
        if loss not in _OF_SFT:
            raise Unsupported(f"loss_type must be nll, chunked_nll or dft, or for DPO one of {', '.join(LOSSES)}")
        return {"train.loss": "dft"} if loss == "dft" else {}
    if trainer == "grpo":
        return _grpo(o)
    if trainer == "gkd":
        return _gkd(o)
    if trainer == "reward":
        if o.get("center_rewards_coefficient"):
            raise Unsupported("centred rewards; remove center_rewards_coefficient")
        return {"preference.loss": "bradley_terry", "model.head": "classification", "model.num_labels": 1}
    if trainer == "kto":
        if loss not in (None, "kto"):
            raise Unsupported("for KTO, loss_type must be kto")
        weights = {f"preference.{name}": o[name] for name in _OF_KTO if o.get(name) is not None}
        return {"preference.loss": "kto", "preference.beta": o.get("beta", 0.1)} | weights | _reference(o)
    if loss == "simpo":  # of CPOTrainer, whose cpo_alpha is 1 by default
        own: Settings = {"preference.simpo_gamma": o.get("simpo_gamma", 0.5)}
        return (
            {"preference.loss": loss, "preference.beta": o.get("beta", 0.1)}
            | own
            | {"preference.sft_weight": o.get("cpo_alpha", 1.0)}
        )
    loss = loss or "sigmoid"
    if loss not in LOSSES:
        raise Unsupported(f"for DPO, loss_type must be one of {', '.join(LOSSES)}")
    settings: Settings = {"preference.loss": loss, "preference.beta": o.get("beta", 0.1)}
    if loss in ("sigmoid", "sigmoid_norm", "robust", "exo_pair"):
        settings["preference.label_smoothing"] = o.get("label_smoothing", 0.0)
    settings |= _reference(o)
    return settings | ({"preference.sft_weight": o["rpo_alpha"]} if o.get("rpo_alpha") else {})


def _reference(o: Options) -> Settings:
    settings: Settings = {"preference.precompute_reference": True} if o.get("precompute_ref_log_probs") else {}
    if o.get("sync_ref_model"):
        if o.get("ref_model_mixup_alpha", 0.6) != 1:
            raise Unsupported(
                "mixing the model into the reference; set ref_model_mixup_alpha: 1.0 to replace the reference"
            )
        settings["preference.reference_update_steps"] = o.get("ref_model_sync_steps", 512)
    return settings


def _grpo(o: Options) -> Settings:
    """Return the settings of GRPO (trl/trainer/grpo_config.py)."""
    if not o.get("reward_funcs"):
        raise Unsupported("GRPO without reward_funcs; name functions of yours: [my_rewards.NAME]")
    functions = [_reward(str(name)) for name in names_of(o["reward_funcs"])]
    weights = o.get("reward_weights")
    if weights is not None and len(weights) != len(functions):
        raise Unsupported(f"{len(weights)} reward_weights for {len(functions)} reward_funcs")
    names = (function.rpartition(":")[2] for function in functions)
    scales = {"true": "group", "false": "none"}
    scale = str(o.get("scale_rewards", "group")).lower()
    losses = ("grpo", "dr_grpo", "dapo", "cispo", "sapo")
    levels = {"loss_type": losses, "importance_sampling_level": ("token", "sequence")}
    loss, level = _loss(o) or "dapo", o.get("importance_sampling_level", "token")
    for option, value in (("loss_type", loss), ("importance_sampling_level", level)):
        if value not in levels[option]:
            raise Unsupported(f"for GRPO, {option} must be one of {', '.join(levels[option])}")
    steps, generated = o.get("steps_per_generation"), o.get("gradient_accumulation_steps")
    if steps is not None and steps != generated:
        raise Unsupported("completions that serve several optimizer steps; remove steps_per_generation")
    if o.get("sync_ref_model"):
        raise Unsupported("a reference that is updated; remove sync_ref_model")
    highest = o.get("epsilon_high") or 0.0
    if loss == "cispo" and highest < 1:
        raise Unsupported("for cispo, epsilon_high is the largest ratio itself; write a value above 1, such as 5.0")
    settings: Settings = {
        "rollout.rewards": functions,
        "rollout.group_size": o.get("num_generations", 8),
        "rollout.max_new_tokens": o.get("max_completion_length", 512),
        "rollout.top_k": o.get("top_k") or None,
        "grpo.loss": loss,
        "grpo.importance": level,
        "grpo.advantage_scale": scales.get(scale, scale),
        "grpo.beta": o.get("beta", 0.0),
    }
    iterates = o.get("num_iterations", 1) > 1
    if o.get("off_policy_mask_threshold") is not None and not iterates:
        settings[NOTE] = "off_policy_mask_threshold has no effect with one iteration on the run's own completions"
    if o.get("multi_objective_aggregation") == "normalize_then_sum":
        settings["grpo.advantage_scale"] = "gdpo"
    if o.get("beta"):
        settings["grpo.kl_ratio"] = o.get("use_bias_correction_kl") is not False
    if weights is not None:
        settings["rollout.reward_weights"] = [f"{name}={weight}" for name, weight in zip(names, weights, strict=True)]
    keys = {
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "min_p": "rollout.min_p",
        "repetition_penalty": "rollout.repetition_penalty",
        "num_iterations": "grpo.iterations",
        "mask_truncated_completions": "grpo.mask_truncated",
        **({"off_policy_mask_threshold": "grpo.off_policy_kl"} if iterates else {}),
    }
    if loss == "sapo":
        keys |= {"sapo_temperature_pos": "grpo.sapo_positive", "sapo_temperature_neg": "grpo.sapo_negative"}
    elif loss == "cispo":
        settings["grpo.clip_high"] = highest - 1
    else:
        keys |= {"epsilon": "grpo.clip_low", "epsilon_high": "grpo.clip_high", "delta": "grpo.clip_largest"}
    return settings | {key: o[name] for name, key in keys.items() if o.get(name) is not None}


def _reward(name: str) -> str:
    """Return the reward function of a name, as MODULE:NAME; its module must be installed."""
    if name in _REWARDS:
        return _REWARDS[name]
    module, dot, function = name.rpartition(".")
    if not dot:
        raise Unsupported(
            f"the reward function {name!r}, which has settings in open-r1 or is unknown; write it in a file "
            f"my_rewards.py and name it my_rewards.{name}"
        )
    return f"{module}:{function}"


def _gkd(o: Options) -> Settings:
    """Return the settings of distillation (trl/experimental/gkd/gkd_config.py).

    The trainer's temperature is only the one of sampling: its loss leaves the logits undivided.
    """
    own_answers = o.get("lmbda", 0.5)
    if o.get("seq_kd") and own_answers < 1:
        raise Unsupported("distillation on answers that the teacher writes; write lmbda: 1.0, or seq_kd: false")
    if not o.get("teacher_model_name_or_path"):
        raise Unsupported("distillation without teacher_model_name_or_path")
    beta = o.get("beta", 0.5)
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "js")
    settings: Settings = {
        "distill.teacher": o["teacher_model_name_or_path"],
        "distill.divergence": divergence,
        "distill.own_answers": own_answers,
    }
    if own_answers:
        settings["rollout.max_new_tokens"] = o.get("max_new_tokens", 128)
        settings["rollout.temperature"] = o.get("temperature", 0.9)
    elif o.get("temperature") is not None:
        settings[NOTE] = (
            "temperature has no effect: GKD samples no answers with lmbda: 0.0, and its loss does not read it"
        )
    return settings | ({"distill.js_beta": beta} if divergence == "js" else {})


_RATES = {"sft": 2e-5, "gkd": 2e-5, "reward": 1e-4}


def trl_rate(o: Options) -> Settings:
    """The learning rate, whose default depends on the trainer."""
    rate = o.get("learning_rate")
    return {"optim.learning_rate": _RATES.get(trainer_of(o), 1e-6) if rate is None else rate}


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
    """Dropout of adapters; most trainers other than SFT disable it, and comparing with a reference needs that."""
    trainer = trainer_of(o)
    disabled = o.get("disable_dropout", trainer not in ("sft", "grpo"))
    if trainer in ("dpo", "kto") and not disabled and o["use_peft"] and o["lora_dropout"]:
        raise Unsupported("dropout when the model is compared with a reference; set lora_dropout: 0")
    return {"lora.dropout": 0.0 if disabled else o["lora_dropout"]}


def trl_log(o: Options) -> Settings:
    """Progress lines by steps, or none."""
    return lines_of(o["logging_strategy"], o["logging_steps"])


def trl_targets(o: Options) -> Settings:
    """Target modules; if unset, peft's default for most families."""
    names, parameters = o.get("lora_target_modules"), names_of(o.get("lora_target_parameters"))
    if names in ("all-linear", ["all-linear"]):
        return {"lora.target_modules": "all-linear"}
    return {"lora.target_modules": targets_of(names or ([] if parameters else ["q_proj", "v_proj"]), parameters)}


def targets_of(names: Any, parameters: Sequence[str]) -> Any:
    """Return lora.target_modules for peft's target_modules and target_parameters.

    peft matches a text as a regex with whole names, and target parameters are tensors that hold all experts. Files in
    which each expert has modules of its own have other names for the same weights.
    """
    if isinstance(names, str):
        # A text-only model has no prefix such as model.language_model.
        inner = names[names.find("layers") :] if "layers" in names else names
        pattern = f"(?:{inner if _is_regex(inner) else names})$"
    else:
        pattern = "|".join(rf"(^|\.){re.escape(name)}$" for name in names_of(names))
    if not parameters:
        return pattern if isinstance(names, str) else names
    modules = {"gate_up_proj": "gate_up_proj|gate_proj|up_proj|w1|w3", "down_proj": "down_proj|w2"}
    experts = []
    for parameter in parameters:
        parent, _, tensor = parameter.rpartition(".")
        if tensor not in modules:
            raise Unsupported(f"lora_target_parameters {parameter}; supported are {', '.join(modules)} of experts")
        parent = re.escape(parent.removesuffix(".weight") or "experts")
        experts.append(rf"(^|\.){parent}(\.\d+)?\.({modules[tensor]})$")
    return "|".join([pattern, *experts] if pattern else experts)


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def trl_quant(o: Options) -> Settings:
    """The quantization format of the base weights."""
    if o["load_in_8bit"]:
        return {"quant.format": "int8"}
    if not o["load_in_4bit"]:
        return {}
    if o["bnb_4bit_quant_type"] not in ("nf4", "fp4"):
        raise Unsupported("bnb_4bit_quant_type must be nf4 or fp4")
    return {"quant.format": o["bnb_4bit_quant_type"]}


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
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    # torchao's state has 8 bits in blocks too, of 256 instead of 64 elements.
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), "adamw_8bit"),
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


def trl_decay(o: Options) -> Settings:
    """Weight decay, which transformers' Trainer applies to all but norms and biases."""
    return decay_of(o["weight_decay"], adapters=o["use_peft"])


def decay_of(decay: float, adapters: bool) -> Settings:
    """Return the weight decay of transformers' Trainer, by its get_decay_parameter_names; adapters all decay."""
    return {"optim.weight_decay": decay} | ({"optim.no_decay": "norm|bias"} if decay and not adapters else {})


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
        return zero_of(o["deepspeed"], o["use_peft"])
    # `fsdp` may be a word, words in one text ("full_shard auto_wrap"), or a list of words.
    words = str(o.get("fsdp") or "").replace("[", " ").replace("]", " ").replace("'", " ").replace(",", " ").split()
    if not words or words[0] in ("False", "no_shard"):
        return {"mesh.fsdp": 1, "mesh.data": -1}
    return {"mesh.fsdp": -1, "parallel.zero": 2 if "shard_grad_op" in words else 3}


def offload_of(adapters: bool, quantized: bool = False) -> Settings:
    """Return the settings of FSDP's offload to the host: optimizer state, and trained or quantized weights."""
    weights: Settings = {"memory.offload_quants": True} if quantized else {}
    return {"memory.offload_optimizer": True} | (weights if adapters else {"memory.offload_master": True})


def zero_of(config: object, adapters: bool = False) -> Settings:
    """Translate the ZeRO options of a DeepSpeed config; `adapters`: whether only adapters are trained."""
    stage = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(stage, Mapping) or stage.get("stage", 0) not in (1, 2, 3):
        raise Unsupported(
            "a DeepSpeed file, or a config without ZeRO 1, 2 or 3; write its zero_optimization: {stage: 3} here"
        )
    settings: Settings = {"mesh.fsdp": -1, "parallel.zero": stage["stage"]}
    places = {"offload_optimizer": "memory.offload_optimizer", "offload_param": "memory.offload_master"}
    for name, key in places.items():
        trained = key == "memory.offload_optimizer" or not adapters
        if trained and isinstance(stage.get(name), Mapping) and stage[name].get("device", "none") != "none":
            settings[key] = True
    return settings


def evaluation_of(o: Options) -> str:
    """Return the strategy of evaluations; older files name it evaluation_strategy."""
    return word_of(o.get("evaluation_strategy", o["eval_strategy"]))


def trl_eval(o: Options) -> Settings:
    """Evaluation by steps or epochs."""
    strategy = evaluation_of(o)
    if strategy not in ("no", "steps", "epoch"):
        raise Unsupported("eval_strategy must be no, steps or epoch")
    if strategy == "steps":
        every = o.get("eval_steps") or o["logging_steps"]
        steps, epochs = steps_or_epochs(every, o["max_steps"], o["num_train_epochs"])
        return {"eval.steps": steps} | ({} if epochs is None else {"eval.epochs": epochs})
    return {"eval.epochs": 1.0} if strategy == "epoch" else {}


def trl_save(o: Options) -> Settings:
    """Checkpoints by steps or epochs, or only the best one."""
    strategy = word_of(o["save_strategy"])
    if strategy == "steps":
        steps, epochs = steps_or_epochs(o["save_steps"], o["max_steps"], o["num_train_epochs"])
        return {"ckpt.save_steps": steps} | ({} if epochs is None else {"ckpt.save_epochs": epochs})
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


def steps_or_epochs(steps: float, max_steps: int | None, epochs: float) -> tuple[int, float | None]:
    """Return a number of steps, or of epochs if the number is a fraction of all steps, whose number is not known."""
    if steps >= 1 and steps != int(steps):
        raise Unsupported("a number of steps must be whole, or a fraction of all steps below 1")
    if not 0 < steps < 1:
        return int(steps), None
    if max_steps is not None and max_steps > 0:
        return math.ceil(steps * max_steps), None
    return 0, steps * epochs


CONVERSIONS = conversions_of(vars(), "trl")
