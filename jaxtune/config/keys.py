"""All options as one flat list of dotted keys, and the search for the key nearest to a mistyped one."""

import ast
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from jaxtune.config.schema import Config
from jaxtune.data.options import READ_BY_TYPE, Dataset


@dataclass(frozen=True)
class Option:
    """One option. Options of list entries have `[i]` in their key: `data.datasets[i].path`."""

    key: str
    annotation: Any
    default: Any
    unit: str
    doc: str
    within: str  # interval of a number; "" if any number is valid
    when: tuple[str, ...]  # the option has an effect only if all these expressions are true
    basic: bool  # listed by `jaxtune options` without --all


# Names of our options in TRL, Axolotl, LLaMA-Factory, Unsloth and transformers. Similar names need no entry.
ALIASES = {
    "model.path": "base_model model_name_or_path model_name pretrained_model_name_or_path",
    "model.dtype": "torch_dtype",
    "model.config": "config_path config_name base_model_config",
    "model.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
    "model.overrides": "foundation model_kwargs model_init_kwargs overrides_of_model_config",
    "model.max_positions": "max_model_len",
    "model.zero_projections": "init_projections_to_zero",
    "model.num_labels": "num_classes",
    "model.id2label": "label2id class_names",
    "data.datasets": "dataset dataset_name train_dataset train_file train_data data_path",
    "data.datasets[i].samples": "max_samples max_train_samples",
    "data.datasets[i].glob": "data_files",
    "data.datasets[i].shards": "num_shards dataset_shard_num",
    "data.datasets[i].shard_idx": "shards_idx dataset_shard_idx",
    "data.datasets[i].function": "prompt_func completion_func",
    "data.datasets[i].subset": "dataset_config_name dataset_subset",
    "data.datasets[i].text_field": "input_columns",
    "data.datasets[i].prompt_format": "prompt_template",
    "data.datasets[i].output_field": "completion_template",
    "data.datasets[i].target_column": "label_column label_field target_field",
    "data.datasets[i].system_prompt": "default_system system_message",
    "data.datasets[i].max_prompt_tokens": "max_prompt_length max_prompt_len",
    "data.datasets[i].desirable_field": "kto_tag",
    "train.label_smoothing": "label_smoothing_factor",
    "train.hidden_dropout": "hidden_dropout_prob resid_pdrop",
    "train.attention_dropout": "attention_probs_dropout_prob attn_pdrop",
    "train.neftune_alpha": "neftune_noise_alpha",
    "optim.ema_decay": "ema_beta",
    "preference.loss": "pref_loss dpo_loss loss_type rl",
    "preference.beta": "pref_beta dpo_beta rl_beta kto_beta",
    "preference.label_smoothing": "dpo_label_smoothing",
    "preference.simpo_gamma": "gamma",
    "preference.loss_weight": "pref_loss_ratio",
    "preference.sft_weight": "sft_loss_ratio pref_ftx rpo_alpha cpo_alpha",
    "preference.reference": "ref_model reference_free",
    "preference.reference_update_steps": "ref_model_update_steps ref_model_sync_steps",
    "preference.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "preference.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "data.validation_split": "validation val_size val_set_size test_size validation_split_percentage",
    "data.mixing": "mix_strategy stopping_strategy",
    "data.datasets[i].weight": "interleave_probs probabilities sampling_prob train_dataset_prob eval_dataset_prob",
    "data.seq_len": "max_length max_len max_seq_length cutoff_len sequence_len sequence_length context_length "
    "model_max_length",
    "data.packing": "sample_packing neat_packing use_packing collate_fn",
    "data.packing_method": "sample_packing_method sample_packing_sequentially packing_strategy greedy_intokens",
    "data.group_by_length": "length_column_name",
    "data.samples_per_epoch": "num_samples_each_epoch",
    "data.shuffle_each": "shuffle_before_merging_datasets",
    "data.num_proc": "dataset_num_proc preprocessing_num_workers dataset_num_processes",
    "data.num_workers": "dataloader_num_workers num_dataloader_workers",
    "data.prefetch": "dataloader_prefetch_factor prefetch_factor",
    "data.cache_only": "skip_prepare_dataset",
    "chat.template": "chat_template chat_template_path chat_template_jinja",
    "chat.roles": "roles_to_train train_on_inputs train_on_prompt assistant_only_loss completion_only_loss",
    "chat.loss_scale": "mask_history",
    "chat.train_on_eos": "train_on_eot",
    "train.output_dir": "save_dir logging_dir",
    "train.micro_batch_size": "batch_size batch per_device_train_batch_size micro_batch",
    "train.grad_accum_steps": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    "train.hang_seconds": "ddp_timeout nccl_timeout",
    "train.epochs": "num_train_epochs num_epochs",
    "optim.name": "optimizer optimizer_name",
    "optim.learning_rate": "lr",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.max_grad_norm": "gradient_clipping grad_clip clip_grad_norm",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.epsilon": "adam_epsilon eps",
    "lora.enabled": "adapter finetuning_type use_peft peft",
    "lora.rank": "lora_r r lora_rank",
    "lora.target_modules": "lora_target lora_target_linear",
    "lora.path": "adapter_name_or_path lora_model_dir",
    "quant.format": "load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type",
    "quant.double_quant": "bnb_4bit_use_double_quant double_quantization",
    "memory.remat": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing recompute "
    "recompute_ffn recompute_qkv recompute_att recompute_block recompute_modules recompute_granularity "
    "activation_offloading enable_activation_offload offload_residual tiled_mlp",
    "memory.offload_optimizer": "offload_optim tensorwise_offload_optimizer cpu_offload",
    "memory.offload_gradients": "offload_grads",
    "attention.backend": "attn_implementation flash_attention flash_attn use_flash_attention",
    "experts.backend": "expert_backend moe_implementation experts_implementation moe_grouped_gemm",
    "experts.dispatch": "ep_dispatch moe_token_dispatcher_type",
    "experts.capacity_factor": "moe_expert_capacity_factor moe_capacity_factor expert_capacity_factor",
    "experts.router_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff aux_loss_alpha",
    "experts.router_z_loss": "router_z_loss_coef moe_z_loss_coeff",
    "experts.bias_update_rate": "moe_router_bias_update_rate bias_update_speed",
    "precision.recipe": "bf16 fp16 fp8 tf32 mixed_precision",
    "ckpt.keep_last": "save_total_limit",
    "ckpt.resume": "resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir overwrite",
    "eval.at_start": "eval_on_start evaluate_before_training",
    "eval.steps": "eval_strategy evaluation_strategy",
    "log.every": "logging_steps",
    "log.wandb.enabled": "report_to use_wandb",
    "device.platform": "device use_cpu no_cuda accelerator",
    "device.gpus": "n_gpu num_gpus gpus_per_node devices",
    "device.command_buffers": "use_cuda_graphs cuda_graphs enable_cuda_graph",
    "mesh.fsdp": "fsdp_config deepspeed",
    "parallel.shard_residual": "sequence_parallel",
    "parallel.zero": "zero_level zero_stage sharding_stage enable_full_shard shard_gradients",
    "mesh.tensor": "tensor_parallel_size tp tensor_parallel",
    "mesh.context": "context_parallel_size context_parallel_degree cp_size cp ringattn_parallel_size",
    "mesh.sequence": "sequence_parallel_degree sequence_parallel_size ulysses_parallel_size sp_size",
}

