"""Every option of the tables, with every value in its row, is translated as the row says.

Each option is written to a small file of its system, with the options it needs to have an effect there, and resolved.
"""

import json
import pathlib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxtune.config import foreign, keys, read_recipe
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.option_rules import in_interval
from jaxtune.config.schema import Config
from jaxtune.config.sources.yaml_file import YamlFile

# The minimal file of each system.
LEAST: dict[str, dict[str, Any]] = {
    "surogate": {"model": "my/model", "datasets": [{"path": "a.jsonl", "type": "conversation"}], "sequence_len": 512},
    "xorl": {
        "model.model_path": "my/model",
        "data.datasets": [{"path": "a.jsonl", "type": "tokenized"}],
        "train.output_dir": "out",
    },
    "erniekit": {"model_name_or_path": "my/model", "train_dataset_path": "a.jsonl", "bf16": True},
    "trl": {"model_name_or_path": "my/model", "dataset_name": "a/b"},
    "axolotl": {
        "base_model": "my/model",
        "datasets": [{"path": "a/b", "type": "chat_template"}],
        "learning_rate": 1e-4,
        "gradient_checkpointing": True,
    },
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
PAIRS = {"path": "a.jsonl", "type": "preference"}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
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
        "log.aim": {"report_to": "aim"},
        "init_projections_to_zero": {"lora": False},
        "from_scratch": {"lora": False},
        "no_fp4_": {"recipe": "nvfp4", "lora": False},
        "prompt_field": {"datasets": [PAIRS]},
        "chosen_field": {"datasets": [PAIRS]},
        "rejected_field": {"datasets": [PAIRS]},
    },
    "xorl": {
        "data.dataset_shard_idx": {"data.dataset_shard_num": 4},
        "data.dataset_shard_num": {"data.dataset_shard_idx": 0},
        "model.ep_dispatch": {"train.expert_parallel_size": 2},
        "train.pipeline_parallel_virtual_stages": {"train.pipeline_parallel_size": 2},
        "train.lr_start": {"train.lr_warmup_ratio": 0.1},
        "train.lr_decay_ratio": {"train.lr_decay_style": "linear"},
        "train.muon_": {"train.optimizer": "muon"},
        "data.eval_sample_packing": {"data.test_datasets": [{"path": "b.jsonl", "type": "tokenized"}]},
        "log.wandb.": {"train.use_wandb": True},
        "lora.reset_on_merge": {"lora.merge_lora_interval": 5},
        "lora.": {"lora.enable_lora": True},
    },
    "erniekit": {
        "dropout_warmup_steps": {"hidden_dropout_prob": 0.1},
        "virtual_pp_degree": {"pipeline_parallel_degree": 2},
        "per_device_eval_batch_size": {"do_eval": True, "eval_dataset_path": "b.jsonl"},
        "scale_loss": {"bf16": False, "fp16": True},
    },
    "trl": {
        "log.wandb": {"report_to": "wandb"},
        "lora": {"use_peft": True},
        "quant": {"use_peft": True, "load_in_4bit": True},
        "dataset_streaming": {"max_steps": 5},
        "streaming": {"max_steps": 5},
        "data.prefetch": {"dataloader_num_workers": 4},
        "eval.": {"eval_strategy": "steps"},
        "load_best_model_at_end": {"eval_strategy": "steps"},
        "greater_is_better": {"eval_strategy": "steps", "load_best_model_at_end": True},
        "max_prompt_length": {"beta": 0.1},
    },
    "axolotl": {
        "lora": {"adapter": "lora"},
        "merge_lora": {"adapter": "lora"},
        "peft_init_lora_weights": {"adapter": "lora"},
        "eval.": {"val_set_size": 0.1},
        "load_best_model_at_end": {"val_set_size": 0.1},
        "greater_is_better": {"load_best_model_at_end": True},
        "data.datasets": {"max_steps": 5},
        "dataset_shard_num": {"dataset_shard_idx": 0},
        "dataset_shard_idx": {"dataset_shard_num": 4},
        "log.wandb.name": {"use_wandb": True},
        "loss_watchdog_patience": {"loss_watchdog_threshold": 5.0},
    },
    "qefficient": {
        "model.auto_class_name": LABELS,
        "model.peft_config.task_type": LABELS,
        "training.metric_for_best_model": EARLY,
    },
}
# Dataset lists that replace another way to name data, which LEAST uses.
INSTEAD = {
    ("trl", "datasets"): "dataset_name",
    ("trl", "dataset_mixture.datasets"): "dataset_name",
    ("axolotl", "pretraining_dataset"): "datasets",
}
# Likewise within the entry of a list.
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
    "lora.layers_to_transform": [0, 2],
}
# Options that are read together with others: the lines of the file, and their translation.
ALPACA = "### Instruction:\n{instruction}\n\n### Response:\n"
OFF = {"recompute_block": False, "recompute_att": False, "recompute_ffn": False, "recompute_qkv": False}
DPO = {"stage": "DPO"}
# Options that are needed here and that their files cannot set.
TYPED = {
    "offset_alpha": [(f"data.datasets[0].{side}_score_field", side) for side in ("chosen", "rejected")],
    "init_projections_to_zero": [("model.from_scratch", "true")],
}
GRPO = {"reward_funcs": ["my_rewards.right"]}
GKD = {"teacher_model_name_or_path": "big/one", "lmbda": 0.0}
SYSTEM = {"system_prompt_field": "sysp", "system_prompt": "FIXED"}
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
        "rope_scaling": (
            {"rope_scaling": "yarn", "max_model_len": 8192},
            {"model.rope_scaling": "yarn", "model.max_positions": 8192},
        ),
        "max_model_len": ({"rope_scaling": "linear", "max_model_len": 4096}, {"model.max_positions": 4096}),
        "checkpoint_dir": ({"checkpoint_dir": "elsewhere"}, {"ckpt.dir": "elsewhere"}),
        "recompute_block": ({**OFF, "recompute_block": True}, {"memory.remat": "block"}),
        "recompute_att": ({**OFF, "recompute_att": True}, {"memory.remat": "attention+qkv"}),
        "recompute_ffn": ({**OFF, "recompute_ffn": True}, {"memory.remat": "ffn"}),
        "recompute_qkv": ({**OFF, "recompute_qkv": True}, {"memory.remat": "qkv"}),
        "offload_residual": ({"offload_residual": True}, {"memory.remat": "offload"}),
        "recompute": ({"recompute": False}, {"memory.remat": "none"}),
        "recompute_lora": ({**OFF, "recompute_lora": True}, {"memory.remat": "block"}),
        "cpu_training": (
            {"lora": False, "cpu_training": True},
            {
                "memory.offload_master": True,
                "memory.offload_gradients": True,
                "memory.offload_optimizer": True,
                "parallel.zero": 3,
                "optim.name": "adamw",
            },
        ),
        "offload_master": ({"lora": False, "zero_level": 3, "offload_master": True}, {"memory.offload_master": True}),
        "offload_quants": ({"qlora_bnb": True, "offload_quants": True}, {"memory.offload_quants": True}),
        "offload_optimizer": ({"offload_optimizer": True}, {"memory.offload_optimizer": True}),
        "offload_grads": ({"lora": False, "zero_level": 3, "offload_grads": True}, {"memory.offload_gradients": True}),
        "qlora_offload_experts": (
            {"qlora_fp8": True, "qlora_offload_experts": True, "ep_size": 2, "gpus": 2},
            {"memory.offload_quants": True, "mesh.expert": 1, "parallel.zero": 3},
        ),
        "parallelism": ({"gpus": 2, "parallelism": "dispatch_pp"}, {"parallel.zero": 3, "mesh.stage": 1}),
        "ep_size": ({"gpus": 4, "ep_size": 2}, {"mesh.expert": 2, "mesh.fsdp": -1, "parallel.zero": 1}),
        "distributed.num_nodes": (
            {"distributed.num_nodes": 2, "distributed.gpus_per_node": 8, "sequence_parallel_size": 2},
            {"mesh.fsdp": 8, "mesh.sequence": 2, "device.gpus": 8},
        ),
        "optimizer": ({"optimizer": "normuon"}, {"optim.name": "normuon"}),
        "warmup_ratio": ({"warmup_ratio": 0.25}, {"optim.warmup_ratio": 0.25}),
        "weight_decay": (
            {"lora": False, "weight_decay": 0.25},
            {"optim.weight_decay": 0.25, "optim.no_decay": "norm|bias"},
        ),
        "sequence_len": ({"sequence_len": 512}, {"data.seq_len": 512}),
        "per_device_train_batch_size": ({"per_device_train_batch_size": 3}, {"train.micro_batch_size": 3}),
        "sample_packing": ({"sample_packing": "bin"}, {"data.packing": True}),
        "template": ({"template": "llama3"}, {"chat.template": "llama3"}),
        "system": ({"system": "Be\\nkind"}, {"data.datasets[0].system_prompt": "Be\nkind"}),
        "response_prefix": ({"response_prefix": "A\\n"}, {"chat.response_prefix": "A\n"}),
        "max_pixels": ({"max_pixels": 4096}, {"vision.patches_per_row": 2048, "vision.max_pixels": 4096}),
        "norm_bbox": ({"norm_bbox": "none"}, {"vision.patches_per_row": 2048, "vision.norm_bbox": "none"}),
        "max_length": (
            {"max_length": 64, "truncation_strategy": "right"},
            {"data.datasets[0].max_tokens": 64, "data.datasets[0].longer": "right", "data.truncation": "right"},
        ),
        "truncation_strategy": ({"truncation_strategy": "left"}, {"data.truncation": "left"}),
        **{
            f"{entries}.{name}": (
                {entries: [{"path": "a", "type": "instruction", "system_prompt_type": kind, **SYSTEM}]},
                {f"{ours}[0].system_field": column, f"{ours}[0].system_prompt": text},
            )
            for entries, ours in (("datasets", "data.datasets"), ("validation_datasets", "data.eval_datasets"))
            for name, kind, column, text in (
                ("system_prompt_type", None, None, None),
                ("system_prompt_field", "field", "sysp", None),
                ("system_prompt", "fixed", None, "FIXED"),
            )
        },
        "loss.type": (
            {"loss.type": "dpo", "datasets": [PAIRS], "per_device_train_batch_size": 8},
            {"preference.loss": "sigmoid", "train.micro_batch_size": 4, "data.packing": False, "data.seq_len": 1024},
        ),
        "loss.dpo_beta": ({"datasets": [PAIRS], "loss.dpo_beta": 0.5}, {"preference.beta": 0.5}),
        "loss.length_norm": ({"datasets": [PAIRS], "loss.length_norm": True}, {"preference.loss": "sigmoid_norm"}),
        "loss.reference_free": ({"datasets": [PAIRS], "loss.reference_free": True}, {"preference.reference": None}),
        "loss.target_margin": (
            {"datasets": [PAIRS], "loss.length_norm": True, "loss.reference_free": True, "loss.target_margin": 0.75},
            {"preference.loss": "simpo", "preference.simpo_gamma": 0.75},
        ),
        **{
            f"distillation.{name}": ({"distillation.teacher_model": "t", f"distillation.{name}": given}, expected)
            for name, given, expected in (
                ("teacher_model", "t", {"distill.teacher": "t", "distill.weight": 0.5, "distill.top_k": 32}),
                ("top_k", 8, {"distill.top_k": 8}),
                ("temperature", 2.0, {"distill.temperature": 2.0, "distill.weight": 0.8}),
                ("kd_weight", 0.25, {"distill.weight": 0.25}),
                ("ce_weight", 1.5, {"distill.weight": 0.25}),
            )
        },
        "zero_level": ({"zero_level": 2}, {"parallel.zero": 2}),
        "shard_weights": ({"shard_weights": True}, {"parallel.zero": 3}),
        "shard_gradients": ({"shard_gradients": True}, {"parallel.zero": 2}),
        "distributed.gpus_per_node": ({"gpus": 2, "distributed.gpus_per_node": 8}, {"device.gpus": 8}),
        "gpus": ({"gpus": 4}, {"device.gpus": 4}),
        "gradient_dtype": ({"recipe": "fp8_hybrid", "gradient_dtype": "e5m2"}, {"precision.recipe": "fp8_hybrid"}),
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
        "model.tokenizer_path": (
            {"model.tokenizer_path": "other"},
            {"model.path": "my/model", "model.tokenizer": "other"},
        ),
        "model.foundation": ({"model.foundation": {"rope_theta": 5e5}}, {"model.overrides": ("rope_theta=500000.0",)}),
        "model.encoders": ({"model.encoders": {"image": {}}}, {"vision.patches_per_row": 128_000}),
        "data.sample_packing_method": (
            {"data.sample_packing_method": "multipack"},
            {"data.packing_method": "first_fit_decreasing"},
        ),
        "data.sample_packing_sequentially": (
            {"data.sample_packing_method": "multipack", "data.sample_packing_sequentially": True},
            {"data.packing_method": "sequential"},
        ),
        "train.data_parallel_mode": ({"train.data_parallel_mode": "ddp"}, {"mesh.data": -1, "mesh.fsdp": 1}),
        "train.data_parallel_shard_size": ({"train.data_parallel_shard_size": 4}, {"mesh.data": -1, "mesh.fsdp": 4}),
        "train.expert_parallel_size": (
            {"train.data_parallel_shard_size": 8, "train.expert_parallel_size": 4},
            {"mesh.data": -1, "mesh.fsdp": 2, "mesh.expert": 4},
        ),
        "train.data_parallel_replicate_size": (
            {"train.data_parallel_replicate_size": 2},
            {"mesh.data": 2, "mesh.fsdp": -1},
        ),
        "train.pipeline_parallel_schedule": (
            {"train.pipeline_parallel_size": 2, "train.pipeline_parallel_schedule": "GPipe"},
            {"parallel.pipeline": "gpipe"},
        ),
        "data.datasets.path": (
            {"data.datasets": [{"path": "dummy"}], "data.select_columns": ["input_ids", "labels"]},
            {
                "data.datasets[0].samples": 4096,
                "data.datasets[0].dummy_length": 32000,
                "data.datasets[0].select_columns": None,
            },
        ),
        "data.datasets.shards": ({"data.datasets": [{"path": "a", "shards": 4}]}, {"data.datasets[0].shard_idx": 0}),
        "data.datasets.shards_idx": (
            {"data.datasets": [{"path": "a", "shards": 4, "shards_idx": 2}]},
            {"data.datasets[0].shards": 4, "data.datasets[0].shard_idx": 2},
        ),
        "data.test_datasets.path": (
            {"data.test_datasets": [{"path": "dummy", "max_seq_len": 64, "num_samples": 9}]},
            {"data.eval_datasets[0].samples": 9, "data.eval_datasets[0].dummy_length": 64},
        ),
        "data.test_datasets.shards": (
            {"data.test_datasets": [{"path": "a", "shards": 4}]},
            {"data.eval_datasets[0].shard_idx": 0},
        ),
        "data.test_datasets.shards_idx": (
            {"data.test_datasets": [{"path": "a", "shards": 4, "shards_idx": 2}]},
            {"data.eval_datasets[0].shard_idx": 2},
        ),
        "data.select_columns": (
            {"data.datasets": [{"path": "dummy"}, {"path": "a"}], "data.select_columns": ["x"]},
            {"data.datasets[0].select_columns": None, "data.datasets[1].select_columns": ("x",)},
        ),
        "data.shuffle_merged_datasets": ({"data.shuffle_merged_datasets": False}, {"data.shuffle": False}),
        "data.shuffle_before_merging_datasets": (
            {"data.datasets": [{"path": "a"}, {"path": "b"}], "data.shuffle_merged_datasets": False},
            {"data.shuffle": True, "data.shuffle_each": True},
        ),
        "train.gradient_checkpointing_method": (
            {"train.gradient_checkpointing_method": "recompute_before_dispatch"},
            {"memory.remat": "attention+qkv"},
        ),
        "lora.lora_target_modules": (
            {"lora.enable_lora": True, "lora.lora_target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]},
            {"lora.target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")},
        ),
        "lora.save_lora_only": ({"lora.enable_lora": True}, {"export.merge": True}),
        **{
            f"distill.{name}": (
                {"distill.enable_distillation": True, "distill.teacher_model_path": "t", f"distill.{name}": given},
                {"distill.teacher": "t", "distill.divergence": divergence, "distill.weight": 1.0},
            )
            for name, given, divergence in (
                ("enable_distillation", True, "forward_kl"),
                ("teacher_model_path", "t", "forward_kl"),
                ("distillation_loss_type", "reverse_kl", "reverse_kl"),
                ("distillation_loss_weight", 1.0, "forward_kl"),
            )
        },
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
        "train.activation_gpu_limit": (
            {"train.enable_activation_offload": True, "train.activation_gpu_limit": 10.0},
            {"memory.remat": "auto"},
        ),
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
        "train.profile_trace_dir": (
            {"train.enable_profiling": True, "train.profile_trace_dir": "there"},
            {"prof.dir": "there"},
        ),
        "train.profile_profile_memory": (
            {"train.enable_profiling": True, "train.profile_profile_memory": False},
            {"prof.memory": False},
        ),
        "train.profile_rank0_only": (
            {"train.enable_profiling": True, "train.profile_rank0_only": False},
            {"prof.every_process": True},
        ),
        "lora.enable_aqn": ({"lora.enable_qlora": True, "lora.enable_aqn": True}, {"quant.noise": 0.01}),
        "lora.aqn_alpha": (
            {"lora.enable_qlora": True, "lora.enable_aqn": True, "lora.aqn_alpha": 2.0},
            {"quant.noise": 0.02},
        ),
        "lora.exclude_modules": (
            {"lora.enable_qlora": True, "lora.exclude_modules": ["lm_head", "gate", "qkv_proj"]},
            {"quant.exclude": r"\.(q_proj|k_proj|v_proj)$"},
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
        "hidden_dropout_prob": (
            {"hidden_dropout_prob": 0.25},
            {"train.hidden_dropout": 0.25, "train.dropout_by_depth": True},
        ),
        "attention_probs_dropout_prob": (
            {"attention_probs_dropout_prob": 0.25},
            {"train.attention_dropout": 0.25, "train.dropout_by_depth": True},
        ),
        "do_train": ({**EVALUATED, "do_train": False}, {"data.datasets": (), "data.eval_datasets[0].path": "e.jsonl"}),
        "learning_rate": ({**DPO, "lora": True}, {"optim.learning_rate": 1e-5}),
        "weight_decay": ({"weight_decay": 0.1}, {"optim.weight_decay": 0.1, "optim.no_decay": "norm|bias"}),
        "mix_strategy": (
            {**TWO, "mix_strategy": "interleave_under"},
            {"data.mixing": "interleave_under", "data.datasets[0].weight": 0.8},
        ),
        "num_samples_each_epoch": ({"num_samples_each_epoch": 500}, {"data.samples_per_epoch": 500}),
        "moe_multimodal_dispatch_use_allgather": (
            {"moe_multimodal_dispatch_use_allgather": ""},
            {"experts.dispatch": "all_gather"},  # no experts on a mesh: the option has no effect
        ),
        "unified_checkpoint_config": (
            {"unified_checkpoint_config": "async_save ignore_merge_optimizer"},
            {"ckpt.save_optimizer": True},
        ),
        "amp_custom_white_list": ({"amp_custom_white_list": "matmul flash_attn"}, {"precision.recipe": "bf16"}),
        "amp_custom_black_list": ({"amp_custom_black_list": "reduce_sum sin"}, {"precision.recipe": "bf16"}),
        "use_lowprecision_moment": ({"use_lowprecision_moment": True}, {"optim.state_dtype": "bfloat16"}),
        # An evaluation takes each set whole: a name of its own keeps it out of the mixing of the training data.
        "eval_dataset_prob": (
            {**EVALUATED, **TWO, "eval_dataset_path": "e,f,g", "eval_dataset_prob": "0.25,0,0.75"},
            {
                "data.eval_datasets[0].path": "e",
                "data.eval_datasets[1].path": "g",
                "data.eval_datasets[1].name": "g",
                "data.eval_datasets[1].weight": None,
            },
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
        "lora_plus_scale": ({"lora": True, "lora_plus_scale": 16}, {"lora.lr_ratio": 16.0}),
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
    "trl": {
        "dtype": ({"dtype": "bfloat16"}, {"model.dtype": "bfloat16", "precision.master_dtype": "bfloat16"}),
        "torch_dtype": ({"torch_dtype": "bfloat16"}, {"model.dtype": "bfloat16"}),
        "lora_dropout": ({"use_peft": True, "lora_dropout": 0.25}, {"lora.dropout": 0.25}),
        "logging_strategy": ({"logging_strategy": "no"}, {"log.every": 0}),
        "logging_steps": ({"logging_steps": 7}, {"log.every": 7}),
        "disable_dropout": ({"use_peft": True, "disable_dropout": True}, {"lora.dropout": 0.0}),
        "lora_target_modules": ({"use_peft": True}, {"lora.target_modules": ("q_proj", "v_proj")}),
        "load_in_8bit": ({"use_peft": True, "load_in_8bit": True}, {"quant.format": "int8"}),
        "load_in_4bit": ({"use_peft": True, "load_in_4bit": True}, {"quant.format": "nf4"}),
        "bnb_4bit_quant_type": (
            {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            {"quant.format": "fp4", "quant.double_quant": False},
        ),
        "dataset_name": ({}, {"data.datasets[0].path": "a/b", "data.eval_datasets": ()}),
        "dataset_config": ({"dataset_config": "main"}, {"data.datasets[0].subset": "main"}),
        "dataset_train_split": ({"dataset_train_split": "some"}, {"data.datasets[0].split": "some"}),
        "dataset_test_split": (
            {"eval_strategy": "steps", "dataset_test_split": "some"},
            {"data.eval_datasets[0].split": "some"},
        ),
        "max_length": ({"max_length": 64}, {"data.seq_len": 64, "data.truncation": "right"}),
        "truncation_mode": ({"truncation_mode": "keep_end"}, {"data.truncation": "left"}),
        "packing_strategy": (
            {"packing": True, "packing_strategy": "wrapped"},
            {"data.packing_method": "sequential", "data.truncation": "split"},
        ),
        "completion_only_loss": ({"completion_only_loss": True}, {"chat.loss_scale": "default"}),
        "assistant_only_loss": ({}, {"chat.loss_scale": "all"}),
        "train_sampling_strategy": ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
        "seed": ({"seed": 7}, {"train.seed": 7, "data.seed": 7}),
        "data_seed": ({"seed": 7, "data_seed": 8}, {"train.seed": 7, "data.seed": 8}),
        "learning_rate": ({"beta": 0.1}, {"optim.learning_rate": 1e-6}),
        "lr_scheduler_type": ({"lr_scheduler_type": "constant_with_warmup"}, {"optim.schedule": "constant"}),
        "lr_scheduler_kwargs": (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            {"optim.schedule": "cosine", "optim.min_lr": 1e-6},
        ),
        "warmup_steps": ({"warmup_steps": 0.25}, {"optim.warmup_ratio": 0.25}),
        "warmup_ratio": ({"warmup_ratio": 0.25}, {"optim.warmup_ratio": 0.25}),
        "optim": ({"optim": "paged_adamw_8bit"}, {"optim.name": "adamw_8bit"}),
        "adam_beta1": ({"optim": "sgd"}, {"optim.name": "sgd", "optim.beta1": 0.0}),
        "bf16": ({"bf16": False}, {"precision.recipe": "fp32"}),
        "fp16": ({"fp16": True}, {"precision.recipe": "fp16", "model.dtype": "float32"}),
        "gradient_checkpointing": ({"gradient_checkpointing": False}, {"memory.remat": "none"}),
        "activation_checkpointing": ({"activation_checkpointing": False}, {"memory.remat": "none"}),
        "activation_offloading": ({"activation_offloading": True}, {"memory.remat": "offload"}),
        "fsdp": ({"fsdp": "full_shard auto_wrap"}, {"mesh.fsdp": -1, "parallel.zero": 3}),
        "deepspeed": (
            {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
            {"mesh.fsdp": -1, "parallel.zero": 2, "memory.offload_optimizer": True},
        ),
        "eval_strategy": ({"eval_strategy": "steps"}, {"eval.steps": 10, "data.eval_datasets[0].split": "test"}),
        "evaluation_strategy": ({"evaluation_strategy": "steps"}, {"eval.steps": 10}),
        "eval_steps": ({"eval_strategy": "steps", "eval_steps": 7}, {"eval.steps": 7}),
        "save_strategy": ({"save_strategy": "epoch"}, {"ckpt.save_steps": 0, "ckpt.save_epochs": 1.0}),
        "save_steps": ({"save_steps": 7}, {"ckpt.save_steps": 7}),
        "metric_for_best_model": (
            {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
            {"eval.best_metric": "eval_accuracy", "eval.epochs": 1.0},
        ),
        "resume_from_checkpoint": ({"resume_from_checkpoint": "runs/a"}, {"ckpt.start": "runs/a"}),
        "push_to_hub": (
            {"push_to_hub": True, "output_dir": "out/mine"},
            {"export.push_to_hub": "mine", "export.private": False},
        ),
        "hub_model_id": ({"push_to_hub": True, "hub_model_id": "me/it"}, {"export.push_to_hub": "me/it"}),
        "hub_private_repo": ({"push_to_hub": True, "hub_private_repo": True}, {"export.private": True}),
        "loss_type": ({"loss_type": ["ipo"]}, {"preference.loss": "ipo", "data.datasets[0].type": "preference"}),
        "beta": ({"beta": 0.5}, {"preference.loss": "sigmoid", "preference.beta": 0.5}),
        "label_smoothing": ({"label_smoothing": 0.1}, {"preference.label_smoothing": 0.1}),
        "precompute_ref_log_probs": (
            {"precompute_ref_log_probs": True},
            {"preference.precompute_reference": True},
        ),
        "sync_ref_model": (
            {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0},
            {"preference.reference_update_steps": 512},
        ),
        "ref_model_sync_steps": (
            {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 7},
            {"preference.reference_update_steps": 7},
        ),
        "ref_model_mixup_alpha": ({"ref_model_mixup_alpha": 1.0}, {"preference.reference_update_steps": None}),
        "rpo_alpha": ({"rpo_alpha": 0.5}, {"preference.sft_weight": 0.5}),
        "simpo_gamma": (
            {"loss_type": "simpo", "simpo_gamma": 1.5},
            {"preference.loss": "simpo", "preference.simpo_gamma": 1.5, "preference.sft_weight": 1.0},
        ),
        "cpo_alpha": ({"loss_type": "simpo", "cpo_alpha": 0.5}, {"preference.sft_weight": 0.5}),
        "lora_target_parameters": (
            {"use_peft": True, "lora_target_parameters": ["mlp.experts.down_proj"]},
            {"lora.target_modules": r"(^|\.)mlp\.experts(\.\d+)?\.(down_proj|w2)$"},
        ),
        "lora_task_type": (
            {"use_peft": True, "lora_task_type": "SEQ_CLS"},
            {"preference.loss": "bradley_terry", "model.num_labels": 1, "optim.learning_rate": 1e-4},
        ),
        "center_rewards_coefficient": (
            {"center_rewards_coefficient": 0.0},
            {"preference.loss": "bradley_terry", "data.datasets[0].type": "preference"},
        ),
        "desirable_weight": (
            {"desirable_weight": 1.5},
            {"preference.loss": "kto", "preference.desirable_weight": 1.5, "optim.learning_rate": 1e-6},
        ),
        "undesirable_weight": (
            {"undesirable_weight": 1.5},
            {"preference.undesirable_weight": 1.5, "data.datasets[0].type": "unpaired_preference"},
        ),
        "dataset_kwargs": ({"dataset_kwargs": {"add_special_tokens": False}}, {"chat.loss_scale": "all"}),
        "dataset_mixture.datasets.split": (
            {"dataset_name": None, "dataset_mixture.datasets": [{"id": "a", "split": "some"}, {"id": "b"}]},
            {"data.datasets[0].split": "some", "data.datasets[1].split": "train", "data.datasets[1].path": "b"},
        ),
        "dataset_mixture.datasets.weight": (
            {
                "dataset_name": None,
                "dataset_mixture.datasets": [{"id": "a", "weight": 0.5}, {"id": "b", "weight": 0.3}],
            },
            {"data.datasets[0].shards": 2, "data.datasets[0].shard_idx": 0, "data.datasets[1].split": "train[:30%]"},
        ),
        "dataset_mixer": (
            {"dataset_name": None, "dataset_mixer": {"a": 1.0, "b": 0.25}},
            {"data.datasets[0].path": "a", "data.datasets[0].shards": None, "data.datasets[1].shards": 4},
        ),
        "dataset_splits": (
            {
                "dataset_name": None,
                "dataset_mixer": {"a": 1},
                "dataset_splits": ["train_sft", "test_sft"],
                "eval_strategy": "epoch",
            },
            {"data.datasets[0].split": "train_sft", "data.eval_datasets[0].split": "test_sft"},
        ),
        "dataset_configs": (
            {"dataset_name": None, "dataset_mixer": {"a": 1}, "dataset_configs": ["main"]},
            {"data.datasets[0].subset": "main"},
        ),
        "weight_decay": ({"weight_decay": 0.1}, {"optim.weight_decay": 0.1, "optim.no_decay": "norm|bias"}),
        "truncation_side": ({"truncation_side": "left"}, {"data.truncation": "left"}),
        "max_prompt_length": (
            {"beta": 0.1, "max_prompt_length": 32},
            {"data.datasets[0].max_prompt_tokens": 32},
        ),
        "system_prompt": (
            {**GRPO, "system_prompt": "Be kind."},
            {"data.datasets[0].system_prompt": "Be kind."},
        ),
        "dataset_prompt_column": (
            {**GRPO, "dataset_prompt_column": "problem"},
            {"data.datasets[0].prompt_field": "problem"},
        ),
        **{
            option: ({**GRPO, option: value}, {"rollout.rewards": ("my_rewards:right",), **expected})
            for option, value, expected in (
                ("reward_funcs", ["my_rewards.right"], {"rollout.max_new_tokens": 512, "data.seq_len": 1536}),
                ("reward_weights", [0.5], {"rollout.reward_weights": ("right=0.5",)}),
                ("num_generations", 4, {"rollout.group_size": 4}),
                ("max_completion_length", 256, {"rollout.max_new_tokens": 256, "data.seq_len": 1280}),
                ("temperature", 0.5, {"rollout.temperature": 0.5}),
                ("top_p", 0.5, {"rollout.top_p": 0.5}),
                ("top_k", 50, {"rollout.top_k": 50}),
                ("min_p", 0.25, {"rollout.min_p": 0.25}),
                ("repetition_penalty", 1.5, {"rollout.repetition_penalty": 1.5}),
                ("num_iterations", 2, {"grpo.iterations": 2}),
                ("epsilon", 0.1, {"grpo.clip_low": 0.1}),
                ("epsilon_high", 0.3, {"grpo.clip_high": 0.3}),
                ("scale_rewards", False, {"grpo.advantage_scale": "none"}),
                ("importance_sampling_level", "sequence", {"grpo.importance": "sequence"}),
                ("mask_truncated_completions", True, {"grpo.mask_truncated": True}),
                ("top_entropy_quantile", 0.2, {"grpo.entropy_share": 0.2}),
                ("steps_per_generation", 1, {"grpo.iterations": 1}),
                ("delta", 4.0, {"grpo.clip_largest": 4.0}),
                ("multi_objective_aggregation", "normalize_then_sum", {"grpo.advantage_scale": "gdpo"}),
                ("use_vllm", True, {"rollout.server": None, "optim.learning_rate": 1e-6}),
            )
        },
        "off_policy_mask_threshold": (
            {**GRPO, "num_iterations": 2, "off_policy_mask_threshold": 0.5},
            {"grpo.off_policy_kl": 0.5},
        ),
        "use_bias_correction_kl": (
            {**GRPO, "beta": 0.1, "use_bias_correction_kl": False},
            {"grpo.beta": 0.1, "grpo.kl_ratio": False},
        ),
        **{
            option: ({**GRPO, "loss_type": "sapo", option: 1.5}, {"grpo.loss": "sapo", key: 1.5})
            for option, key in (
                ("sapo_temperature_pos", "grpo.sapo_positive"),
                ("sapo_temperature_neg", "grpo.sapo_negative"),
            )
        },
        "teacher_model_name_or_path": (GKD, {"distill.teacher": "big/one", "distill.divergence": "js"}),
        "lmbda": (
            {**GKD, "lmbda": 0.25, "temperature": 0.5},
            {"distill.own_answers": 0.25, "rollout.temperature": 0.5, "chat.loss_scale": "last_round"},
        ),
        "max_new_tokens": ({**GKD, "lmbda": 0.25, "max_new_tokens": 64}, {"rollout.max_new_tokens": 64}),
        "seq_kd": ({**GKD, "seq_kd": False, "beta": 0.0}, {"distill.divergence": "forward_kl"}),
    },
    "axolotl": {
        "processor_type": ({"processor_type": "AutoProcessor"}, {"vision.patches_per_row": 2048}),
        "image_size": (
            {"processor_type": "AutoProcessor", "image_size": [64, 32]},
            {"vision.patches_per_row": 2048, "vision.max_pixels": 2048},
        ),
        "lora_dropout": (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.25},
            {"lora.dropout": 0.25},
        ),
        "overrides_of_model_config": (
            {"overrides_of_model_config": {"sliding_window": 1024}},
            {"model.overrides": ("sliding_window=1024",)},
        ),
        "plugins": ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, {}),
        "adapter": ({"adapter": "qlora", "load_in_4bit": True}, {"lora.enabled": True, "quant.format": "nf4"}),
        "load_in_8bit": ({"adapter": "lora", "load_in_8bit": True}, {"quant.format": "int8"}),
        "load_in_4bit": ({"adapter": "lora", "load_in_4bit": True}, {"quant.format": "nf4"}),
        "lora_target_modules": (
            {"adapter": "lora", "lora_target_modules": ["q_proj"]},
            {"lora.target_modules": ("q_proj",)},
        ),
        "lora_target_linear": (
            {"adapter": "lora", "lora_target_linear": True},
            {"lora.target_modules": "all-linear"},
        ),
        "lora_target_parameters": (
            {
                "adapter": "lora",
                "lora_target_modules": ["q_proj"],
                "lora_target_parameters": ["mlp.experts.gate_up_proj"],
            },
            {
                "lora.target_modules": r"(^|\.)q_proj$|(^|\.)mlp\.experts(\.\d+)?\."
                r"(gate_up_proj|gate_proj|up_proj|w1|w3)$"
            },
        ),
        "unfrozen_parameters": (
            {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.[0-9]+.mlp"]},
            {"train.freeze": r"^(?!(?:^lm_head\.weight$)|(?:model\.layers\.[0-9]+\.mlp))"},
        ),
        "weight_decay": ({"weight_decay": 0.1}, {"optim.weight_decay": 0.1, "optim.no_decay": "norm|bias"}),
        "model_config": ({"model_config": {"sliding_window": 64}}, {"model.overrides": ("sliding_window=64",)}),
        "overrides_of_model_kwargs": ({"overrides_of_model_kwargs": {"use_cache": False}}, {"model.overrides": ()}),
        "model_kwargs": ({"model_kwargs": {"use_cache": False}}, {"model.overrides": ()}),
        "bnb_config_kwargs": (
            {
                "adapter": "qlora",
                "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
            },
            {"quant.format": "fp4", "quant.double_quant": False},
        ),
        "reward_model": (
            {
                "reward_model": True,
                "datasets": [{"path": "a", "type": "bradley_terry.chat_template.default"}],
            },
            {
                "preference.loss": "bradley_terry",
                "model.head": "classification",
                "data.datasets[0].prompt_field": "input",
                "data.datasets[0].system_field": "system",
            },
        ),
        "dpo_loss_type": (
            {
                "rl": "dpo",
                "dpo_loss_type": ["hinge"],
                "datasets": [{"path": "a", "type": "chat_template.default"}],
            },
            {"preference.loss": "hinge"},
        ),
        "profiler_steps_start": (
            {"profiler_steps": 2, "profiler_steps_start": 4},
            {"prof.start_step": 5, "prof.steps": 2},
        ),
        **{
            f"{entries}.{name}": (
                {
                    "rl": "dpo",
                    "datasets": [{"path": "a", "type": "chat_template.default"}],
                    entries: [{"path": "a", "type": "chat_template.default", name: "best"}],
                },
                {f"data.{ours}[0].{name.removeprefix('field_')}_field": "best"},
            )
            for entries, ours in (("datasets", "datasets"), ("test_datasets", "eval_datasets"))
            for name in ("field_chosen", "field_rejected")
        },
        "loraplus_lr_ratio": ({"adapter": "lora", "loraplus_lr_ratio": 16}, {"lora.lr_ratio": 16.0}),
        **{
            f"{entries}.{name}": (
                {entries: [{"path": "a/b", **entry}]},
                {f"data.{ours}_datasets[0].{key}".replace("train_", ""): value for key, value in expected.items()},
            )
            for entries, ours in (("datasets", "train"), ("test_datasets", "eval"))
            for name, (entry, expected) in {
                "path": ({"type": "completion", "data_files": "*.txt"}, {"path": "a/b", "glob": "*.txt"}),
                "type": ({"type": "alpaca"}, {"type": "instruction", "input_field": "input"}),
                "type.system_prompt": (
                    {"type": {"format": "{system}{instruction}", "system_prompt": "Be kind."}},
                    {"system_prompt": "Be kind."},
                ),
                "type.field_system": ({"type": {"field_system": "s"}}, {"system_field": "s"}),
                "type.field_instruction": ({"type": {"field_instruction": "q"}}, {"instruction_field": "q"}),
                "type.field_input": ({"type": {"field_output": "a", "field_input": "c"}}, {"input_field": "c"}),
                "type.field_output": ({"type": {"field_output": "a"}}, {"output_field": "a", "input_field": None}),
                "type.format": ({"type": {"format": ALPACA}}, {"prompt_format": ALPACA}),
                "type.no_input_format": (
                    {"type": {"format": ALPACA, "no_input_format": "{instruction}"}},
                    {"prompt_format_no_input": "{instruction}"},
                ),
                "field": ({"type": "completion", "field": "body"}, {"type": "text", "text_field": "body"}),
                "field_messages": (
                    {"type": "chat_template", "field_messages": "turns"},
                    {"messages_field": "turns"},
                ),
                "split": ({"type": "completion", "split": "some"}, {"split": "some"}),
                "data_files": (
                    {"path": "json", "type": "completion", "data_files": ["a.jsonl"]},
                    {"path": ("a.jsonl",), "ds_type": "json"},
                ),
                "message_field_role": (
                    {"type": "chat_template", "message_field_role": "from"},
                    {"message_property_mappings": ("role=from",)},
                ),
                "message_field_content": (
                    {"type": "chat_template", "message_field_content": "value"},
                    {"message_property_mappings": ("content=value",)},
                ),
                "message_property_mappings": (
                    {"type": "chat_template", "message_property_mappings": {"role": "from"}},
                    {"message_property_mappings": ("role=from",)},
                ),
            }.items()
        },
        **{
            f"{entries}.type.field_{name}": (
                {
                    "rl": "dpo",
                    "datasets": [{"path": "a/b", "type": "chat_template.default"}],
                    entries: [{"path": "a/b", "type": {f"field_{name}": "x"}}],
                },
                {f"data.{ours}datasets[0].{name}_field": "x"},
            )
            for entries, ours in (("datasets", ""), ("test_datasets", "eval_"))
            for name in ("prompt", "chosen", "rejected")
        },
        "pretraining_dataset.path": (
            {"datasets": None, "max_steps": 5, "pretraining_dataset": [{"path": "a/b"}]},
            {"data.datasets[0].path": "a/b", "data.datasets[0].type": "text", "data.streaming": True},
        ),
        "pretraining_dataset.data_files": (
            {"datasets": None, "max_steps": 5, "pretraining_dataset": [{"path": "text", "data_files": "a.txt"}]},
            {"data.datasets[0].path": "a.txt", "data.datasets[0].type": "text"},
        ),
        "streaming": ({"streaming": True, "max_steps": 5}, {"data.streaming": True}),
        "excess_length_strategy": ({"excess_length_strategy": "truncate"}, {"data.truncation": "right"}),
        "max_prompt_len": (
            {"rl": "dpo", "datasets": [{"path": "a", "type": "chatml.intel"}], "max_prompt_len": 32},
            {"data.datasets[0].max_prompt_tokens": 32},
        ),
        "sample_packing": ({}, {"data.packing": False}),
        "sample_packing_sequentially": (
            {"sample_packing": True, "sample_packing_sequentially": True},
            {"data.packing_method": "sequential"},
        ),
        "curriculum_sampling": ({"curriculum_sampling": True}, {"data.shuffle": False}),
        "shuffle_merged_datasets": ({"shuffle_merged_datasets": False}, {"data.shuffle": True}),
        "shuffle_before_merging_datasets": (
            {
                "curriculum_sampling": True,
                "shuffle_merged_datasets": False,
                "shuffle_before_merging_datasets": True,
                "datasets": [{"path": "a", "type": "alpaca"}, {"path": "b", "type": "alpaca"}],
            },
            {"data.shuffle_each": True, "data.shuffle": True},
        ),
        "chat_template": ({"chat_template": "qwen_25"}, {"chat.template": "chatml"}),
        "chat_template_jinja": (
            {"chat_template": "jinja", "chat_template_jinja": "my.jinja"},
            {"chat.template": "my.jinja"},
        ),
        "train_on_inputs": (
            {"datasets": [{"path": "a", "type": "chat_template", "roles_to_train": ["user"], "train_on_eos": "last"}]},
            {"chat.roles": ("user",), "chat.train_on_eos": "last"},
        ),
        "lr_scheduler": ({"lr_scheduler": "linear"}, {"optim.schedule": "linear"}),
        "lr_scheduler_kwargs": (
            {"lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
            {"optim.power": 2.0, "optim.min_lr": 1e-7},
        ),
        "cosine_min_lr_ratio": ({"cosine_min_lr_ratio": 0.25}, {"optim.final_lr_fraction": 0.25}),
        "warmup_steps": ({"warmup_steps": 7}, {"optim.warmup_steps": 7, "optim.warmup_ratio": 0.0}),
        "warmup_ratio": ({}, {"optim.warmup_ratio": 0.03}),
        "lr_groups": (
            {"lr_groups": [{"name": "a", "modules": ["q_proj", "k_proj"], "lr": 1e-5}]},
            {"optim.lr_multipliers": ("q_proj|k_proj=0.1",)},
        ),
        "embedding_lr": ({"embedding_lr": 1e-5}, {"optim.lr_multipliers": ("embed_tokens|lm_head=0.1",)}),
        "embedding_lr_scale": ({"embedding_lr_scale": 0.5}, {"optim.lr_multipliers": ("embed_tokens|lm_head=0.5",)}),
        "optimizer": ({"optimizer": "adamw_bnb_8bit"}, {"optim.name": "adamw_8bit"}),
        "bf16": ({}, {"precision.recipe": "bf16", "precision.master_dtype": "bfloat16"}),
        "fp16": ({"fp16": True}, {"precision.recipe": "fp16", "model.dtype": "float16"}),
        "fp8": ({"fp8": True}, {"precision.recipe": "fp8_hybrid"}),
        "bfloat16": ({"bf16": False, "bfloat16": True}, {"precision.recipe": "bf16"}),
        "float16": ({"bf16": False, "float16": True}, {"precision.recipe": "fp16"}),
        "float32": ({"float32": True}, {"precision.recipe": "fp32", "model.dtype": "float32"}),
        "gradient_checkpointing": ({"gradient_checkpointing": False}, {"memory.remat": "none"}),
        "activation_offloading": ({"activation_offloading": True}, {"memory.remat": "offload"}),
        "deepspeed": ({"deepspeed": "deepspeed_configs/zero2.json"}, {"mesh.fsdp": -1, "parallel.zero": 2}),
        "fsdp": ({"fsdp": ["full_shard"]}, {"mesh.fsdp": -1, "parallel.zero": 3}),
        "fsdp_config": ({"fsdp_config": {"a": 1}}, {"mesh.fsdp": -1, "mesh.data": 1}),
        "dp_shard_size": ({"dp_shard_size": 4}, {"mesh.fsdp": 4, "mesh.data": 1}),
        "dp_replicate_size": ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"mesh.fsdp": 4, "mesh.data": 2}),
        "eval_steps": ({"val_set_size": 0.1, "eval_steps": 7}, {"eval.steps": 7}),
        "evals_per_epoch": ({"val_set_size": 0.1, "evals_per_epoch": 4}, {"eval.steps": 0, "eval.epochs": 0.25}),
        "eval_strategy": ({"val_set_size": 0.1}, {"eval.steps": 0, "eval.epochs": 1.0}),
        "metric_for_best_model": (
            {"val_set_size": 0.1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
            {"eval.best_metric": "eval_loss", "export.best": True},
        ),
        "resume_from_checkpoint": ({"resume_from_checkpoint": "runs/a"}, {"ckpt.start": "runs/a"}),
        "hub_model_id": (
            {"hub_model_id": "me/it"},
            {"export.push_to_hub": "me/it", "export.private": True},
        ),
        "save_steps": ({"save_steps": 7}, {"ckpt.save_steps": 7}),
        "saves_per_epoch": ({"saves_per_epoch": 2}, {"ckpt.save_steps": 0, "ckpt.save_epochs": 0.5}),
        "save_strategy": ({"save_strategy": "no"}, {"ckpt.save_steps": 0, "ckpt.save_epochs": None}),
        "wandb_project": ({"wandb_project": "a"}, {"log.wandb.enabled": True, "log.wandb.project": "a"}),
        "profiler_steps": ({"profiler_steps": 3}, {"prof.enabled": True, "prof.steps": 3}),
        **{
            option: (
                {"rl": rl, "datasets": [{"path": "a", "type": "chat_template.default"}], option: given},
                {"preference.loss": loss, key: value},
            )
            for option, rl, loss, given, key, value in (
                ("rl", "simpo", "simpo", "simpo", "preference.beta", 0.1),
                ("rl_beta", "dpo", "sigmoid", 0.5, "preference.beta", 0.5),
                ("dpo_beta", "dpo", "sigmoid", 0.5, "preference.beta", 0.5),
                ("orpo_alpha", "orpo", "orpo", 0.5, "preference.beta", 0.5),
                ("rpo_alpha", "dpo", "sigmoid", 0.5, "preference.sft_weight", 0.5),
                ("cpo_alpha", "simpo", "simpo", 0.5, "preference.sft_weight", 0.5),
                ("simpo_gamma", "simpo", "simpo", 1.0, "preference.simpo_gamma", 1.0),
                ("dpo_label_smoothing", "dpo", "sigmoid", 0.1, "preference.label_smoothing", 0.1),
                ("kto_desirable_weight", "kto", "kto", 0.5, "preference.desirable_weight", 0.5),
                ("kto_undesirable_weight", "kto", "kto", 0.5, "preference.undesirable_weight", 0.5),
                ("precompute_ref_log_probs", "dpo", "sigmoid", True, "preference.precompute_reference", True),
            )
        },
    },
    "qefficient": {
        "model.torch_dtype": (
            {"model.torch_dtype": "bf16", "model.use_peft": False},
            {"model.dtype": "bfloat16", "precision.recipe": "bf16", "precision.master_dtype": "bfloat16"},
        ),
        "training.dtype": ({"training.dtype": "bf16"}, {"precision.recipe": "bf16", "model.dtype": "bfloat16"}),
        "training.torch_dtype": ({"training.torch_dtype": "fp32"}, {"precision.recipe": "fp32"}),
        "training.fp16": (
            {"model.torch_dtype": "fp32", "training.fp16": True},
            {"precision.recipe": "fp16", "model.dtype": "float32"},
        ),
        "training.bf16": ({"training.bf16": True}, {"precision.recipe": "bf16", "model.dtype": "bfloat16"}),
        "training.type": ({"training.type": "dpo"}, {"preference.loss": "sigmoid", "preference.beta": 0.1}),
        "dataset.dataset_type": (
            {"training.type": "dpo", "dataset.dataset_type": "pairs"},
            {"data.datasets[0].type": "preference", "data.datasets[0].prompt_field": "Sum up: {text}"},
        ),
        "dataset.config_name": ({**SPLIT, "dataset.config_name": "main"}, {"data.datasets[0].subset": "main"}),
        "dataset.dataset_num_samples": ({"dataset.dataset_num_samples": 7}, {"data.datasets[0].samples": 7}),
        "dataset.data_seed": ({"dataset.data_seed": 7}, {"train.seed": 42, "data.seed": 7}),
        "training.seed": ({"training.seed": 7}, {"train.seed": 7, "data.seed": 7}),
        "training.deepspeed_config": (
            {"training.deepspeed_config": {"zero_optimization": {"stage": 2}}},
            {"mesh.fsdp": -1, "parallel.zero": 2},
        ),
        "training.ddp_degree": (
            {"training.tp_degree": 2, "training.ddp_degree": 4},
            {"mesh.tensor": 2, "mesh.data": 4, "mesh.fsdp": 1},
        ),
        "optimizers.optimizer": ({"optimizers.optimizer": "sgd"}, {"optim.name": "sgd", "optim.beta1": 0.0}),
        "optimizers.optimizer_name": (
            {"optimizers.optimizer_name": "AdamW", "optimizers.weight_decay": 0.25},
            {"optim.name": "adamw", "optim.weight_decay": 0.25},
        ),
        "optimizers.weight_decay": (
            {"model.use_peft": False, "optimizers.weight_decay": 0.25},
            {"optim.weight_decay": 0.25, "optim.no_decay": "norm|bias"},
        ),
        "scheduler.scheduler": ({"scheduler.scheduler": "linear"}, {"optim.schedule": "linear"}),
        "scheduler.scheduler_name": (
            {"scheduler.scheduler_name": "polynomial"},
            {"optim.schedule": "polynomial", "optim.min_lr": 1e-7},
        ),
        "scheduler.lr_scheduler_kwargs": (
            {
                "scheduler.scheduler_name": "warmup_stable_decay",
                "scheduler.lr_scheduler_kwargs": {"num_decay_steps": 5},
            },
            {"optim.schedule": "wsd", "optim.cooldown_steps": 5},
        ),
        "scheduler.warmup_ratio": ({"scheduler.warmup_ratio": 0.25}, {"optim.warmup_ratio": 0.25}),
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
        "training.logging_steps": ({"training.logging_steps": 7}, {"log.every": 7}),
        "training.logging_strategy": ({"training.logging_strategy": "no"}, {"log.every": 0}),
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


def options(dialect: str) -> Iterator[tuple[str, str, ForeignOption]]:
    """Yield (list whose entries have the option, its name, its row)."""
    for name, row in foreign.table(dialect).items():
        yield "", name, row
        yield from ((name, inner, of) for inner, of in row.of.items())


ALONE = [
    pytest.param(dialect, entries, name, row, id=f"{dialect} {entries and f'{entries}.'}{name}")
    for dialect in foreign.DIALECTS
    for entries, name, row in options(dialect)
    if row.key or row.values
]


def promises(row: ForeignOption, key: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield values of an option, and the translation of each."""
    for text, ours in row.values.items():
        value = {"true": True, "false": False}.get(str(text).lower(), text)
        value = int(value) if str(value).lstrip("-").isdigit() else value
        settings = ours if isinstance(ours, Mapping) else {} if ours is None else dict.fromkeys(row.keys, ours)
        yield value, {key: tuple(one) if isinstance(one, list) else one for key, one in settings.items()}
    if key and (row.others or not row.values):
        value = another(key, row.default)
        yield value, dict.fromkeys(row.keys, tuple(value) if isinstance(value, list) else value)


def another(key: str, default: Any) -> Any:
    """Return a valid value of an option, other than its default here and in the other system."""
    option = keys.lookup(key)
    assert option is not None
    members = typing.get_args(option.annotation)
    if key in VALUES:
        return VALUES[key]
    if option.annotation is bool or bool in members:
        return default is not True
    if typing.get_origin(option.annotation) is typing.Literal:
        candidates = members
    elif option.annotation is float or float in members:
        candidates = (0.25, 0.5, 4096.0)
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
        and (isinstance(value, str | list) or in_interval(value, option.within))
    )


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in re.sub(r"\[(\d)\]", r".\1", key.replace("[i]", "[0]")).split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def becomes(dialect: str, source: Mapping[str, Any], expected: Mapping[str, Any], folder: pathlib.Path) -> None:
    file = folder / "its.yaml"
    file.write_text(json.dumps(source))
    overrides = [override for option in source for override in TYPED.get(option, ())]
    config = read_recipe(str(file), dialect=dialect).resolve(overrides)
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(("dialect", "entries", "name", "row"), ALONE)
def test_an_option_becomes_what_its_row_promises(dialect, entries, name, row, tmp_path):
    of = foreign.table(dialect)[entries].entries if entries else ""
    key = f"{of}[i].{row.keys[0]}" if of else row.keys[0]
    for value, settings in promises(row, key):
        source: dict[str, Any] = dict(LEAST[dialect])
        for prefix, more in BESIDE[dialect].items():
            if name.startswith(prefix) or key.startswith(prefix):
                source |= more
        if entries:
            instead = INSTEAD.get((dialect, entries))
            first = (
                source.pop(instead) if instead else next(value for value in source.values() if isinstance(value, list))
            )
            path = next(iter(foreign.table(dialect)[entries].of))  # path, or id
            first = first[0] if isinstance(first, list) and not instead else {path: "a/b"}
            source[entries] = [{**first, **IN_ENTRY.get(name, {}), name: value}]
        else:
            source[name] = value
        becomes(dialect, source, {f"{of}[0].{key}" if of else key: here for key, here in settings.items()}, tmp_path)


def read_together(dialect: str) -> set[str]:
    return {f"{entries and f'{entries}.'}{name}" for entries, name, row in options(dialect) if row.convert}


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_each_option_that_is_read_with_others_is_here(dialect):
    assert TOGETHER[dialect].keys() == read_together(dialect)


@pytest.mark.parametrize(
    ("dialect", "option"), [(dialect, option) for dialect in TOGETHER for option in TOGETHER[dialect]]
)
def test_options_that_are_read_together_become_this(dialect, option, tmp_path):
    source, expected = TOGETHER[dialect][option]
    becomes(dialect, {**LEAST[dialect], **source}, expected, tmp_path)


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_an_option_without_a_meaning_here_is_answered_by_its_reason(dialect):
    for entries, name, row in options(dialect):
        if not row.reason:
            continue
        for value in (row.sample, True, "x"):
            source = {**LEAST[dialect], name: value}
            if entries:
                source = {**LEAST[dialect], entries: [{"path": "a", "type": "text", name: value}]}
            lines = {line.option: line for line in foreign.translate(YamlFile(source, {}), dialect).lines}
            line = lines[f"{entries}[0].{name}" if entries else name]
            fits = value is row.sample or not line.wrong
            assert (line.text == row.reason and not line.settings) if fits else "expected a value" in line.text, name


@pytest.mark.parametrize("dialect", foreign.DIALECTS)
def test_what_is_not_there_yet_is_an_error_unless_it_is_the_default(dialect):
    for name, row in foreign.table(dialect).items():
        if not row.later:
            continue
        for value in ([row.default] if row.default is not ForeignOption().default else []) + ["another"]:
            translation = foreign.translate(YamlFile({**LEAST[dialect], name: value}, {}), dialect)
            (line,) = [line for line in translation.lines if line.option == name]
            assert line.wrong == (value == "another") and not line.settings
            assert [name in problem.keys for problem in translation.problems] == [True] * line.wrong
