"""Options of Axolotl that are translated together (see `conversions`)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config.foreign.conversions import (
    Options,
    Settings,
    Unsupported,
    conversions_of,
    message_key_mappings,
    model_overrides,
    names_of,
)
from jaxtune.config.foreign.trl import (
    LOSSES,
    OPTIMIZERS,
    decay_of,
    offload_of,
    steps_or_epochs,
    targets_of,
    trl_schedule,
    word_of,
    zero_of,
)

_SYSTEM = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
)
_WITH_INPUT = _SYSTEM.format(more=", paired with an input that provides further context")
_WITHOUT_INPUT = _SYSTEM.format(more="")
# By the prompt style of `type: alpaca:STYLE`: formats with and without an input (axolotl/prompters.py, AlpacaPrompter).
ALPACA = {
    "instruct": (
        f"{_WITH_INPUT}\n\n### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n### Response:\n",
        f"{_WITHOUT_INPUT}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
    ),
    "chat": (
        f"SYSTEM: {_WITH_INPUT}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_WITHOUT_INPUT}\nUSER: {{instruction}}\nASSISTANT:",
    ),
    "chatml": (
        f"<|im_start|>system\n{_WITH_INPUT}<|im_end|>\n"
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>system\n{_WITHOUT_INPUT}<|im_end|>\n"
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        f"<|system|>\n{_WITH_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
        f"<|system|>\n{_WITHOUT_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
    ),
}
# Templates of Axolotl that jaxtune has too.
_TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma3", "qwen3", "alpaca")},
    "qwen_25": "chatml",
    "phi_4": "phi4",
    "mistral_v2v3": "mistral_v3",
    "mistral_v7_tekken": "mistral_v7",
}
# Templates that Axolotl copied from the tokenizers of a family, and a part of the names of the family's models, without
# punctuation (axolotl/utils/chat_templates/templates).
_OF_FAMILY = {
    **dict.fromkeys(("mistral_v1", "mistral_v3_tekken"), ("mistral", "mixtral", "ministral")),
    **dict.fromkeys(("command_a", "command_a_rag", "command_a_tool_use"), ("commanda", "c4aicommanda")),
    "aya": ("aya",),
    "cohere": ("cohere", "commandr", "c4ai"),
    "deepseek_v2": ("deepseekv2", "deepseekcoderv2"),
    "deepseek_v3": ("deepseekv3", "deepseekr1", "moonlight", "kimi"),
    "exaone": ("exaone",),
    "exaone4": ("exaone4",),
    "falcon_h1": ("falconh1",),
    "gemma": ("gemma",),
    "gemma3n": ("gemma3n",),
    "gemma4": ("gemma4",),
    "gemma4_unified": ("gemma4",),
    "granite": ("granite",),
    "granitemoe": ("granite",),
    "jamba": ("jamba",),
    "llama3_2_vision": ("llama32",),
    "llama4": ("llama4",),
    "llava": ("llava",),
    "nemotron": ("nemotron",),
    "nemotron_h": ("nemotron",),
    "phi_3": ("phi3",),
    "phi_35": ("phi35",),
    "pixtral": ("pixtral",),
    "qwen2_vl": ("qwen2vl", "qwen25vl"),
    "qwen_25": ("qwen25",),
    "qwen3_5": ("qwen35", "qwen36"),
}
# Dataset types of preferences, whose columns Axolotl's data and ours share.
_PREFERENCES = (
    *("chat_template.default", "chat_template.argilla_chat", "chat_template.argilla", "chatml.intel", "chatml.ultra"),
    *("llama3.intel", "llama3.ultra", "chatml.argilla_chat", "llama3.argilla_chat", "chatml.argilla", "llama3.argilla"),
    *("chatml.prompt_pairs", "llama3.prompt_pairs"),
)
# Dataset types whose columns are fixed: system, input, chosen and rejected.
_WITH_INPUT_COLUMN = ("bradley_terry.chat_template.default", "chatml.icr", "llama3.icr")


def _entries(o: Options) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all lists of datasets."""
    for name in ("datasets", "test_datasets"):
        entries = o.get(name)
        yield from (entry for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, Mapping))


def _common(o: Options, name: str) -> Any:
    """Return the value of an option that all conversation datasets must share, because ours is global."""
    values = [entry.get(name) for entry in _entries(o) if str(entry.get("type")).startswith("chat_template")]
    if any(other != values[0] for other in values):
        raise Unsupported(f"a different {name} for each dataset; use one for all")
    return values[0] if values else None


# ---- an entry of datasets ----


