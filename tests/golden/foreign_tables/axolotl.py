"""Small files of Axolotl: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {
    "base_model": "my/model",
    "datasets": [{"path": "a/b", "type": "chat_template"}],
    "learning_rate": 1e-4,
    "gradient_checkpointing": True,
}
ALPACA = "### Instruction:\n{instruction}\n\n### Response:\n"
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
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
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "sequence_len": ({"sequence_len": 64}, {"data.seq_len": 64, "data.truncation": "delete"}),
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
}
