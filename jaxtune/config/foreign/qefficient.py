"""Options of QEfficient that are translated together (see `conversions`)."""

import ast
import re
from typing import Any

from jaxtune.config.foreign.conversions import (
    Options,
    Settings,
    Unsupported,
    is_file,
    lines_of,
    names_of,
    pairs_of,
    saves_of,
    strategy_of,
    word_of,
)
from jaxtune.config.foreign.trl import trl_schedule, zero_of


def qefficient_data(o: Options) -> Settings:
    """A file has priority over a dataset name. Validation data is the named split, or a part of the training data."""
    name, label = o["dataset.dataset_name"], o.get("dataset.target_column")
    file = o["dataset.json_file_path"] or (name if is_file(name) else None)
    entry = {"path": file or name, "type": "classification" if label else "instruction"}  # a target column is a label
    if _qefficient_dpo(o):
        entry["type"] = "preference"
    if label:
        columns = names_of(o["dataset.input_columns"])
        text = columns[0] if len(columns) == 1 else " ".join(f"{{{column}}}" for column in columns)
        entry |= {"target_column": label, "text_field": text}
    if not file:
        entry |= {"split": o["dataset.train_split"]} | _qefficient_subset(o)
    settings: Settings = {"data.datasets": [entry]} | ({"model.head": "classification"} if label else {})
    if not o["training.do_eval"] or word_of(o["training.eval_strategy"]) == "no":
        return settings
    if o.get("dataset.test_split") and not file:
        return settings | {"data.eval_datasets": [entry | {"split": o["dataset.test_split"]}]}
    # Rounded, because 1 - 0.8 is 0.19999999999999996 in floating point.
    return settings | {"data.validation_split": round(1 - o["dataset.split_ratio"], 6)}


def _qefficient_subset(o: Options) -> Settings:
    """Two options for the subset; config_name is the one that load_dataset gets in their newer code."""
    names = {o[f"dataset.{option}"] for option in ("dataset_subset", "config_name")} - {"default"}
    if len(names) > 1:
        raise Unsupported(f"two subsets, {' and '.join(sorted(map(str, names)))}; leave out dataset.dataset_subset")
    return {"subset": names.pop()} if names else {}


def qefficient_samples(o: Options) -> Settings:
    """The first samples of each split; -1: all."""
    most = o["dataset.dataset_num_samples"]  # -1: all
    return {"data.datasets[i].samples": most} if most > 0 else {}


def qefficient_type(o: Options) -> Settings:
    """sft and base train on next tokens; dpo is TRL's DPOTrainer, with its defaults, as no file can set its options.

    See finetune/experimental/core/trainer/dpo_trainer.py.
    """
    known = ("sft", "base", "dpo")
    if o["training.type"] not in known:
        raise Unsupported(f"type is one of {', '.join(known)}; train.plugins can add an objective")
    return {"preference.loss": "sigmoid", "preference.beta": 0.1} if _qefficient_dpo(o) else {}


def _qefficient_dpo(o: Options) -> bool:
    return o["training.type"] == "dpo"


def qefficient_kind(o: Options) -> Settings:
    """The kind of samples, which training.type decides for DPO."""
    known = ("seq_completion", "sft_dataset")
    if o["dataset.dataset_type"] not in known and not _qefficient_dpo(o):
        raise Unsupported(f"dataset_type is one of {', '.join(known)}; data.datasets[i].function reads any other")
    return {}


def qefficient_function(o: Options) -> Settings:
    """FILE:NAME of a function that returns the text of the prompt or of the completion."""
    prompt, completion = o["dataset.prompt_func"], o["dataset.completion_func"]
    if prompt and completion:
        raise Unsupported(
            "two functions; write one that returns {'prompt': ..., 'completion': ...} and set "
            "data.datasets[i].function = 'FILE.py:NAME'"
        )
    if not (prompt or completion):
        return {}
    place, _, name = str(prompt or completion).rpartition(":")
    if not place:
        raise Unsupported("a function that is not written as FILE:NAME")
    # Their paths leave out the suffix .py; a place without a slash is a module.
    function = f"{place}:{name}" if place.endswith(".py") or "/" not in place else f"{place}.py:{name}"
    written = {_prompt_key(o): "{returned}"} if prompt else {"output_field": "returned"}
    return {f"data.datasets[i].{key}": value for key, value in {"function": function, **written}.items()}