def axolotl_type(o: Options) -> Settings:
    """The dataset type and its columns; a section has a custom format, or the columns of preferences.

    Preferences have no type, because the objective determines it.
    """
    kind = o.get("type")
    custom_format = {
        name.removeprefix("type."): value for name, value in o.items() if name.startswith("type.") and value
    }
    if custom_format:
        return _own_type(custom_format)
    if kind is None or kind is True:
        return {"type": "tokenized"}
    if kind == "completion":
        return {"type": "text", "text_field": o.get("field") or "text"}
    if kind == "chat_template":
        return {"type": "conversation", "messages_field": o.get("field_messages") or "messages"}
    name, _, style = str(kind).partition(":")
    if name == "alpaca" and (style or "instruct") in ALPACA:
        with_input, without = ALPACA[style or "instruct"]
        return {"type": "instruction", "prompt_format": with_input, "prompt_format_no_input": without}
    columns = {"field_messages": "prompt_field", "field_chosen": "chosen_field", "field_rejected": "rejected_field"}
    settings: Settings = {ours: o[theirs] for theirs, ours in columns.items() if o.get(theirs)}
    if kind in _PREFERENCES:
        return settings
    if kind in _WITH_INPUT_COLUMN:
        return {"prompt_field": "input", "input_field": None, "system_field": "system"} | settings
    raise Unsupported(
        "type must be completion, chat_template, alpaca, a section with format and field_..., for preferences "
        f"{', '.join(_PREFERENCES)}; for a reward model bradley_terry.chat_template.default; or none, for tokens; for "
        "a Python function of yours use data.datasets[i].function"
    )


def _own_type(own: Mapping[str, Any]) -> Settings:
    columns = {"field_chosen": "chosen_field", "field_rejected": "rejected_field", "field_prompt": "prompt_field"}
    if own.keys() & columns.keys():
        return {ours: own[theirs] for theirs, ours in columns.items() if theirs in own}
    columns = {
        "field_instruction": "instruction_field",
        "field_output": "output_field",
        "field_system": "system_field",
        "system_prompt": "system_prompt",
        "format": "prompt_format",
        "no_input_format": "prompt_format_no_input",
    }
    settings: Settings = {"type": "instruction", "input_field": own.get("field_input")}
    return settings | {ours: own[theirs] for theirs, ours in columns.items() if theirs in own}


def axolotl_split(o: Options) -> Settings:
    """The split; train by default."""
    return {"split": o.get("split") or "train"}


def axolotl_path(o: Options) -> Settings:
    """The path and its files; if the path is a file format, such as json, the files are the path."""
    files, path = o.get("data_files"), o.get("path")
    if files is not None and path in ("json", "csv", "parquet", "text", "arrow"):
        return {"path": files, "ds_type": path}
    return {"path": path} | ({"glob": files} if files is not None else {})


def axolotl_mappings(o: Options) -> Settings:
    """Message keys that have other names in the data."""
    pairs = dict(o.get("message_property_mappings") or {})
    for name in ("role", "content"):
        if o.get(f"message_field_{name}"):
            pairs[name] = o[f"message_field_{name}"]
    return message_key_mappings(pairs)


# ---- the file ----


def axolotl_adapter(o: Options) -> Settings:
    """The adapter, lora or qlora, and the format of its base weights, 4-bit for qlora."""
    adapter = o.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise Unsupported("adapter must be lora or qlora")
    settings: Settings = {"lora.enabled": adapter is not None}
    if adapter is None:
        return settings
    if o["load_in_8bit"]:
        return settings | {"quant.format": "int8"}
    if adapter != "qlora" and not o["load_in_4bit"]:
        return settings
    given = dict(o.get("bnb_config_kwargs") or {})
    kind, double = given.get("bnb_4bit_quant_type", "nf4"), given.get("bnb_4bit_use_double_quant", True)
    if kind not in ("nf4", "fp4"):
        raise Unsupported("bnb_4bit_quant_type must be nf4 or fp4")
    return settings | {"quant.format": kind} | ({} if double else {"quant.double_quant": False})


def axolotl_targets(o: Options) -> Settings:
    """Target modules, or all linear layers; if unset, peft's default for most families."""
    if o.get("adapter") is None:
        return {}
    names, parameters = o.get("lora_target_modules"), names_of(o.get("lora_target_parameters"))
    if o.get("lora_target_linear") or names in ("all-linear", ["all-linear"]):
        return {"lora.target_modules": "all-linear"}
    if not names and not parameters:
        names = ["q_proj", "v_proj"]
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
    literal = (re.sub(r"(?<!\\)\.(?![+])", r"\\.", pattern) for pattern in patterns)
    return {"train.freeze": f"^(?!{'|'.join(f'(?:{pattern})' for pattern in literal)})"}


