"""Options of Axolotl that must be read together (`conversions`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config.foreign.conversions import NotYet, Options, Settings, conversions_of, overriding, renamed
from jaxtune.config.foreign.trl import OPTIMIZERS, trl_metric, trl_resume, trl_schedule, zero_of

ALPACA = (
    "Below is an instruction that describes a task{more}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{instruction}}\n\n{given}### Response:\n"
)
_WITH_INPUT = ALPACA.format(
    more=", paired with an input that provides further context", given="### Input:\n{input}\n\n"
)
_WITHOUT = ALPACA.format(more="", given="")
_TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma3", "qwen3", "alpaca")},
    "qwen_25": "chatml",
    "phi_4": "phi4",
    "mistral_v2v3": "mistral_v3",
    "mistral_v7_tekken": "mistral_v7",
    "tokenizer_default": None,
}


def _entries(o: Options) -> Iterator[Mapping[str, Any]]:
    """Those of all lists of datasets."""
    for name in ("datasets", "test_datasets"):
        entries = o.get(name)
        yield from (entry for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, Mapping))


def _common(o: Options, name: str) -> Any:
    """What all entries that are conversations say of an option that is one for all of them here."""
    said = [entry.get(name) for entry in _entries(o) if str(entry.get("type")).startswith("chat_template")]
    if any(other != said[0] for other in said):
        raise NotYet(f"a {name} of each dataset; one for all is there")
    return said[0] if said else None


# ---- an entry of datasets ----


def axolotl_type(o: Options) -> Settings:
    """A kind of data and its columns; a section: the user's own format, or names of columns of preferences.

    Preferences have no type, as the objective says whether they are pairs.
    """
    kind = o.get("type")
    own = {name.removeprefix("type."): value for name, value in o.items() if name.startswith("type.") and value}
    if own:
        return _own_type(own)
    if kind is None or kind is True:
        return {"type": "tokenized"}
    if kind == "completion":
        return {"type": "text", "text_field": o.get("field") or "text"}
    if kind == "chat_template":
        return {"type": "conversation", "messages_field": o.get("field_messages") or "messages"}
    if kind == "alpaca":
        return {"type": "instruction", "prompt_format": _WITH_INPUT, "prompt_format_no_input": _WITHOUT}
    if kind in ("chat_template.default", "chatml.intel", "chatml.ultra", "llama3.intel", "llama3.ultra"):
        return {"prompt_field": o["field_messages"]} if o.get("field_messages") else {}
    raise NotYet(
        "a type is completion, chat_template, alpaca, a section with format and field_..., of preferences "
        "chat_template.default, chatml.intel, chatml.ultra, llama3.intel, llama3.ultra; or none, of tokens"
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
    found: Settings = {"type": "instruction", "input_field": own.get("field_input")}
    return found | {ours: own[theirs] for theirs, ours in columns.items() if theirs in own}


def axolotl_split(o: Options) -> Settings:
    """train, if it is not said."""
    return {"split": o.get("split") or "train"}


def axolotl_path(o: Options) -> Settings:
    """A path, and files of it; where it is a word for the format of files, they are the path."""
    files, path = o.get("data_files"), o.get("path")
    if files is not None and path in ("json", "csv", "parquet", "text", "arrow"):
        return {"path": files, "ds_type": path}
    return {"path": path} | ({"glob": files} if files is not None else {})


def axolotl_mappings(o: Options) -> Settings:
    """Names of keys that are other ones in the data."""
    pairs = dict(o.get("message_property_mappings") or {})
    for name in ("role", "content"):
        if o.get(f"message_field_{name}"):
            pairs[name] = o[f"message_field_{name}"]
    return renamed(pairs)


# ---- the file ----


def axolotl_adapter(o: Options) -> Settings:
    """lora or qlora, whose base is in 4 bits."""
    adapter = o.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise NotYet("adapter is lora or qlora")
    settings: Settings = {"lora.enabled": adapter is not None}
    if adapter is None:
        return settings
    if o["load_in_8bit"]:
        return settings | {"quant.format": "int8"}
    return settings | ({"quant.format": "nf4"} if adapter == "qlora" or o["load_in_4bit"] else {})


def axolotl_targets(o: Options) -> Settings:
    """Names of modules, or all that are linear; unset, those that peft has for most families."""
    if o.get("adapter") is None:
        return {}
    names = o.get("lora_target_modules")
    if o.get("lora_target_linear") or names in ("all-linear", ["all-linear"]):
        return {"lora.target_modules": "all-linear"}
    return {"lora.target_modules": names or ["q_proj", "v_proj"]}


def axolotl_dropout(o: Options) -> Settings:
    """Of adapters; TRL's trainers, which it calls for preferences, switch dropout off."""
    return {"lora.dropout": 0.0 if o.get("rl") else o["lora_dropout"]}


