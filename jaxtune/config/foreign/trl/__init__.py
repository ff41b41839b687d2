"""Training options of TRL that are translated together (see `conversions`).

Its trainers and their losses are in `trl_objectives`, its data in `trl_data`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, is_file, lines_of, names_of, word_of
from jaxtune.config.foreign.trl.trl_objectives import trainer_of

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
        raise Unsupported("bnb_4bit_quant_type must be nf4 or fp4", "bnb_4bit_quant_type")
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
    settings: Settings = {"mesh.fsdp": -1, "parallel.zero": stage["stage"]}  # over all devices, as in DeepSpeed
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
    """Evaluation by steps or epochs; its data are a split of the training data, or a held-out part of `datasets`.

    TRL's scripts read `dataset[dataset_test_split]` (trl/scripts/sft.py).
    """
    strategy = evaluation_of(o)
    if strategy not in ("no", "steps", "epoch"):
        raise Unsupported("eval_strategy must be no, steps or epoch")
    name = None if o.get("datasets") else o.get("dataset_name")  # ignored with datasets
    paths = (name, *(o.get("dataset_mixer") or ()))
    if strategy != "no" and (path := next(filter(is_file, paths), None)):
        raise Unsupported(
            f"an evaluation on a test split (dataset_test_split) of {path}, which is one file; write eval_strategy: "
            f"no, or instead of its name datasets: [{{path: {path}}}] and test_split_size: 0.1"
        )
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
        return math.ceil(steps * max_steps), None  # as transformers rounds
    return 0, steps * epochs