# The option meant by a flag or key without a section, if it names a section or is the last part of several keys.
_WITHOUT_SECTION = {
    "model": "model.path",
    "path": "model.path",
    "dtype": "model.dtype",
    "data": "data.datasets",
    "file": "data.datasets",
    "context": "data.seq_len",
    "eval": "data.eval_datasets",
    "epochs": "train.epochs",
    "steps": "train.max_steps",
    "seed": "train.seed",
    "name": "train.run_name",
    "optim": "optim.name",
    "lora": "lora.enabled",
    "quant": "quant.format",
    "precision": "precision.recipe",
}

# Values of other systems, and their equivalents here.
VALUES = {
    "optim.name": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit"), "adamw_8bit"),
        **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
        "schedule_free_adamw": "schedule_free",
    },
    "data.datasets[i].type": {
        **dict.fromkeys(("sharegpt", "chat_template", "chat", "messages"), "conversation"),
        **dict.fromkeys(("alpaca", "instruct"), "instruction"),
        **dict.fromkeys(("completion", "pretrain"), "text"),
        **dict.fromkeys(("dpo", "pairwise"), "preference"),
        "kto": "unpaired_preference",
    },
    "preference.loss": {
        "dpo": "sigmoid",
        "reward": "bradley_terry",
        "grpo": "rollout.rewards and grpo.loss, which are options",
    },
    "precision.recipe": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8": "fp8_hybrid"},
    "quant.format": {"4bit": "nf4", "8bit": "int8"},
}
VALUES["data.eval_datasets[i].type"] = VALUES["data.datasets[i].type"]

# Former names of options, which saved configs may contain.
RENAMED = {"data.chat_template": "chat.template"}

_BY_ALIAS = {alias: key for key, aliases in ALIASES.items() for alias in aliases.split()}


@functools.cache
def options() -> dict[str, Option]:
    """Return every option by key, in the order of the schema."""
    return {option.key: option for option in _options_of(Config, "")}


def lookup(key: str) -> Option | None:
    """Return the option for a key as a user writes it, with indices (`data.datasets[1].path`), or None."""
    return options().get(generalize_key(key))


def nearest_option(key: str) -> Option | None:
    """Return the option most similar to an unknown key, with the index of `key`; None if none is similar."""
    best, index = _nearest(generalize_key(key)), re.search(r"\[\d+\]", key)
    if best is None:
        return None
    return dataclasses.replace(options()[best], key=best.replace("[i]", index[0]) if index else best)


