"""Small files of ERNIEKit: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {"model_name_or_path": "my/model", "train_dataset_path": "a.jsonl", "bf16": True}
DPO = {"stage": "DPO"}
POLYNOMIAL = {"lr_scheduler_type": "polynomial"}
EVALUATED = {"do_eval": True, "eval_dataset_path": "e.jsonl"}
TWO = {
    "train_dataset_path": "a.jsonl,b.jsonl",
    "train_dataset_prob": "0.8,0.2",
    "train_dataset_type": "erniekit,alpaca",
}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
    "dropout_warmup_steps": {"hidden_dropout_prob": 0.1},
    "virtual_pp_degree": {"pipeline_parallel_degree": 2},
    "per_device_eval_batch_size": {"do_eval": True, "eval_dataset_path": "b.jsonl"},
    "scale_loss": {"bf16": False, "fp16": True},
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
}
