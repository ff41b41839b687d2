"""Small files of XORL: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {
    "model.model_path": "my/model",
    "data.datasets": [{"path": "a.jsonl", "type": "tokenized"}],
    "train.output_dir": "out",
}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
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
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
}