def _prompt_key(o: Options) -> str:
    return "prompt_field" if _qefficient_dpo(o) else "prompt_format"


def qefficient_prompt(o: Options) -> Settings:
    """A template with columns, possibly written as a Python f-string, f"...\\n", as in their grammar example."""
    return _qefficient_text(_prompt_key(o), o["dataset.prompt_template"])


def qefficient_completion(o: Options) -> Settings:
    """A template with columns; pairs of answers have none."""
    return {} if _qefficient_dpo(o) else _qefficient_text("output_field", o["dataset.completion_template"])


def _qefficient_text(key: str, template: Any) -> Settings:
    if template is None:
        return {}
    text = str(template)
    if re.fullmatch(r"""f(["'])(?:(?!\1)[^\\]|\\.)*\1\s*""", text, re.DOTALL):  # f"..." or f'...' as a whole
        # Text in the quotes of YAML has real line ends, which a Python string has only as \n.
        code = text.strip()[1:].replace("\r", "\\r").replace("\n", "\\n")
        try:
            text = ast.literal_eval(code)
        except (SyntaxError, ValueError):
            raise Unsupported("a Python text that cannot be read; write it without the f and its quotes") from None
    return {f"data.datasets[i].{key}": text}


def qefficient_eval(o: Options) -> Settings:
    """Evaluation by steps or by epochs."""
    strategy = strategy_of(o["training.eval_strategy"] if o["training.do_eval"] else "no")
    by = {"steps": {"eval.steps": o.get("training.eval_steps", 0)}, "epoch": {"eval.epochs": 1.0}}
    return {"eval.steps": 0} | by.get(strategy, {})


def qefficient_early(o: Options) -> Settings:
    """Early stopping, if the callback is listed."""
    if "callbacks.early_stopping" not in o:
        return {}
    # A number of evaluations, and the least improvement of the metric.
    patience, least = (o[f"callbacks.early_stopping.early_stopping_{part}"] for part in ("patience", "threshold"))
    return {"eval.patience": patience, "eval.min_improvement": least}


def qefficient_save(o: Options) -> Settings:
    """Checkpoints by steps, by epochs, or never."""
    return saves_of(o["training.save_strategy"], o["training.save_steps"])


def qefficient_log(o: Options) -> Settings:
    """Progress lines by steps, or none. Lines by epoch are by steps too, which shows more and changes no result."""
    strategy = o["training.logging_strategy"]
    return lines_of("steps" if strategy == "epoch" else strategy, o["training.logging_steps"])


def qefficient_devices(o: Options) -> Settings:
    """ZeRO of DeepSpeed, or FSDP, over all devices; else a replica on each.

    With tensor or pipeline parallelism, ddp_degree is the number of replicas, else the launcher's processes are
    (validate_config in finetune/experimental/core/config_manager.py).
    """
    if o["training.deepspeed_config"]:
        return zero_of(o["training.deepspeed_config"])
    if o["training.fsdp_config"]:
        return {"mesh.fsdp": -1}
    divided = o["training.tp_degree"] > 1 or o["training.pp_degree"] > 1
    return {"mesh.fsdp": 1, "mesh.data": o["training.ddp_degree"] if divided else -1}  # -1: the devices that remain


def qefficient_device(o: Options) -> Settings:
    """use_cpu overrides device; XLA has no backend for qaic."""
    if o["training.use_cpu"]:
        return {"device.platform": "cpu"}
    return {"device.platform": o["training.device"]} if o["training.device"] in ("cuda", "cpu") else {}


def qefficient_precision(o: Options) -> Settings:
    """The dtype of the weights and of the computation.

    Older files have one option for both (training.dtype, earlier training.torch_dtype). Newer ones load the weights in
    model.torch_dtype and compute in it too, unless training.bf16 or fp16 ask for autocast; weights in bfloat16 are then
    trained as they are, and adapters in float32 (peft).
    """
    stored = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    dtype, loaded = o.get("training.torch_dtype") or o["training.dtype"], o.get("model.torch_dtype")
    if wrong := [name for name in (loaded, dtype) if name not in (None, *stored)]:
        raise Unsupported(f"{wrong[0]}; dtype and torch_dtype are one of {', '.join(stored)}")
    cast = [name for name in ("bf16", "fp16") if o[f"training.{name}"]]
    recipe = cast[0] if cast else loaded or dtype
    settings: Settings = {"precision.recipe": recipe, "model.dtype": stored[loaded or (recipe if cast else dtype)]}
    if loaded == "bf16" and not o["model.use_peft"] and recipe != "fp16":
        settings["precision.master_dtype"] = "bfloat16"
    return settings


