"""Training options of Axolotl that are translated together (see `conversions`); its data are in `axolotl_data`."""

import re
from collections.abc import Mapping
from typing import Any

from jaxtune.config.foreign.conversions import (
    Options,
    Settings,
    Unsupported,
    images_of,
    model_overrides,
    names_of,
    word_of,
)
from jaxtune.config.foreign.trl import (
    OPTIMIZERS,
    decay_of,
    offload_of,
    steps_or_epochs,
    targets_of,
    trl_schedule,
    zero_of,
)
from jaxtune.config.foreign.trl.trl_objectives import LOSSES


def axolotl_adapter(o: Options) -> Settings:
    """The adapter, lora or qlora, and the format of its base weights, 4-bit for qlora.

    Axolotl refuses the same combinations (validate_adapter and validate_qlora in src/axolotl/utils/schemas/peft.py).
    """
    adapter = o.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise Unsupported("adapter must be lora or qlora")
    settings: Settings = {"lora.enabled": adapter is not None}
    if adapter is None:
        for name in ("load_in_8bit", "load_in_4bit"):
            if o[name]:
                raise Unsupported(f"{name} without an adapter; write adapter: lora, or {name}: false")
        return settings
    if adapter == "qlora" and o["load_in_8bit"]:
        raise Unsupported("load_in_8bit with adapter: qlora, whose weights have 4 bits; write adapter: lora")
    if o["load_in_8bit"]:
        return settings | {"quant.format": "int8"}
    if adapter != "qlora" and not o["load_in_4bit"]:
        return settings
    given = dict(o.get("bnb_config_kwargs") or {})
    kind, double = given.get("bnb_4bit_quant_type", "nf4"), given.get("bnb_4bit_use_double_quant", True)
    if kind not in ("nf4", "fp4"):
        raise Unsupported("bnb_4bit_quant_type must be nf4 or fp4", "bnb_config_kwargs")
    return settings | {"quant.format": kind} | ({} if double else {"quant.double_quant": False})


def axolotl_targets(o: Options) -> Settings:
    """Target modules, or all linear layers; if unset, peft's default for most families."""
    if o.get("adapter") is None:
        return {}
    names, parameters = o.get("lora_target_modules"), names_of(o.get("lora_target_parameters"))
    if o.get("lora_target_linear") or names in ("all-linear", ["all-linear"]):
        return {"lora.target_modules": "all-linear"}
    if not names and not parameters:
        names = ["q_proj", "v_proj"]  # as peft has for Llama, Mistral and Qwen2
    return {"lora.target_modules": targets_of(names, parameters)}


def axolotl_frozen(o: Options) -> Settings:
    """Frozen parameters: all that no pattern of trained parameters matches.

    A pattern is matched from the beginning of a name, and its dots are literal (axolotl/utils/freeze.py).
    """
    patterns = names_of(o.get("unfrozen_parameters"))
    if not patterns or o.get("adapter"):
        return {}
    for pattern in patterns:
        if re.search(r"\[\d*(:\d*)?\]$", pattern):
            raise Unsupported(f"training a range of rows ({pattern}); train the whole parameter or none of it")
    literal = (re.sub(r"(?<!\\)\.(?![+])", r"\\.", pattern) for pattern in patterns)  # `.+` and `\.` stay
    return {"train.freeze": f"^(?!{'|'.join(f'(?:{pattern})' for pattern in literal)})"}


def axolotl_dropout(o: Options) -> Settings:
    """Dropout of adapters; TRL's trainers, which Axolotl uses for preferences, disable it."""
    return {"lora.dropout": 0.0 if o.get("rl") else o["lora_dropout"]}


def axolotl_images(o: Options) -> Settings:
    """Images, with a processor_type; image_size, the side of a square or (width, height), limits their pixels."""
    size = o["image_size"]
    if o["processor_type"] is None:
        return {}
    sides = [size, size] if isinstance(size, int) else size
    if size is not None and not (isinstance(sides, list) and len(sides) == 2 and all(type(n) is int for n in sides)):
        raise Unsupported("image_size is a number or [width, height]", "image_size")
    return images_of(o["sequence_len"]) | {"vision.max_pixels": None if size is None else sides[0] * sides[1]}


