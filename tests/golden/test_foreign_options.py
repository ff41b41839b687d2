"""Every option of the tables, with every value that they name, becomes what its row promises.

An option stands in a small file of its system, beside what it needs to have an effect there, and the file is resolved.
"""

import json
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxtune.config import foreign, keys, read_recipe
from jaxtune.config.foreign import Option
from jaxtune.config.rules import inside
from jaxtune.config.schema import Config
from jaxtune.config.yaml_file import Written

# The least that a file of each system says.
LEAST: dict[str, dict[str, Any]] = {
    "surogate": {"model": "my/model", "datasets": [{"path": "a.jsonl", "type": "conversation"}], "sequence_len": 512},
    "xorl": {
        "model.model_path": "my/model",
        "data.datasets": [{"path": "a.jsonl", "type": "tokenized"}],
        "train.output_dir": "out",
    },
    "erniekit": {"model_name_or_path": "my/model", "train_dataset_path": "a.jsonl", "bf16": True},
    "qefficient": {
        "model.model_name": "my/model",
        "dataset.json_file_path": "a.json",
        "dataset.prompt_template": "Sum up: {text}",
        "dataset.completion_template": "{sum}",
        "optimizers.lr": 1e-4,
    },
}
LABELS = {"dataset.target_column": "label", "dataset.prompt_template": None, "dataset.completion_template": None}
EARLY = {
    "callbacks.early_stopping": True,
    "callbacks.early_stopping.early_stopping_patience": 5,
    "callbacks.early_stopping.early_stopping_threshold": 0.25,
}
# What options need beside them to have an effect, by their names, or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
    "surogate": {
        "adamw_": {"optimizer": "adamw"},
        "normuon_": {"optimizer": "normuon"},
        "warmup_steps": {"warmup_ratio": 0.0},
        "cooldown_steps": {"lr_scheduler_type": "wsd"},
        "offload_master": {"lora": False, "zero_level": 3},
        "offload_grads": {"lora": False, "zero_level": 3},
        "offload_quants": {"qlora_bnb": True},
        "fp8_amax_history": {"recipe": "fp8_hybrid"},
        "qlora_bnb_double_quant": {"qlora_bnb": True},
        "qlora_four_over_six": {"qlora_fp4": True},
        "log.wandb": {"report_to": "wandb"},
    },
    "xorl": {
        "data.dataset_shard_idx": {"data.dataset_shard_num": 4},
        "data.dataset_shard_num": {"data.dataset_shard_idx": 0},
        "model.ep_dispatch": {"train.expert_parallel_size": 2},
        "train.lr_start": {"train.lr_warmup_ratio": 0.1},
        "train.lr_decay_ratio": {"train.lr_decay_style": "linear"},
        "train.muon_": {"train.optimizer": "muon"},
        "data.eval_sample_packing": {"data.test_datasets": [{"path": "b.jsonl", "type": "tokenized"}]},
        "log.wandb.": {"train.use_wandb": True},
        "lora.": {"lora.enable_lora": True},
    },
    "erniekit": {
        "virtual_pp_degree": {"pipeline_parallel_degree": 2},
        "per_device_eval_batch_size": {"do_eval": True, "eval_dataset_path": "b.jsonl"},
        "scale_loss": {"bf16": False, "fp16": True},
    },
    "qefficient": {
        "model.auto_class_name": LABELS,
        "model.peft_config.task_type": LABELS,
        "training.metric_for_best_model": EARLY,
    },
}
# The same within the entry of a list.
IN_ENTRY: dict[str, dict[str, Any]] = {
    "text_field": {"type": "text"},
    "instruction_field": {"type": "instruction"},
    "output_field": {"type": "instruction"},
    "prompt_format": {"type": "instruction"},
    "prompt_format_no_input": {"type": "instruction", "prompt_format": "{instruction}"},
    "shards": {"shards_idx": 0},
    "shards_idx": {"shards": 4},
}
# Values of options that have a form of their own.
VALUES: dict[str, Any] = {
    "model.dtype": "float32",
    "chat.loss_scale": "last_round",
    "chat.agent_template": "react",
    "data.datasets[i].ds_type": "csv",
    "data.eval_datasets[i].ds_type": "csv",
    "data.datasets[i].select_columns": ["q_proj"],
    "optim.start_lr": 1e-6,
}
# Options that are read together with others: what a file says, and what that becomes.
OFF = {"recompute_block": False, "recompute_att": False, "recompute_ffn": False, "recompute_qkv": False}
DPO = {"stage": "DPO"}
# Columns of the data that their file does not name.
SCORES = [(f"data.datasets[0].{side}_score_field", side) for side in ("chosen", "rejected")]
POLYNOMIAL = {"lr_scheduler_type": "polynomial"}
EVALUATED = {"do_eval": True, "eval_dataset_path": "e.jsonl"}
TWO = {
    "train_dataset_path": "a.jsonl,b.jsonl",
    "train_dataset_prob": "0.8,0.2",
    "train_dataset_type": "erniekit,alpaca",
}
SPLIT = {"dataset.json_file_path": None, "dataset.dataset_name": "x/y"}
TOGETHER: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "surogate": {
        "checkpoint_dir": ({"checkpoint_dir": "elsewhere"}, {"ckpt.dir": "elsewhere"}),
        "recompute_block": ({**OFF, "recompute_block": True}, {"memory.remat": "block"}),
        "recompute_att": ({**OFF, "recompute_att": True}, {"memory.remat": "attention+qkv"}),
        "recompute_ffn": ({**OFF, "recompute_ffn": True}, {"memory.remat": "ffn"}),
        "recompute_qkv": ({**OFF, "recompute_qkv": True}, {"memory.remat": "qkv"}),
        "offload_residual": ({"offload_residual": True}, {"memory.remat": "offload"}),
        "zero_level": ({"zero_level": 2}, {"parallel.zero": 2}),
        "shard_weights": ({"shard_weights": True}, {"parallel.zero": 3}),
        "shard_gradients": ({"shard_gradients": True}, {"parallel.zero": 2}),
        "distributed.gpus_per_node": ({"gpus": 2, "distributed.gpus_per_node": 8}, {"device.gpus": 8}),
        "gpus": ({"gpus": 4}, {"device.gpus": 4}),
        "master_dtype": ({"lora": False, "master_dtype": "bf16"}, {"precision.master_dtype": "bfloat16"}),
        "skip_quant_first_layers": (
            {"qlora_fp8": True, "recipe": "fp8_hybrid", "skip_quant_first_layers": 2},
            {"quant.skip_first_layers": 2, "precision.skip_first_layers": 2},
        ),
        "skip_quant_last_layers": (
            {"qlora_fp8": True, "recipe": "fp8_hybrid", "skip_quant_last_layers": 2},
            {"quant.skip_last_layers": 2, "precision.skip_last_layers": 2},
        ),
        "datasets.input_field": (
            {"datasets": [{"path": "a", "type": "instruction", "input_field": "context"}]},
            {"data.datasets[0].input_field": "context"},
        ),
        "datasets.message_property_mappings": (
            {"datasets": [{"path": "a", "type": "conversation", "message_property_mappings": {"role": "from"}}]},
            {"data.datasets[0].message_property_mappings": ("role=from",)},
        ),
        "validation_datasets.input_field": (
            {"validation_datasets": [{"path": "a", "type": "instruction", "input_field": "context"}]},
            {"data.eval_datasets[0].input_field": "context"},
        ),
        "validation_datasets.message_property_mappings": (
            {
                "validation_datasets": [
                    {"path": "a", "type": "conversation", "message_property_mappings": {"role": "r"}}
                ]
            },
            {"data.eval_datasets[0].message_property_mappings": ("role=r",)},
        ),
        "lora_target_modules": ({"lora_target_modules": ["q_proj"]}, {"lora.target_modules": ("q_proj",)}),
        "qlora_fp4": ({"qlora_fp4": True}, {"quant.format": "nvfp4"}),
        "qlora_fp8": ({"qlora_fp8": True}, {"quant.format": "fp8", "quant.block_size": 128}),
        "qlora_bnb": ({"qlora_bnb": True}, {"quant.format": "nf4", "quant.block_size": 64}),
        "qlora_block_size": ({"qlora_fp8": True, "qlora_block_size": 64}, {"quant.block_size": 64}),
        "qlora_bnb_block_size": ({"qlora_bnb": True, "qlora_bnb_block_size": 128}, {"quant.block_size": 128}),
    },
    "xorl": {
        "model.model_path": ({}, {"model.path": "my/model", "model.from_scratch": False}),
        "model.config_path": (
            {"model.model_path": None, "model.config_path": "x"},
            {"model.path": "x", "model.from_scratch": True},
        ),
        "model.tokenizer_path": ({"model.tokenizer_path": "my/model"}, {"model.path": "my/model"}),
        "data.sample_packing_method": (
            {"data.sample_packing_method": "multipack"},
            {"data.packing_method": "first_fit_decreasing"},
        ),
        "data.sample_packing_sequentially": (
            {"data.sample_packing_method": "multipack", "data.sample_packing_sequentially": True},
            {"data.packing_method": "sequential"},
        ),
        "train.data_parallel_mode": ({"train.data_parallel_mode": "ddp"}, {"mesh.data": -1, "mesh.fsdp": 1}),
        "train.data_parallel_shard_size": ({"train.data_parallel_shard_size": 4}, {"mesh.data": 1, "mesh.fsdp": 4}),
        "train.data_parallel_replicate_size": (
            {"train.data_parallel_replicate_size": 2},
            {"mesh.data": 2, "mesh.fsdp": -1},
        ),
        "train.pipeline_parallel_schedule": (
            {"train.pipeline_parallel_size": 2, "train.pipeline_parallel_schedule": "GPipe"},
            {"parallel.pipeline": "gpipe"},
        ),
        "train.optimizer": ({"train.optimizer": "sgd"}, {"optim.name": "sgd", "optim.beta1": 0.0}),
        "train.optimizer_dtype": (
            {"train.optimizer": "anyprecision_adamw", "train.optimizer_dtype": "fp32"},
            {"optim.name": "adamw", "optim.state_dtype": "float32"},
        ),
        "train.lr_min": ({"train.lr_decay_style": "cosine", "train.lr_min": 1e-6}, {"optim.min_lr": 1e-6}),
        "train.no_decay_modules": (
            {"train.weight_decay": 0.1, "train.no_decay_modules": ["norm"]},
            {"optim.no_decay": "norm"},
        ),
        "train.no_decay_params": (
            {"train.weight_decay": 0.1, "train.no_decay_modules": ["norm"], "train.no_decay_params": ["bias"]},
            {"optim.no_decay": "norm|bias"},
        ),
        "train.muon_lr": ({"train.optimizer": "muon", "train.muon_lr": 0.01}, {"optim.muon.learning_rate": 0.01}),
        "train.enable_gradient_checkpointing": (
            {"train.enable_gradient_checkpointing": False},
            {"memory.remat": "none"},
        ),
        "train.recompute_modules": ({"train.recompute_modules": ["self_attn"]}, {"memory.remat": "attention+qkv"}),
        "train.moe_checkpoint_method": ({"train.moe_checkpoint_method": "moe_act"}, {"memory.remat": "experts"}),
        "train.enable_activation_offload": ({"train.enable_activation_offload": True}, {"memory.remat": "offload"}),
        "train.load_checkpoint_path": ({"train.load_checkpoint_path": "auto"}, {"ckpt.resume": "auto"}),
        "train.enable_profiling": ({"train.enable_profiling": True}, {"prof.enabled": True, "prof.steps": 1}),
        "train.profile_start_step": (
            {"train.enable_profiling": True, "train.profile_start_step": 4, "train.profile_end_step": 9},
            {"prof.start_step": 4, "prof.steps": 5},
        ),
        "train.profile_end_step": (
            {"train.enable_profiling": True, "train.profile_end_step": 9},
            {"prof.start_step": 1, "prof.steps": 8},
        ),
        "lora.enable_lora": ({"lora.enable_lora": True}, {"lora.enabled": True, "quant.format": None}),
        "lora.enable_qlora": ({"lora.enable_qlora": True}, {"lora.enabled": True, "quant.format": "nvfp4"}),
        "lora.quant_format": ({"lora.enable_qlora": True, "lora.quant_format": "block_fp8"}, {"quant.format": "fp8"}),
        "lora.quant_group_size": (
            {"lora.enable_qlora": True, "lora.quant_format": "nf4", "lora.quant_group_size": 128},
            {"quant.block_size": 128},
        ),
        "lora.exclude_modules": (
            {"lora.enable_qlora": True, "lora.exclude_modules": ["lm_head", "a.b"]},
            {"quant.exclude": r"lm_head|a\.b"},
        ),
    },
    "erniekit": {
        "stage": (DPO, {"preference.loss": "sigmoid", "data.datasets[0].type": "preference"}),
        "fine_tuning": ({"fine_tuning": "LoRA"}, {"lora.enabled": True}),
        "weight_quantize_algo": (
            {"lora": True, "weight_quantize_algo": "weight_only_int8"},
            {"quant.format": "int8"},
        ),
        "do_eval": (EVALUATED, {"data.eval_datasets[0].path": "e.jsonl"}),
        "eval_dataset_path": ({"eval_dataset_path": "e.jsonl"}, {"data.eval_datasets": ()}),
        "eval_dataset_prob": (
            {**EVALUATED, "eval_dataset_path": "e,f", "eval_dataset_prob": "0.25,0.75"},
            {"data.eval_datasets[0].path": "e", "data.eval_datasets[1].path": "f"},
        ),
        "eval_dataset_type": (
            {**EVALUATED, "eval_dataset_type": "alpaca"},
            {"data.eval_datasets[0].type": "instruction"},
        ),
        "eval_steps": ({**EVALUATED, "eval_steps": 7}, {"eval.steps": 7}),
        "evaluation_strategy": ({**EVALUATED, "evaluation_strategy": "no"}, {"data.eval_datasets": ()}),
        "max_evaluate_steps": ({**EVALUATED, "max_evaluate_steps": 9}, {"eval.max_batches": 9}),
        "train_dataset_path": ({}, {"data.datasets[0].path": "a.jsonl", "data.datasets[0].type": "conversation"}),
        "train_dataset_prob": (TWO, {"data.datasets[0].weight": 0.8, "data.datasets[1].weight": 0.2}),
        "train_dataset_type": (TWO, {"data.datasets[1].type": "instruction", "data.mixing": "interleave_over"}),
        "lr_scheduler_type": ({"lr_scheduler_type": "constant_with_warmup"}, {"optim.schedule": "constant"}),
        "min_lr": ({"lr_scheduler_type": "cosine", "min_lr": 1e-6}, {"optim.min_lr": 1e-6}),
        "num_cycles": ({"lr_scheduler_type": "cosine", "num_cycles": 1.5}, {"optim.cycles": 1.5}),
        "lr_end": ({**POLYNOMIAL, "lr_end": 1e-6}, {"optim.min_lr": 1e-6}),
        "power": ({**POLYNOMIAL, "power": 2.0}, {"optim.power": 2.0}),
        "sharding_parallel_degree": ({"sharding_parallel_degree": 4}, {"mesh.fsdp": 4, "mesh.data": -1}),
        "recompute": ({"recompute": True}, {"memory.remat": "block"}),
        "recompute_granularity": (
            {"recompute": True, "recompute_granularity": "full_attn"},
            {"memory.remat": "attention+qkv"},
        ),
        "offload_optim": ({"offload_optim": True}, {"memory.offload_optimizer": True}),
        "tensorwise_offload_optimizer": ({"tensorwise_offload_optimizer": True}, {"memory.offload_optimizer": True}),
        "save_steps": ({"save_strategy": "steps", "save_steps": 7}, {"ckpt.save_steps": 7}),
        "save_strategy": ({"save_strategy": "no", "save_steps": 7}, {"ckpt.save_steps": 0}),
        "bf16": ({"bf16": False}, {"precision.recipe": "fp32", "model.dtype": "float32"}),
        "fp16": ({"bf16": False, "fp16": True}, {"precision.recipe": "fp16"}),
        "compute_type": ({"compute_type": "fp8"}, {"precision.recipe": "fp8_hybrid"}),
        "fp16_opt_level": ({"fp16_opt_level": "O2"}, {"model.dtype": "bfloat16"}),
        "amp_master_grad": (
            {"fp16_opt_level": "O2", "amp_master_grad": True},
            {"precision.gradient_dtype": "float32"},
        ),
        "apply_hadamard": (
            {"compute_type": "fp8", "apply_hadamard": False},
            {"precision.fp8.hadamard": False},
        ),
        "apply_online_actscale_step": (
            {"compute_type": "fp8", "apply_online_actscale_step": 9},
            {"precision.fp8.online_scale_steps": 9},
        ),
        "lora": ({"lora": True}, {"lora.enabled": True}),
        "lora_rank": ({"lora": True, "lora_rank": 4}, {"lora.rank": 4}),
        "lora_alpha": ({"lora": True, "lora_alpha": 4}, {"lora.alpha": 4.0}),
        "rslora": ({"lora": True, "rslora": True}, {"lora.use_rslora": True}),
        "lora_plus_scale": ({"lora": True, "lora_plus_scale": 16}, {"optim.lr_multipliers": ("lora_B=16",)}),
        "rslora_plus": ({"lora": True, "rslora_plus": True}, {"lora.use_rslora": True, "lora.alpha": 4.0}),
        "beta": ({**DPO, "beta": 0.5}, {"preference.beta": 0.5}),
        "simpo_gamma": ({**DPO, "loss_type": "simpo", "simpo_gamma": 1.0}, {"preference.simpo_gamma": 1.0}),
        "offset_alpha": (
            {**DPO, "offset_alpha": 0.5},
            {"preference.offset_alpha": 0.5},
        ),
        "max_prompt_len": ({**DPO, "max_prompt_len": 32}, {"data.datasets[0].max_prompt_tokens": 32}),
        "loss_type": ({**DPO, "loss_type": "ipo"}, {"preference.loss": "ipo"}),
        "pref_loss_ratio": ({**DPO, "pref_loss_ratio": 0.5}, {"preference.loss_weight": 0.5}),
        "sft_loss_ratio": ({**DPO, "sft_loss_ratio": 0.5}, {"preference.sft_weight": 0.5}),
        "label_smoothing": ({**DPO, "label_smoothing": 0.1}, {"preference.label_smoothing": 0.1}),
        "reference_free": ({**DPO, "reference_free": True}, {"preference.reference": None}),
        "ref_model_update_steps": ({**DPO, "ref_model_update_steps": 5}, {"preference.reference_update_steps": 5}),
    },
    "qefficient": {
        "dataset.tokenizer_name": ({"dataset.tokenizer_name": "my/model"}, {"model.path": "my/model"}),
        "dataset.dataset_name": (SPLIT, {"data.datasets[0].path": "x/y"}),
        "dataset.json_file_path": ({"dataset.dataset_name": "x/y"}, {"data.datasets[0].path": "a.json"}),
        "dataset.prompt_template": (
            {"dataset.prompt_template": 'f"Correct:\\n{text}"'},
            {"data.datasets[0].prompt_format": "Correct:\n{text}"},
        ),
        "dataset.completion_template": (
            {"dataset.completion_template": "{title}: {sum}"},
            {"data.datasets[0].output_field": "{title}: {sum}"},
        ),
        "dataset.prompt_func": (
            {"dataset.prompt_template": None, "dataset.prompt_func": "a/b:write"},
            {"data.datasets[0].prompt_format": "{returned}", "data.datasets[0].function": "a/b.py:write"},
        ),
        "dataset.completion_func": (
            {"dataset.completion_template": None, "dataset.completion_func": "a/b.py:write"},
            {"data.datasets[0].output_field": "returned", "data.datasets[0].function": "a/b.py:write"},
        ),
        "dataset.train_split": ({**SPLIT, "dataset.train_split": "some"}, {"data.datasets[0].split": "some"}),
        "dataset.test_split": ({**SPLIT, "dataset.test_split": "some"}, {"data.eval_datasets[0].split": "some"}),
        "dataset.split_ratio": ({"dataset.split_ratio": 0.75}, {"data.validation_split": 0.25}),
        "dataset.dataset_subset": ({**SPLIT, "dataset.dataset_subset": "main"}, {"data.datasets[0].subset": "main"}),
        "dataset.max_seq_length": ({"dataset.max_seq_length": 64}, {"data.seq_len": 64, "data.truncation": "right"}),
        "dataset.input_columns": (
            {**LABELS, "dataset.input_columns": ["title", "body"]},
            {"data.datasets[0].text_field": "{title} {body}"},
        ),
        "dataset.target_column": (
            {**LABELS, "dataset.target_column": "kind"},
            {"model.head": "classification", "data.datasets[0].target_column": "kind"},
        ),
        "dataset.num_workers": ({"dataset.num_workers": 3}, {"data.num_workers": 3}),
        "dataset.dataloader_num_workers": ({"dataset.dataloader_num_workers": 3}, {"data.num_workers": 3}),
        "training.do_eval": ({"training.do_eval": False}, {"data.validation_split": 0.0}),
        "training.eval_strategy": ({"training.eval_strategy": "no"}, {"data.validation_split": 0.0}),
        "training.eval_steps": ({"training.eval_strategy": "steps", "training.eval_steps": 7}, {"eval.steps": 7}),
        "training.device": ({"training.device": "cuda"}, {"device.platform": "cuda"}),
        "training.use_cpu": ({"training.use_cpu": True}, {"device.platform": "cpu"}),
        "training.save_strategy": ({"training.save_strategy": "no"}, {"ckpt.save_steps": 0, "ckpt.at_end": False}),
        "callbacks.early_stopping": (EARLY, {"eval.patience": 5}),
        "callbacks.early_stopping.early_stopping_patience": (EARLY, {"eval.patience": 5}),
        "callbacks.early_stopping.early_stopping_threshold": (EARLY, {"eval.min_improvement": 0.25}),
        "training.save_steps": ({"training.save_strategy": "steps", "training.save_steps": 7}, {"ckpt.save_steps": 7}),
        "training.fsdp_config": ({"training.fsdp_config": {"a": 1}}, {"mesh.fsdp": -1}),
        "scheduler.warmup_steps": ({"scheduler.warmup_steps": 0.25}, {"optim.warmup_ratio": 0.25}),
    },
}