def axolotl_overrides(o: Options) -> Settings:
    """Entries of config.json."""
    return overriding(o.get("overrides_of_model_config") or {})


_FUSED = ("CutCrossEntropyPlugin", "LigerPlugin")


def axolotl_plugins(o: Options) -> Settings:
    """Those of fused losses and norms have no need here."""
    others = [name for name in o.get("plugins") or () if not str(name).endswith(_FUSED)]
    if others:
        raise NotYet(f"plugins of torch, such as {others[0]}")
    return {}


def axolotl_packing(o: Options) -> Settings:
    """multipack: the longest documents first, each into the first row with room."""
    if not o.get("sample_packing"):
        return {"data.packing": False}
    sequential = o.get("sample_packing_sequentially")
    return {"data.packing": True, "data.packing_method": "sequential" if sequential else "first_fit_decreasing"}


def axolotl_length(o: Options) -> Settings:
    """What is longer is left out, or cut; texts without conversations go on in the next row."""
    ways = {"drop": "delete", "truncate": "right"}
    if o["excess_length_strategy"] not in ways:
        raise NotYet(f"excess_length_strategy is one of {', '.join(ways)}")
    if o.get("rl") or all(entry.get("type") == "completion" for entry in _entries(o)):
        return {}
    return {"data.truncation": ways[o["excess_length_strategy"]]}


def axolotl_prompt(o: Options) -> Settings:
    """Read with preferences alone."""
    return {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]} if o.get("rl") else {}


def axolotl_stream(o: Options) -> Settings:
    """Data of pretraining are a stream, unless that is said to be false."""
    said = o.get("streaming")
    return {"data.streaming": True} if said or (said is None and o.get("pretraining_dataset")) else {}


def axolotl_order(o: Options) -> Settings:
    """A curriculum keeps the order of the data."""
    return {"data.shuffle": False} if o.get("curriculum_sampling") else {}


def axolotl_template(o: Options) -> Settings:
    """That of the file, or of all its conversations."""
    jinja = o.get("chat_template_jinja") or _common(o, "chat_template_jinja")
    if jinja:
        if "{" in str(jinja):
            raise NotYet("a chat template in the file; name a file of Jinja")
        return {"chat.template": jinja}
    name = _common(o, "chat_template") or o.get("chat_template") or "tokenizer_default"
    name = str(name).removeprefix("tokenizer_default_fallback_")
    if name not in _TEMPLATES:
        raise NotYet(f"chat_template is one of {', '.join(_TEMPLATES)}, or a file by chat_template_jinja")
    return {"chat.template": _TEMPLATES[name]} if _TEMPLATES[name] else {}


def axolotl_trained(o: Options) -> Settings:
    """Which messages and which of the tokens that end them."""
    if o["train_on_inputs"]:
        if others := [
            entry.get("type") for entry in _entries(o) if entry.get("type") not in ("chat_template", "completion")
        ]:
            raise NotYet(f"prompts that are trained, of data of type {others[0]}; of conversations they are")
        return {"chat.loss_scale": "all"}
    roles, ends = _common(o, "roles_to_train"), _common(o, "train_on_eos")
    found: Settings = {"chat.roles": roles} if roles else {}
    return found | ({"chat.train_on_eos": ends} if ends else {})