def axolotl_dropout(o: Options) -> Settings:
    """Dropout of adapters; TRL's trainers, which Axolotl uses for preferences, disable it."""
    return {"lora.dropout": 0.0 if o.get("rl") else o["lora_dropout"]}


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


def axolotl_packing(o: Options) -> Settings:
    """Packing; multipack puts the longest documents first, each into the first row with room."""
    if not o.get("sample_packing"):
        return {"data.packing": False}
    sequential = o.get("sample_packing_sequentially") or axolotl_order(o)
    return {"data.packing": True, "data.packing_method": "sequential" if sequential else "first_fit_decreasing"}


def axolotl_length(o: Options) -> Settings:
    """Treatment of documents longer than a row; plain text is always split into rows."""
    ways = {"drop": "delete", "truncate": "right"}
    if o["excess_length_strategy"] not in ways:
        raise Unsupported(f"excess_length_strategy must be one of {', '.join(ways)}")
    if o.get("rl") or all(entry.get("type") == "completion" for entry in _entries(o)):
        return {}
    return {"data.truncation": ways[o["excess_length_strategy"]]}


def axolotl_prompt(o: Options) -> Settings:
    """The maximum prompt length, which Axolotl reads only for preferences."""
    return {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]} if o.get("rl") else {}


def axolotl_stream(o: Options) -> Settings:
    """Streaming, which is the default for a pretraining_dataset."""
    streaming_set = o.get("streaming")
    return {"data.streaming": True} if streaming_set or (streaming_set is None and o.get("pretraining_dataset")) else {}


def axolotl_order(o: Options) -> Settings:
    """The data order: random in each epoch, unless a curriculum, or a stream that is not shuffled, keeps it.

    A random sampler follows the shuffling of the merged datasets (core/trainers/base.py, utils/data/shared.py).
    """
    merged = o["shuffle_merged_datasets"]
    if o.get("curriculum_sampling"):
        datasets = o.get("datasets")
        several = isinstance(datasets, list) and len(datasets) > 1
        if several and merged:
            return {}
        return (
            {"data.shuffle_each": True} if several and o["shuffle_before_merging_datasets"] else {"data.shuffle": False}
        )
    return {"data.shuffle": False} if axolotl_stream(o) and not merged else {}


def axolotl_template(o: Options) -> Settings:
    """The chat template of the file, or of all its conversation datasets."""
    jinja = o.get("chat_template_jinja") or _common(o, "chat_template_jinja")
    if jinja:
        return {"chat.template": jinja}
    name = str(_common(o, "chat_template") or o.get("chat_template") or "tokenizer_default")
    model = re.sub(r"[^a-z0-9]", "", f"{o.get('base_model')} {o.get('tokenizer_config') or ''}".lower())
    # A fallback is for tokenizers without a template, which are an error here that names chat.template.
    own = name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_")
    if own or any(family in model for family in _OF_FAMILY.get(name, ())):
        return {}
    if name in _TEMPLATES:
        return {"chat.template": _TEMPLATES[name]}
    if name in _OF_FAMILY:
        raise Unsupported(
            f"the template {name} for a model whose name is not of that family; for the tokenizer's own template write "
            "tokenizer_default, for another one its Jinja text or file in chat_template_jinja"
        )
    raise Unsupported(
        f"chat_template must be one of {', '.join((*_TEMPLATES, *_OF_FAMILY))}, tokenizer_default, or Jinja text or a "
        "file in chat_template_jinja"
    )


def axolotl_trained(o: Options) -> Settings:
    """Trained messages and end-of-turn tokens."""
    if o["train_on_inputs"]:
        if others := [
            entry.get("type") for entry in _entries(o) if entry.get("type") not in ("chat_template", "completion")
        ]:
            raise Unsupported(f"training on prompts of type {others[0]}; only conversations and completions support it")
        return {"chat.loss_scale": "all"}
    roles, ends = _common(o, "roles_to_train"), _common(o, "train_on_eos")
    settings: Settings = {"chat.roles": roles} if roles else {}
    return settings | ({"chat.train_on_eos": ends} if ends else {})


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
    settings: Settings = {"optim.lr_multipliers": factors} if factors else {}
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
    return {"optim.warmup_ratio": 0.03 if o.get("warmup_ratio") is None else o["warmup_ratio"]}


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
    """The precision, and the same dtype for loaded weights; bf16: auto means true, and no option means float32."""
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
        zero = 2 if "SHARD_GRAD_OP" in words else 3
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
    if steps is not None:
        return steps_or_epochs(steps, o.get("max_steps"), o["num_epochs"])
    if often is not None:
        return 0, 1 / often if often > 0 else None
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
        raise Unsupported(f"dpo_loss_type must be one of {', '.join(LOSSES)}")
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


CONVERSIONS = conversions_of(vars(), "axolotl")