def qefficient_seeds(o: Options) -> Settings:
    """The seed of dropout and weights, and that of the data order, which is the same unless data_seed is set."""
    order = o.get("dataset.data_seed")
    return {"train.seed": o["training.seed"], "data.seed": o["training.seed"] if order is None else order}


def qefficient_optimizer(o: Options) -> Settings:
    """torch's optimizer by name, in small letters or as the class is spelt. Its SGD has no momentum."""
    name = _qefficient_optimizer(o)
    settings: dict[str, Settings] = {
        "adamw": {"optim.name": "adamw"},
        "adam": {"optim.name": "adamw"},  # the same rule without decay; qefficient_decay refuses a decay
        "sgd": {"optim.name": "sgd", "optim.beta1": 0.0},
    }
    if name not in settings:
        raise Unsupported(f"the optimizers are {', '.join(settings)}; train.plugins can add one")
    return settings[name]


def _qefficient_optimizer(o: Options) -> str:
    names = {str(o.get(f"optimizers.{option}") or "").lower() for option in ("optimizer", "optimizer_name")} - {""}
    if len(names) > 1:
        raise Unsupported(f"two optimizers, {' and '.join(sorted(names))}; leave out optimizers.optimizer")
    return names.pop() if names else "adamw"


def qefficient_decay(o: Options) -> Settings:
    """Weight decay of all but norms and biases, as in transformers' Trainer; adapters are neither.

    torch's Adam adds the decay to the gradient before the moments, which no rule here does. Without decay Adam and
    AdamW are the same.
    """
    decay = o.get("optimizers.weight_decay") or 0.0
    if decay and _qefficient_optimizer(o) == "adam":
        raise Unsupported(
            "weight_decay of Adam, which torch adds to the gradient; set optimizer_name: adamw, whose decay is "
            "decoupled, or weight_decay: 0"
        )
    decays = {"optim.weight_decay": decay}
    return decays if o["model.use_peft"] or not decay else decays | {"optim.no_decay": "norm|bias"}


def qefficient_schedule(o: Options) -> Settings:
    """The schedule and its arguments, as in transformers."""
    name = o.get("scheduler.scheduler") or o["scheduler.scheduler_name"]
    if o["scheduler.scheduler_name"] not in (name, "cosine"):
        raise Unsupported(f"two schedules, {name} and {o['scheduler.scheduler_name']}; leave out scheduler.scheduler")
    given = o.get("scheduler.lr_scheduler_kwargs") or {}
    needed = {"cosine_with_min_lr": ("min_lr", "min_lr_rate"), "warmup_stable_decay": ("num_decay_steps",)}
    if name in needed and not given.keys() & set(needed[name]):
        text = f"{name} without scheduler.lr_scheduler_kwargs: {{{needed[name][0]}: ...}}, which it needs"
        raise Unsupported(text, "scheduler.lr_scheduler_kwargs")
    return trl_schedule({"lr_scheduler_type": name, "lr_scheduler_kwargs": given})


def qefficient_warmup(o: Options) -> Settings:
    """Warm-up steps; a value below 1 is a fraction of all steps. Steps come before a ratio, as in transformers."""
    warmup = o.get("scheduler.warmup_steps") or 0
    if warmup >= 1:
        return {"optim.warmup_steps": int(warmup)}
    return {"optim.warmup_ratio": warmup or o.get("scheduler.warmup_ratio") or 0.0}


def qefficient_workers(o: Options) -> Settings:
    """Two options for the same thing; dataloader_num_workers has priority."""
    return {"data.num_workers": o.get("dataset.dataloader_num_workers", o.get("dataset.num_workers"))}


def qefficient_length(o: Options) -> Settings:
    """Row length, or the length of each answer of a pair; what is longer is cut at the end."""
    most = o["dataset.max_seq_length"]
    return pairs_of(most, "right") if _qefficient_dpo(o) else {"data.seq_len": most, "data.truncation": "right"}


def qefficient_tokenizer(o: Options) -> Settings:
    """The tokenizer, if it differs from the model's."""
    name = o["dataset.tokenizer_name"]
    return {"model.tokenizer": name} if name != o["model.model_name"] else {}