def axolotl_rates(o: Options) -> Settings:
    """Factors of the learning rate: of groups, tables, and B matrices of adapters."""
    rate, factors = float(o.get("learning_rate") or 0), []
    given = any(o.get(name) for name in ("lr_groups", "embedding_lr"))
    if given and rate <= 0:
        raise NotYet("learning rates of groups without a learning_rate, of which they are factors here")
    for group in o.get("lr_groups") or ():
        if not isinstance(group, Mapping) or not {"modules", "lr"} <= group.keys():
            raise NotYet("a group is {name: ..., modules: [...], lr: ...}")
        factors.append(f"{'|'.join(group['modules'])}={float(group['lr']) / rate:g}")
    if o.get("embedding_lr"):
        factors.append(f"embed_tokens|lm_head={float(o['embedding_lr']) / rate:g}")
    if o.get("embedding_lr_scale"):
        factors.append(f"embed_tokens|lm_head={o['embedding_lr_scale']:g}")
    settings: Settings = {"optim.lr_multipliers": factors} if factors else {}
    return settings | ({"lora.lr_ratio": float(o["loraplus_lr_ratio"])} if o.get("loraplus_lr_ratio") else {})


def axolotl_schedule(o: Options) -> Settings:
    """transformers' schedules; of cosine a lowest rate as a part of the peak."""
    if o["lr_scheduler"] in ("one_cycle", "rex"):
        raise NotYet("the schedules of transformers are there")
    found = trl_schedule({"lr_scheduler_type": o["lr_scheduler"], "lr_scheduler_kwargs": o.get("lr_scheduler_kwargs")})
    lowest = o.get("cosine_min_lr_ratio")
    return found | ({"optim.final_lr_fraction": lowest} if lowest is not None else {})


def axolotl_warmup(o: Options) -> Settings:
    """Without either, 3% of the steps."""
    if o.get("warmup_steps") is not None:
        return {"optim.warmup_steps": o["warmup_steps"]}
    return {"optim.warmup_ratio": 0.03 if o.get("warmup_ratio") is None else o["warmup_ratio"]}


def axolotl_optimizer(o: Options) -> Settings:
    """By transformers' names, and one of its own."""
    named = OPTIMIZERS | {"muon": "muon"}
    if o["optimizer"] not in named:
        raise NotYet(f"the optimizers are {', '.join(named)}")
    plain = {"optim.beta1": 0.0} if o["optimizer"] == "sgd" and o.get("adam_beta1") is None else {}
    return {"optim.name": named[o["optimizer"]]} | plain


def axolotl_precision(o: Options) -> Settings:
    """bf16: auto is true; without any, float32. Weights are read in the same dtype."""
    if o.get("fp8"):
        return {"precision.recipe": "fp8_hybrid", "model.dtype": "bfloat16"}
    if o.get("fp16") or o.get("float16"):
        return {"precision.recipe": "fp16", "model.dtype": "float16"}
    if o.get("float32") or not (o["bf16"] or o.get("bfloat16")):
        return {"precision.recipe": "fp32", "model.dtype": "float32"}
    master = {} if o.get("adapter") else {"precision.master_dtype": "bfloat16"}
    return {"precision.recipe": "bf16", "model.dtype": "bfloat16"} | master


def axolotl_remat(o: Options) -> Settings:
    """What is recomputed, or where it waits."""
    if o.get("activation_offloading") or o["gradient_checkpointing"] == "offload":
        return {"memory.remat": "offload"}
    if o["gradient_checkpointing"] not in (True, False):
        raise NotYet("gradient_checkpointing is true, false or offload")
    return {"memory.remat": "block" if o["gradient_checkpointing"] else "none"}