def axolotl_overrides(o: Options) -> Settings:
    """Overridden entries of config.json."""
    return model_overrides({**(o.get("overrides_of_model_config") or {}), **(o.get("model_config") or {})})


def axolotl_kwargs(o: Options) -> Settings:
    """Arguments of transformers' from_pretrained; those about its cache, attention and dtype are unnecessary here."""
    given = {**(o.get("overrides_of_model_kwargs") or {}), **(o.get("model_kwargs") or {})}
    unnecessary = ("use_cache", "attn_implementation", "torch_dtype", "dtype", "low_cpu_mem_usage", "device_map")
    if others := given.keys() - {*unnecessary}:
        raise Unsupported(f"the model argument {min(others)}; model.overrides overrides entries of config.json")
    return {}


# Plugins that change only speed, logs or what runs after the training.
_UNNEEDED = (
    *("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "ExpertParallelPlugin", "ContextParallelPlugin"),
    *("SwanLabPlugin", "LMEvalPlugin"),
)


def axolotl_plugins(o: Options) -> Settings:
    """Plugins; those for kernels, parallelism, logs and evaluations after the training are unnecessary here."""
    others = [name for name in names_of(o.get("plugins")) if not name.endswith(_UNNEEDED)]
    if others:
        raise Unsupported(f"plugins of torch, such as {others[0]}, which may change the training")
    return {}


def axolotl_rates(o: Options) -> Settings:
    """Learning-rate factors of groups, embeddings, and B matrices of adapters."""
    rate, factors = float(o.get("learning_rate") or 0), []
    given = any(o.get(name) for name in ("lr_groups", "embedding_lr"))
    if given and rate <= 0:
        raise Unsupported("learning rates of groups without a learning_rate to which they are relative")
    for group in o.get("lr_groups") or ():
        if not isinstance(group, Mapping) or not {"modules", "lr"} <= group.keys():
            raise Unsupported("a group must be {name: ..., modules: [...], lr: ...}")
        factors.append(f"{'|'.join(group['modules'])}={float(group['lr']) / rate:g}")
    if o.get("embedding_lr"):
        factors.append(f"embed_tokens|lm_head={float(o['embedding_lr']) / rate:g}")
    if o.get("embedding_lr_scale"):
        factors.append(f"embed_tokens|lm_head={o['embedding_lr_scale']:g}")
    settings: Settings = {"optim.lr_multipliers": factors} if factors else {}  # relative to the learning rate
    return settings | ({"lora.lr_ratio": float(o["loraplus_lr_ratio"])} if o.get("loraplus_lr_ratio") else {})


def axolotl_schedule(o: Options) -> Settings:
    """The schedule; for cosine, also its final rate as a fraction of the peak."""
    if o["lr_scheduler"] in ("one_cycle", "rex"):
        raise Unsupported("this schedule; use one of transformers' schedules")
    settings = trl_schedule(
        {"lr_scheduler_type": o["lr_scheduler"], "lr_scheduler_kwargs": o.get("lr_scheduler_kwargs")}
    )
    lowest = o.get("cosine_min_lr_ratio")
    return settings | ({"optim.final_lr_fraction": lowest} if lowest is not None else {})


def axolotl_warmup(o: Options) -> Settings:
    """Warm-up; 3% of all steps if neither option is set."""
    if o.get("warmup_steps") is not None:
        return {"optim.warmup_steps": o["warmup_steps"]}
    return {"optim.warmup_ratio": 0.03 if o.get("warmup_ratio") is None else o["warmup_ratio"]}  # Axolotl's default


def axolotl_optimizer(o: Options) -> Settings:
    """The optimizer, by transformers' name, muon, or optimi's AdamW."""
    named = OPTIMIZERS | {"muon": "muon", "optimi_adamw": "adamw"}
    name = o["optimizer"]
    if name in ("adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_fp8"):
        raise Unsupported("optimizer state in 4 bits or FP8; adamw_torch_8bit needs 8 bits")
    if name not in named:
        raise Unsupported(f"the optimizers are {', '.join(named)}")
    settings: Settings = {"optim.name": named[name]}
    if name == "sgd" and o.get("adam_beta1") is None:
        settings["optim.beta1"] = 0.0
    if name == "optimi_adamw":  # optimi's defaults differ from torch's
        settings |= {"optim.beta2": 0.99} if o.get("adam_beta2") is None else {}
        settings |= {"optim.epsilon": 1e-6} if o.get("adam_epsilon") is None else {}
    return settings


def axolotl_decay(o: Options) -> Settings:
    """Weight decay, of all but norms and biases unless only some parameters are trained."""
    return decay_of(o["weight_decay"], adapters=bool(o.get("adapter") or o.get("unfrozen_parameters")))


def axolotl_precision(o: Options) -> Settings:
    """The precision, and the same dtype for loaded weights; bf16: auto means true, unless fp16 is true.

    See resolve_dtype in src/axolotl/utils/config/__init__.py. With bf16: false and no other option it is float32.
    """
    if o.get("fp8"):
        return {"precision.recipe": "fp8_hybrid", "model.dtype": "bfloat16"}
    if o.get("fp16") or o.get("float16"):
        return {"precision.recipe": "fp16", "model.dtype": "float16"}
    if o.get("float32") or not (o["bf16"] or o.get("bfloat16")):
        return {"precision.recipe": "fp32", "model.dtype": "float32"}
    master = {} if o.get("adapter") else {"precision.master_dtype": "bfloat16"}
    return {"precision.recipe": "bf16", "model.dtype": "bfloat16"} | master


def axolotl_remat(o: Options) -> Settings:
    """The rematerialisation policy, or offloading."""
    kind = o.get("gradient_checkpointing") or False
    if o.get("activation_offloading") or kind in ("offload", "offload_disk", "unsloth"):
        return {"memory.remat": "offload"}
    if kind not in (True, False):
        raise Unsupported("gradient_checkpointing must be true, false, offload, offload_disk or unsloth")
    return {"memory.remat": "block" if kind else "none"}


def axolotl_devices(o: Options) -> Settings:
    """Sharding by FSDP or DeepSpeed, whose file names contain the stage; else a replica on every device."""
    deepspeed = o.get("deepspeed")
    if isinstance(deepspeed, str):
        stages = [stage for stage in (1, 2, 3) if f"zero{stage}" in deepspeed]
        if not stages:
            raise Unsupported("a DeepSpeed file other than deepspeed_configs/zero1.json, zero2.json or zero3.json")
        # zero3_bf16_cpuoffload_params.json and zero3_bf16_cpuoffload_all.json
        offload = {"offload_param": {"device": "cpu"}} if "cpuoffload" in deepspeed else {}
        offload |= {"offload_optimizer": {"device": "cpu"}} if "cpuoffload_all" in deepspeed else {}
        return zero_of({"zero_optimization": {"stage": stages[0]} | offload}, bool(o.get("adapter")))
    if deepspeed:
        return zero_of(deepspeed, bool(o.get("adapter")))
    if o.get("fsdp") or o.get("fsdp_config") or o.get("dp_shard_size"):
        given = o.get("fsdp_config")
        # The options of a section, with or without the prefix of older files.
        config = {str(name).removeprefix("fsdp_"): value for name, value in (given or {}).items()}
        words = {str(config.get("sharding_strategy")).upper(), *(str(word).upper() for word in names_of(o.get("fsdp")))}
        replicas = o.get("dp_replicate_size") or 1
        zero = 2 if "SHARD_GRAD_OP" in words else 3  # FULL_SHARD: weights too
        settings: Settings = {"mesh.fsdp": o.get("dp_shard_size") or -1, "mesh.data": replicas, "parallel.zero": zero}
        if config.get("offload_params") or config.get("cpu_offload") or "OFFLOAD" in words:
            quantized = o.get("adapter") == "qlora" or o["load_in_4bit"] or o["load_in_8bit"]
            settings |= offload_of(bool(o.get("adapter")), bool(quantized))
        return settings
    return {"mesh.fsdp": 1, "mesh.data": -1}


def _when(o: Options, event: str, plural: str) -> tuple[int, float | None]:
    """Return the steps and the epochs between two events, one epoch by default."""
    strategy = word_of(o.get(f"{event}_strategy"))
    steps, often = o.get(f"{event}_steps"), o.get(f"{plural}_per_epoch")
    if strategy not in (None, "no", "epoch", "steps", "best"):
        raise Unsupported(f"{event}_strategy must be no, steps, epoch or best")
    if steps and strategy not in (None, "steps"):  # Axolotl refuses both (check_saves, check_evals)
        raise Unsupported(f"{event}_strategy: {strategy} with {event}_steps; remove one of them, or write steps")
    if often and event == "eval" and strategy not in (None, "steps"):  # check_evals, not check_saves
        raise Unsupported(f"eval_strategy: {strategy} with evals_per_epoch; remove one of them")
    if steps is not None:
        return steps_or_epochs(steps, o.get("max_steps"), o["num_epochs"])
    if often is not None:
        return 0, 1 / often if often > 0 else None  # 4 per epoch: each quarter of an epoch
    return 0, 1.0 if strategy in (None, "epoch") else None


def axolotl_eval(o: Options) -> Settings:
    """Evaluation by steps or epochs."""
    steps, epochs = _when(o, "eval", "evals")
    return {"eval.steps": steps, "eval.epochs": epochs}


def axolotl_save(o: Options) -> Settings:
    """Checkpoints by steps or epochs."""
    steps, epochs = _when(o, "save", "saves")
    more: dict[Any, Settings] = {"best": {"ckpt.keep_best": True}, "no": {"ckpt.at_end": False}}
    return {"ckpt.save_steps": steps, "ckpt.save_epochs": epochs} | more.get(word_of(o.get("save_strategy")), {})


def axolotl_hub(o: Options) -> Settings:
    """The hub repository of the export, always private as in Axolotl."""
    name = o.get("hub_model_id")
    return {"export.push_to_hub": name, "export.private": True} if name else {}


def axolotl_wandb(o: Options) -> Settings:
    """wandb, which a project name enables."""
    project = o.get("wandb_project")
    return {"log.wandb.project": project, "log.wandb.enabled": True} if project else {}


def axolotl_profile(o: Options) -> Settings:
    """A trace of a few steps, by default of the first ones."""
    steps, start = o.get("profiler_steps"), o.get("profiler_steps_start") or 0
    # Steps count from 1 here, from 0 there.
    return {"prof.enabled": True, "prof.start_step": start + 1, "prof.steps": steps} if steps else {}


def axolotl_rl(o: Options) -> Settings:
    """The preference loss, as in TRL's trainers, or a reward model."""
    kind = o.get("rl")
    if o.get("reward_model"):
        return {"preference.loss": "bradley_terry", "model.head": "classification", "model.num_labels": 1}
    if kind is None:
        return {}
    losses = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
    if kind not in losses:
        raise Unsupported(f"rl must be one of {', '.join(losses)}; for GRPO use the options rollout.* and grpo.*")
    given = names_of(o.get("dpo_loss_type"))
    if len(given) > 1 or not set(given) <= {*LOSSES}:
        raise Unsupported(f"dpo_loss_type must be one of {', '.join(LOSSES)}", "dpo_loss_type")
    loss = given[0] if given and kind == "dpo" else losses[kind]
    # rl_beta is the newer name, and ORPO has an option of its own.
    beta = next((o[name] for name in ("rl_beta", "dpo_beta") if o.get(name) is not None), None)
    beta = o["orpo_alpha"] if kind == "orpo" and o.get("orpo_alpha") is not None else beta
    settings: Settings = {"preference.loss": loss, "preference.beta": 0.1 if beta is None else beta}
    of: dict[str, tuple[str, tuple[str, ...]]] = {
        "rpo_alpha": ("preference.sft_weight", ("sigmoid", "ipo")),
        "cpo_alpha": ("preference.sft_weight", ("simpo",)),
        "simpo_gamma": ("preference.simpo_gamma", ("simpo",)),
        "dpo_label_smoothing": ("preference.label_smoothing", ("sigmoid",)),
        "kto_desirable_weight": ("preference.desirable_weight", ("kto",)),
        "kto_undesirable_weight": ("preference.undesirable_weight", ("kto",)),
        "precompute_ref_log_probs": ("preference.precompute_reference", (*LOSSES, "kto")),
    }
    return settings | {key: o[name] for name, (key, losses) in of.items() if o.get(name) is not None and loss in losses}
