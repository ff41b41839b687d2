"""Small files of QEfficient: the least one, and options in it with what they become."""

from typing import Any

# The smallest file.
LEAST: dict[str, Any] = {
    "model.model_name": "my/model",
    "dataset.json_file_path": "a.json",
    "dataset.prompt_template": "Sum up: {text}",
    "dataset.completion_template": "{sum}",
    "optimizers.lr": 1e-4,
}
LABELS = {"dataset.target_column": "label", "dataset.prompt_template": None, "dataset.completion_template": None}
EARLY = {
    "callbacks.early_stopping": True,
    "callbacks.early_stopping.early_stopping_patience": 5,
    "callbacks.early_stopping.early_stopping_threshold": 0.25,
}
SPLIT = {"dataset.json_file_path": None, "dataset.dataset_name": "x/y"}
# Options that others need to have an effect, by their names or by the first parts of their keys here.
BESIDE: dict[str, dict[str, Any]] = {
    "model.auto_class_name": LABELS,
    "model.peft_config.task_type": LABELS,
    "training.metric_for_best_model": EARLY,
}
# Options that are read together with others: the lines of the file, and their translation.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
}