def axolotl_devices(o: Options) -> Settings:
    """Shards by FSDP or DeepSpeed, whose files have their stage in their names; without, every device has a replica."""
    deepspeed = o.get("deepspeed")
    if isinstance(deepspeed, str):
        stages = [stage for stage in (1, 2, 3) if f"zero{stage}" in deepspeed]
        if not stages:
            raise NotYet("a file of DeepSpeed other than deepspeed_configs/zero1.json, zero2.json or zero3.json")
        return {"mesh.fsdp": -1, "parallel.zero": stages[0]}
    if deepspeed:
        return zero_of(deepspeed)
    if o.get("fsdp") or o.get("fsdp_config") or o.get("dp_shard_size"):
        replicas = o.get("dp_replicate_size") or 1
        return {"mesh.fsdp": o.get("dp_shard_size") or -1, "mesh.data": replicas, "parallel.zero": 3}
    return {"mesh.fsdp": 1, "mesh.data": -1}


def _when(o: Options, event: str, plural: str) -> tuple[int, float | None]:
    """The steps, and the epochs, between two of these; by default an epoch."""
    strategy, steps, often = o.get(f"{event}_strategy"), o.get(f"{event}_steps"), o.get(f"{plural}_per_epoch")
    if strategy not in (None, "no", "epoch", "steps", "best"):
        raise NotYet(f"{event}_strategy is no, steps, epoch or best")
    if steps is not None:
        if steps != int(steps):
            raise NotYet(f"{event}_steps as a part of all steps; a number of steps is there")
        return int(steps), None
    if often is not None:
        return 0, 1 / often if often > 0 else None
    return 0, 1.0 if strategy in (None, "epoch") else None


def axolotl_eval(o: Options) -> Settings:
    """By steps or epochs."""
    steps, epochs = _when(o, "eval", "evals")
    return {"eval.steps": steps, "eval.epochs": epochs}


def axolotl_save(o: Options) -> Settings:
    """By steps or epochs."""
    steps, epochs = _when(o, "save", "saves")
    more: dict[Any, Settings] = {"best": {"ckpt.keep_best": True}, "no": {"ckpt.at_end": False}}
    return {"ckpt.save_steps": steps, "ckpt.save_epochs": epochs} | more.get(o.get("save_strategy"), {})


def axolotl_metric(o: Options) -> Settings:
    """As transformers names it."""
    return trl_metric(o)


def axolotl_resume(o: Options) -> Settings:
    """As transformers reads it."""
    return trl_resume(o)


def axolotl_hub(o: Options) -> Settings:
    """Where the export goes; Axolotl makes private repositories alone."""
    name = o.get("hub_model_id")
    return {"export.push_to_hub": name, "export.private": True} if name else {}


def axolotl_wandb(o: Options) -> Settings:
    """A project means that there is one."""
    project = o.get("wandb_project")
    return {"log.wandb.project": project, "log.wandb.enabled": True} if project else {}


def axolotl_profile(o: Options) -> Settings:
    """The first steps."""
    steps = o.get("profiler_steps")
    return {"prof.enabled": True, "prof.start_step": 1, "prof.steps": steps} if steps else {}


def axolotl_rl(o: Options) -> Settings:
    """Objectives by TRL's trainers."""
    kind = o.get("rl")
    if kind is None:
        return {}
    losses = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "kto": "kto", "simpo": "simpo"}
    if kind not in losses:
        raise NotYet(f"rl is one of {', '.join(losses)}")
    loss = losses[kind]
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
        "precompute_ref_log_probs": ("preference.precompute_reference", ("sigmoid", "ipo", "kto")),
    }
    return settings | {key: o[name] for name, (key, losses) in of.items() if o.get(name) is not None and loss in losses}


CONVERSIONS = conversions_of(vars(), "axolotl")
