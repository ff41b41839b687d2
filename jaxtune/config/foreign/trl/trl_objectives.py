"""The trainer of a TRL file, which its options tell, and the options of its objective (see `conversions`)."""

from jaxtune.config.foreign.conversions import NOTE, Options, Settings, Unsupported, names_of

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
    scales = {"true": "group", "false": "none"}  # bools of older files
    scale = str(o.get("scale_rewards", "group")).lower()
    losses = ("grpo", "dr_grpo", "dapo", "cispo", "sapo")
    levels = {"loss_type": losses, "importance_sampling_level": ("token", "sequence")}
    loss, level = _loss(o) or "dapo", o.get("importance_sampling_level", "token")
    for option, value in (("loss_type", loss), ("importance_sampling_level", level)):
        if value not in levels[option]:
            raise Unsupported(f"for GRPO, {option} must be one of {', '.join(levels[option])}", option)
    steps, generated = o.get("steps_per_generation"), o.get("gradient_accumulation_steps")
    if steps is not None and steps != generated:
        raise Unsupported("completions that serve several optimizer steps; remove steps_per_generation")
    if o.get("sync_ref_model"):
        raise Unsupported("a reference that is updated; remove sync_ref_model")
    # CISPO cuts the ratio at epsilon_high there, at 1 + clip_high here.
    highest = o.get("epsilon_high") or 0.0
    if loss == "cispo" and highest < 1:
        raise Unsupported("for cispo, epsilon_high is the largest ratio itself; write a value above 1, such as 5.0")
    settings: Settings = {
        "rollout.rewards": functions,
        "rollout.group_size": o.get("num_generations", 8),
        "rollout.max_new_tokens": o.get("max_completion_length", 512),
        "rollout.top_k": o.get("top_k") or None,  # 0 there: no limit
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
        "top_entropy_quantile": "grpo.entropy_share",
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
    # The ends of the generalised Jensen-Shannon divergence, which is 0 there if taken literally.
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