def options(dialect: str) -> Iterator[tuple[str, str, Option]]:
    """(the list whose entries have the option, its name, its row)."""
    for name, row in foreign.table(dialect).items():
        yield "", name, row
        yield from ((name, inner, of) for inner, of in row.of.items())


ALONE = [
    pytest.param(dialect, entries, name, row, id=f"{dialect} {entries and f'{entries}.'}{name}")
    for dialect in foreign.DIALECTS
    for entries, name, row in options(dialect)
    if row.key or row.values
]


def promised(row: Option, key: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Values of an option, and what each becomes here."""
    for text, here in row.values.items():
        value = {"true": True, "false": False}.get(str(text).lower(), text)
        value = int(value) if str(value).lstrip("-").isdigit() else value
        yield value, dict(here) if isinstance(here, Mapping) else {} if here is None else dict.fromkeys(row.keys, here)
    if key and (row.others or not row.values):
        value = another(key, row.default)
        yield value, dict.fromkeys(row.keys, tuple(value) if isinstance(value, list) else value)


def another(key: str, default: Any) -> Any:
    """A value that an option may have, other than its default here and that of the other system."""
    option = keys.lookup(key)
    assert option is not None
    members = typing.get_args(option.annotation)
    if key in VALUES:
        return VALUES[key]
    if option.annotation is bool:
        return default is not True
    if typing.get_origin(option.annotation) is typing.Literal:
        candidates = members
    elif option.annotation is float or float in members:
        candidates = (0.25, 0.5, 4096.0)
    elif bool in members:
        candidates = (True, False)
    elif option.annotation is int or int in members:
        candidates = (3, 5)
    elif typing.get_origin(option.annotation) is tuple:
        candidates = (["q_proj"],)
    else:
        candidates = ("some", "other")
    return next(
        value
        for value in candidates
        if value not in (option.default, default)
        and (isinstance(value, str | list | bool) or inside(value, option.within))
    )


def value_of(config: Config, key: str) -> Any:
    found: Any = config
    for part in re.sub(r"\[(\d)\]", r".\1", key.replace("[i]", "[0]")).split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def becomes(dialect: str, said: Mapping[str, Any], expected: Mapping[str, Any], folder: pathlib.Path) -> None:
    file = folder / "its.yaml"
    file.write_text(json.dumps(said))
    overrides = SCORES if "offset_alpha" in said else ()
    config = read_recipe(str(file), dialect=dialect).resolve(overrides)
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(("dialect", "entries", "name", "row"), ALONE)
def test_an_option_becomes_what_its_row_promises(dialect, entries, name, row, tmp_path):
    of = foreign.table(dialect)[entries].entries if entries else ""
    key = f"{of}[i].{row.keys[0]}" if of else row.keys[0]
    for value, settings in promised(row, key):
        said: dict[str, Any] = dict(LEAST[dialect])
        for other, more in BESIDE[dialect].items():
            if name.startswith(other) or key.startswith(other):
                said |= more
        if entries:
            first = next(iter(said["datasets" if "datasets" in said else "data.datasets"]))
            said[entries] = [{**first, **IN_ENTRY.get(name, {}), name: value}]
        else:
            said[name] = value
        becomes(dialect, said, {f"{of}[0].{key}" if of else key: here for key, here in settings.items()}, tmp_path)


def read_together(dialect: str) -> set[str]:
    return {f"{entries and f'{entries}.'}{name}" for entries, name, row in options(dialect) if row.convert}


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_each_option_that_is_read_with_others_is_here(dialect):
    assert TOGETHER[dialect].keys() == read_together(dialect)


@pytest.mark.parametrize(
    ("dialect", "option"), [(dialect, option) for dialect in TOGETHER for option in TOGETHER[dialect]]
)
def test_options_that_are_read_together_become_this(dialect, option, tmp_path):
    said, expected = TOGETHER[dialect][option]
    becomes(dialect, {**LEAST[dialect], **said}, expected, tmp_path)


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_an_option_without_a_meaning_here_is_answered_by_its_reason(dialect):
    for entries, name, row in options(dialect):
        if not row.reason:
            continue
        for value in (row.sample, True, "x"):
            said = {**LEAST[dialect], name: value}
            if entries:
                said = {**LEAST[dialect], entries: [{"path": "a", "type": "text", name: value}]}
            lines = {line.option: line for line in foreign.translate(Written(said, {}), dialect).lines}
            line = lines[f"{entries}[0].{name}" if entries else name]
            fits = value is row.sample or not line.wrong
            assert (line.text == row.reason and not line.settings) if fits else "expected a value" in line.text, name
