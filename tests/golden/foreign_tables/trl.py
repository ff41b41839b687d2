"""Small files of TRL: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {"model_name_or_path": "my/model", "dataset_name": "a/b"}
GRPO = {"reward_funcs": ["my_rewards.right"]}
GKD = {"teacher_model_name_or_path": "big/one", "lmbda": 0.0}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
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
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "max_seq_length": ({"max_seq_length": 64}, {"data.seq_len": 64, "data.truncation": "right"}),
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
}