@functools.lru_cache  # each entry of a long list may have the same unknown key
def _nearest(key: str) -> str | None:
    def likeness(candidate: str) -> tuple[float, float]:
        # Comparing whole keys finds the right section; comparing last parts finds options under a wrong section.
        return _ratio(key, candidate), _ratio(key.rpartition(".")[2], candidate.rpartition(".")[2])

    if meant := _WITHOUT_SECTION.get(key.lower()) or _BY_ALIAS.get(key.rpartition(".")[2].lower()):
        return meant
    scores = {candidate: likeness(candidate) for candidate in options()}
    best = max(scores, key=lambda candidate: sum(scores[candidate]))
    return best if max(scores[best]) >= 0.6 else None


def is_like_one_of_an_entry(name: str) -> bool:
    """Whether a name resembles an option of a data.datasets entry, or is one in another system."""
    option_names = [field.name for field in dataclasses.fields(Dataset)]
    return _BY_ALIAS.get(name, "").startswith("data.datasets") or bool(
        difflib.get_close_matches(name, option_names, 1, 0.8)
    )


def no_such_option(key: str) -> str:
    """Return an error text about an unknown key, with the nearest option."""
    if members := [member for member in options() if member.startswith(f"{generalize_key(key)}.")]:
        return f"a section, not an option; its options: {', '.join(members)}"
    option = nearest_option(key)
    if option is None:
        return "no such option; python -m jaxtune.options --all lists them"
    return f"no such option; nearest: {option.key}: {describe(option.annotation)} ({option.doc})"


def nearest_value(key: str, value: Any, annotation: Any) -> str | None:
    """Return the allowed value most similar to a wrong one, in meaning or spelling; None if none is similar."""
    if not isinstance(value, str):
        return None
    if meant := VALUES.get(generalize_key(key), {}).get(value.lower()):
        return meant
    members = (annotation, *typing.get_args(annotation))
    allowed = [word for member in members if typing.get_origin(member) is Literal for word in typing.get_args(member)]
    return next(
        iter(difflib.get_close_matches(value.lower(), [word for word in allowed if isinstance(word, str)])), None
    )


def entry_type(annotation: Any) -> Any | None:
    """Return the dataclass of the entries if an option is a list of sections, else None."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments and dataclasses.is_dataclass(arguments[0]) else None


def flatten_options(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of nested options; a key may also be written with dots."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and lookup(key) is None:
            yield from flatten_options(value, f"{key}.")
        elif value is not None or not is_section(key):  # an empty section sets nothing
            yield key, value


def is_section(key: str) -> bool:
    """Whether a key is a section, which contains options."""
    return any(known.startswith(f"{key}.") for known in options())


def has_entries(key: str) -> bool:
    """Whether a key is an option that holds a list of sections."""
    option = lookup(key)
    return option is not None and entry_type(option.annotation) is not None


def describe(annotation: Any) -> str:
    """Return a type as shown to users: `int | None`, `'bf16' | 'fp32'`, `tuple[str, ...]`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(describe(member) for member in arguments)
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin is tuple:
        return f"tuple[{describe(arguments[0])}, ...]"
    return "None" if annotation is types.NoneType else annotation.__name__


def names_in_expression(expression: str) -> list[str]:
    """Return the options that an expression reads, as dotted names."""
    nodes = ast.walk(ast.parse(expression, mode="eval"))
    read = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
    return [name for name in read if not any(other.startswith(f"{name}.") for other in read)]


def _options_of(section: Any, prefix: str, outer: tuple[str, ...] = ()) -> list[Option]:
    result = []
    annotations = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key, annotation = prefix + field.name, annotations[field.name]
        conditions = (*outer, field.metadata["when"]) if field.metadata.get("when") else outer
        if dataclasses.is_dataclass(annotation):
            result += _options_of(annotation, f"{key}.", conditions)
            continue
        if not field.metadata:
            continue  # fields of Config that are not options: said, notes
        # The columns of a dataset entry get their condition from READ_BY_TYPE; 'auto' may become any of the types.
        types = [repr(type_) for type_, read in READ_BY_TYPE.items() if field.name in (*read[0], *read[1])]
        if section is Dataset and types:
            conditions = (f"type in ({', '.join([repr('auto'), *types])})", *conditions)
        # A section's condition may read one of its own options, such as lora.enabled, which it must not disable.
        when = tuple(condition for condition in conditions if key not in names_in_expression(condition))
        unit, doc, within, basic = (field.metadata[name] for name in ("unit", "doc", "within", "basic"))
        result.append(Option(key, annotation, field.default, unit, doc, within, when, basic))
        if entry := entry_type(annotation):
            result += _options_of(entry, f"{key}[i].")
    return result


def generalize_key(key: str) -> str:
    """Replace each index in a key with [i]."""
    return re.sub(r"\[\d+\]", "[i]", key)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(a=a, b=b, autojunk=False).ratio()
