"""Small files of Surogate: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {
    "model": "my/model",
    "datasets": [{"path": "a.jsonl", "type": "conversation"}],
    "sequence_len": 512,
}
PAIRS = {"path": "a.jsonl", "type": "preference"}
OFF = {"recompute_block": False, "recompute_att": False, "recompute_ffn": False, "recompute_qkv": False}
SYSTEM = {"system_prompt_field": "sysp", "system_prompt": "FIXED"}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
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
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
        {"validation_datasets": [{"path": "a", "type": "conversation", "message_property_mappings": {"role": "r"}}]},
        {"data.eval_datasets[0].message_property_mappings": ("role=r",)},
    ),
    "lora_target_modules": ({"lora_target_modules": ["q_proj"]}, {"lora.target_modules": ("q_proj",)}),
    "qlora_fp4": ({"qlora_fp4": True}, {"quant.format": "nvfp4"}),
    "qlora_fp8": ({"qlora_fp8": True}, {"quant.format": "fp8", "quant.block_size": 128}),
    "qlora_bnb": ({"qlora_bnb": True}, {"quant.format": "nf4", "quant.block_size": 64}),
    "qlora_block_size": ({"qlora_fp8": True, "qlora_block_size": 64}, {"quant.block_size": 64}),
    "qlora_bnb_block_size": ({"qlora_bnb": True, "qlora_bnb_block_size": 128}, {"quant.block_size": 128}),
}
