"""The values that options of other systems become, and the lines that say so."""

import pathlib

import pytest

from jaxtune.config import read_recipe
from unit.config.smallest_files import AXOLOTL, ERNIEKIT, QEFFICIENT, SUROGATE, TRL, XORL, resolve_text


def value(config, key: str):
    for part in key.replace("[0]", ".0").split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


# system, lines of its config, their translation; tests/golden/foreign_tables has rows for each option
TRANSLATED = [
    # Surogate: options that are read together
    (
        SUROGATE,
        "recompute_block: false\nrecompute_ffn: false\nrecompute_qkv: false\n",
        {"memory.remat": "attention+qkv"},
    ),
    (SUROGATE, "recompute_block: false\nrecompute_att: false\nrecompute_qkv: false\n", {"memory.remat": "ffn"}),
    (
        SUROGATE,
        "recompute_block: false\nrecompute_att: false\nrecompute_ffn: false\nrecompute_qkv: false\n",
        {"memory.remat": "none"},
    ),
    (SUROGATE, "zero_level: 1\nshard_gradients: true\n", {"parallel.zero": 2}),
    (SUROGATE, "gpus: 0\n", {"device.gpus": None}),
    (SUROGATE, "recipe: fp8-hybrid\ngradient_dtype: bf16\n", {"precision.recipe": "fp8_hybrid"}),
    (SUROGATE, "qlora_fp8: true\nrecipe: fp8-hybrid\nskip_quant_last_layers: 1\n", {"precision.skip_last_layers": 1}),
    (SUROGATE, "max_length: 64\ntruncation_strategy: left\n", {"data.datasets[0].longer": "left"}),
    (SUROGATE, "max_length: 64\n", {"data.datasets[0].max_tokens": 64, "data.datasets[0].longer": "delete"}),
    (SUROGATE, "max_length: 512\ntruncation_strategy: right\n", {"data.datasets[0].max_tokens": None}),
    (SUROGATE, "template: my/own.jinja\n", {"chat.template": "my/own.jinja"}),
    (SUROGATE, "template: qwen3_5\n", {"chat.template": None}),
    (SUROGATE, "report_to: [surogate, wandb]\nlogging_steps: 5\n", {"log.wandb.enabled": True, "log.every": 5}),
    (SUROGATE, "padding_free: true\nsample_packing: false\n", {"data.packing": False}),
    (SUROGATE, "warmup_ratio: 0.1\nwarmup_steps: 5\n", {"optim.warmup_steps": 5, "optim.warmup_ratio": 0.0}),
    (SUROGATE, "lora: false\nweight_decay: 0.1\n", {"optim.no_decay": "norm|bias"}),
    (SUROGATE, "weight_decay: 0.1\n", {"optim.no_decay": None}),
    (SUROGATE, "gpus: 4\nep_size: 4\nep_load_balance_threshold: 1.0\n", {"mesh.expert": 4, "mesh.fsdp": -1}),
    (
        SUROGATE,
        "gpus: 4\nep_size: 4\nqlora_bnb: true\nqlora_offload_experts: true\n",
        {"mesh.expert": 1, "parallel.zero": 3, "memory.offload_quants": True},
    ),
    (SUROGATE, "gpus: 2\nep_size: 2\noptimizer: normuon\n", {"mesh.expert": 2, "parallel.zero": 1}),
    (SUROGATE, "qlora_offload_experts: false\ncpu_training: false\n", {"memory.offload_quants": False}),
    (SUROGATE, "distributed: {num_nodes: 2, gpus_per_node: 8}\nep_size: 4\n", {"mesh.fsdp": 4, "mesh.expert": 4}),
    (SUROGATE, "auto_lr_reduction: true\n", {"guard.action": "lower_rate", "guard.deviations": 3.0}),
    (SUROGATE, "trackio_space: null\nuse_new_kernel: false\nnoise: {a: 0, b: []}\n", {"model.path": "my/model"}),
    (SUROGATE, "qlora_bnb: true\nqlora_bnb_block_size: 128\n", {"quant.format": "nf4", "quant.block_size": 128}),
    (SUROGATE, "qlora_fp8: true\nskip_quant_first_layers: 2\n", {"quant.format": "fp8", "quant.skip_first_layers": 2}),
    (
        SUROGATE,
        "qlora_fp4: true\nqlora_four_over_six: false\n",
        {"quant.format": "nvfp4", "quant.four_over_six": False},
    ),
    (
        SUROGATE,
        "recipe: nvfp4\nskip_quant_last_layers: 1\n",
        {"precision.recipe": "nvfp4", "precision.skip_last_layers": 1},
    ),
    (SUROGATE, "lora: false\n", {"precision.master_dtype": "bfloat16", "lora.enabled": False, "lora.dropout": 0.0}),
    (SUROGATE, "lora: false\ntorch_dtype: float32\n", {"precision.master_dtype": "float32"}),
    (
        SUROGATE,
        "rope_scaling: yarn\nmax_model_len: 4096\n",
        {"model.rope_scaling": "yarn", "model.max_positions": 4096},
    ),
    (SUROGATE, "rope_scaling: {factor: 2.0, type: yarn}\n", {"model.rope_scaling": '{"factor": 2.0, "type": "yarn"}'}),
    (SUROGATE, "max_model_len: 2048\n", {"model.max_positions": None}),
    (
        SUROGATE,
        "max_pixels: 1000\nnorm_bbox: norm1000\n",
        {"vision.max_pixels": 1000, "vision.norm_bbox": "norm1000", "vision.patches_per_row": 2048},
    ),
    (
        XORL.replace("my/model}", "my/model, config_path: b, tokenizer_path: c, attn_implementation: eager}"),
        "",
        {"model.config": "b", "model.tokenizer": "c", "attention.backend": "xla"},
    ),
    (
        XORL.replace("model_path: my/model}", "config_path: b, tokenizer_path: c}"),
        "",
        {"model.path": "b", "model.from_scratch": True, "model.config": None, "model.tokenizer": "c"},
    ),
    (
        XORL.replace("my/model}", "my/model, foundation: {rope_theta: 1.0e6, hidden_act: gelu}, merge_qkv: false}"),
        "",
        {"model.overrides": ("rope_theta=1000000.0", 'hidden_act="gelu"')},
    ),
    (
        XORL.replace("my/model}", "my/model, encoders: {image: {model_path: e}}}"),
        "",
        {"vision.patches_per_row": 128_000},
    ),
    (
        ERNIEKIT,
        "hidden_dropout_prob: 0.1\nattention_probs_dropout_prob: 0.2\ndropout_warmup_steps: 5\n",
        {"train.hidden_dropout": 0.1, "train.attention_dropout": 0.2, "train.dropout_warmup_steps": 5},
    ),
    (
        QEFFICIENT.replace("my/model}", "my/model, attn_implementation: eager}").replace(
            "a.json", "a.json, tokenizer_name: t"
        ),
        "",
        {"attention.backend": "xla", "model.tokenizer": "t"},
    ),
    (SUROGATE, "max_steps: 7\n", {"train.max_steps": 7, "train.epochs": 1.0}),
    (SUROGATE, "system: Be kind.\n", {"data.datasets[0].system_prompt": "Be kind."}),
    (SUROGATE, "report_to: [wandb]\n", {"log.wandb.enabled": True, "log.wandb.project": "Surogate"}),
    (SUROGATE, "lora_target_modules: [q_proj, v_proj]\n", {"lora.target_modules": ("q_proj", "v_proj")}),
    (
        SUROGATE.replace(
            "type: conversation", "type: conversation, message_property_mappings: {role: from, content: content}"
        ),
        "",
        {"data.datasets[0].message_property_mappings": ("role=from",)},
    ),
    (
        SUROGATE.replace("type: conversation", "type: instruction, instruction_field: q, output_field: a"),
        "",
        {"data.datasets[0].input_field": None, "data.datasets[0].instruction_field": "q"},
    ),
    # XORL
    (
        XORL,
        "",
        {"optim.learning_rate": 5e-5, "optim.schedule": "constant", "lora.enabled": False, "data.seq_len": 32000},
    ),
    (XORL.replace("out}", "out, optimizer: sgd}"), "", {"optim.name": "sgd", "optim.beta1": 0.0}),
    (
        XORL.replace("out}", "out, optimizer: anyprecision_adamw}"),
        "",
        {"optim.name": "adamw", "optim.state_dtype": "bfloat16"},
    ),
    (XORL.replace("out}", "out, optimizer: muon}"), "", {"optim.muon.learning_rate": 0.02}),
    (XORL.replace("out}", "out, recompute_modules: [mlp]}"), "", {"memory.remat": "ffn"}),
    (XORL.replace("out}", "out, recompute_modules: [mlp, self_attn]}"), "", {"memory.remat": "block"}),
    (XORL.replace("out}", "out, enable_activation_offload: true}"), "", {"memory.remat": "offload"}),
    (XORL.replace("out}", "out, data_parallel_mode: ddp}"), "", {"mesh.data": -1, "mesh.fsdp": 1}),
    (
        XORL.replace("out}", "out, data_parallel_replicate_size: 2, data_parallel_shard_size: 4}"),
        "",
        {"mesh.data": 2, "mesh.fsdp": 4},
    ),
    (
        XORL.replace("out}", "out, pipeline_parallel_size: 2, pipeline_parallel_schedule: GPipe}"),
        "",
        {"mesh.stage": 2, "parallel.pipeline": "gpipe"},
    ),
    (
        XORL.replace("out}", "out, enable_profiling: true, profile_start_step: 3, profile_end_step: 5}"),
        "",
        {"prof.start_step": 3, "prof.steps": 2},
    ),
    (XORL.replace("a.jsonl", "dummy"), "", {"data.datasets[0].samples": 4096, "data.datasets[0].dummy_length": 32000}),
    (XORL.replace("out}", "out, data_parallel_shard_size: 2}"), "", {"mesh.data": -1, "mesh.fsdp": 2}),
    (
        XORL.replace("out}", "out, data_parallel_shard_size: 4, expert_parallel_size: 4}"),
        "",
        {"mesh.data": -1, "mesh.fsdp": 1, "mesh.expert": 4},
    ),
    (
        XORL.replace("out}", "out, data_parallel_shard_size: 1, ulysses_parallel_size: 8, expert_parallel_size: 8}"),
        "",
        {"mesh.data": -1, "mesh.fsdp": 1, "mesh.expert": 1, "mesh.sequence": 8},
    ),
    (
        XORL.replace(
            "out}",
            "out, pipeline_parallel_size: 2, data_parallel_shard_size: 2, ringattn_parallel_size: 2, "
            "expert_parallel_size: 4, data_parallel_replicate_size: 1}",
        ),
        "",
        {"mesh.data": 1, "mesh.stage": 2, "mesh.fsdp": 1, "mesh.expert": 2, "mesh.context": 2},
    ),
    (
        XORL.replace("out}", "out, optimizer: muon, data_parallel_shard_size: 8, expert_parallel_size: 8}"),
        "",
        {"mesh.fsdp": 1, "mesh.expert": 8, "optim.name": "muon"},
    ),
    (
        XORL.replace("out}", "out, expert_parallel_size: 8}"),
        "",
        {"mesh.data": 1, "mesh.fsdp": -1, "mesh.expert": 8},
    ),
    (XORL.replace("out}", "out, weight_decay: 0.1}"), "", {"optim.no_decay": "", "optim.beta2": 0.95}),
    (XORL.replace("out}", "out, weight_decay: 0.1, no_decay_modules: [Qwen3RMSNorm]}"), "", {"optim.no_decay": "norm"}),
    (XORL, "lora: {enable_lora: true, save_lora_only: true}\n", {"export.merge": False}),
    (
        XORL.replace("out}", "out, enable_mixed_precision: false}"),
        "",
        {"precision.recipe": "bf16", "precision.master_dtype": "bfloat16"},
    ),
    (
        XORL.replace("}\ntrain", ", shuffle_merged_datasets: false, sample_packing_method: multipack}\ntrain"),
        "",
        {"data.shuffle": False, "data.shuffle_each": False, "data.packing_method": "best_fit"},
    ),
    (XORL.replace("out}", "out, ce_mode: quack_linear, load_weights_mode: grouped}"), "", {"train.output_dir": "out"}),
    (XORL, "lora: {enable_qlora: true, quant_format: nf4}\n", {"lora.enabled": True, "quant.format": "nf4"}),
    (XORL.replace("model_path: my/model", "config_path: my/model"), "", {"model.from_scratch": True}),
    (
        XORL.replace("}\ntrain", ", sample_packing_method: multipack}\ntrain"),
        "",
        {"data.packing_method": "first_fit_decreasing"},
    ),
    (XORL.replace("out}", "out, weight_decay: 0.1, no_decay_modules: [norm]}"), "", {"optim.no_decay": "norm"}),
    # TRL
    (TRL, "", {"optim.learning_rate": 2e-5, "train.epochs": 3.0, "model.dtype": "float32", "chat.loss_scale": "all"}),
    (TRL, "beta: 0.2\n", {"preference.beta": 0.2, "optim.learning_rate": 1e-6, "chat.loss_scale": "default"}),
    (TRL, "use_peft: true\nbeta: 0.2\n", {"lora.enabled": True, "lora.dropout": 0.0}),
    (TRL, "report_to: [tensorboard, wandb]\n", {"log.tensorboard": True, "log.wandb.enabled": True}),
    (TRL, "report_to: []\n", {"log.tensorboard": False}),
    (TRL, "use_peft: true\nweight_decay: 0.1\n", {"optim.weight_decay": 0.1, "optim.no_decay": None}),
    (
        TRL,
        "save_strategy: no\neval_strategy: no\nlogging_strategy: no\n",
        {"ckpt.at_end": False, "eval.steps": 0, "log.every": 0},
    ),
    # Pairs of answers share a row, and the limit is for each answer.
    (
        TRL,
        "beta: 0.2\n",
        {"data.seq_len": 128, "data.datasets[0].max_tokens": 64, "data.datasets[0].longer": "right"},
    ),
    (TRL, "loss_type: kto\ntruncation_mode: keep_end\n", {"data.seq_len": 128, "data.datasets[0].longer": "left"}),
    (
        TRL.replace("a/b", "a.txt"),
        "datasets: [{path: b.jsonl}]\ntest_split_size: 0.1\neval_strategy: epoch\n",
        {"data.datasets[0].path": "b.jsonl", "data.eval_datasets": (), "data.validation_split": 0.1},
    ),
    (TRL, "max_seq_length: 64\n", {"data.seq_len": 64}),
    (TRL, "lora_task_type: SEQ_CLS\n", {"data.datasets[0].max_tokens": 64, "data.datasets[0].longer": "delete"}),
    (
        AXOLOTL.replace("chat_template", "chat_template.default"),
        "rl: dpo\nsequence_len: 64\nexcess_length_strategy: truncate\n",
        {"data.seq_len": 128, "data.datasets[0].max_tokens": 64, "data.datasets[0].longer": "right"},
    ),
    (AXOLOTL, "save_strategy: no\neval_strategy: no\n", {"ckpt.at_end": False, "ckpt.save_epochs": None}),
    (TRL, "save_steps: 0.1\nmax_steps: 25\n", {"ckpt.save_steps": 3}),
    (TRL, "eval_strategy: steps\neval_steps: 0.1\n", {"eval.steps": 0, "eval.epochs": 0.1 * 3.0}),
    (TRL, "reward_funcs: [accuracy]\n", {"rollout.rewards": ("open_r1.rewards:accuracy_reward",)}),
    (TRL, "reward_funcs: [a.b]\nbeta: 0.1\nuse_bias_correction_kl: false\n", {"grpo.kl_ratio": False}),
    (TRL, "reward_funcs: [a.b]\nbeta: 0.1\n", {"grpo.beta": 0.1, "grpo.kl_ratio": True}),
    (TRL, "reward_funcs: [a.b]\nloss_type: cispo\nepsilon_high: 5.0\n", {"grpo.clip_high": 4.0}),
    (TRL, "loss_type: dft\n", {"train.loss": "dft"}),
    (TRL, 'chat_template: "{% for message in messages %}{% endfor %}"\n', {"preference.loss": None}),
    # Axolotl
    (AXOLOTL, "", {"optim.schedule": "cosine", "optim.warmup_ratio": 0.03, "memory.remat": "none"}),
    (
        AXOLOTL,
        "processor_type: AutoProcessor\nimage_size: [300, 200]\nsequence_len: 64\n",
        {"vision.patches_per_row": 256, "vision.max_pixels": 60_000},
    ),
    (AXOLOTL, "adapter: lora\nlora_r: 4\n", {"lora.rank": 4, "lora.target_modules": ("q_proj", "v_proj")}),
    (AXOLOTL, "adapter: lora\nlora_dropout: 0.05\n", {"lora.dropout": 0.05}),
    (
        AXOLOTL.replace("chat_template", "chat_template.default"),
        "adapter: lora\nlora_dropout: 0.05\nrl: dpo\n",
        {"preference.loss": "sigmoid", "lora.dropout": 0.0},
    ),
    (
        AXOLOTL,
        "loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 4\n",
        {"guard.action": None, "guard.max_loss": 5.0, "guard.max_loss_steps": 4},
    ),
    (AXOLOTL, "gradient_checkpointing: offload\nsave_steps: 0.25\nnum_epochs: 2\n", {"ckpt.save_epochs": 0.5}),
    (AXOLOTL.replace("my/model", "google/gemma-4-E2B-it"), "chat_template: gemma4\n", {"chat.template": None}),
    (AXOLOTL, "chat_template: tokenizer_default_fallback_chatml\n", {"chat.template": None}),
    # Its template has a system message by default, unlike chatml.
    (AXOLOTL.replace("my/model", "Qwen/Qwen2.5-1.5B"), "chat_template: qwen_25\n", {"chat.template": None}),
    (
        AXOLOTL.replace("chat_t", "bradley_terry.chat_t").replace("plate}", "plate.default}"),
        "reward_model: true\nchat_template: chatml\n",
        {"chat.template": "chatml"},
    ),
    (AXOLOTL, "gptq: false\ns2_attention: false\nqat: {}\nlisa_n_layers: 0\n", {"lora.enabled": False}),
    (AXOLOTL, "optimizer: optimi_adamw\nadam_beta2: 0.95\n", {"optim.beta2": 0.95, "optim.epsilon": 1e-6}),
    (
        AXOLOTL,
        "adapter: qlora\nload_in_4bit: true\nfsdp_config: {offload_params: true}\n",
        {"memory.offload_optimizer": True, "memory.offload_quants": True, "mesh.fsdp": -1},
    ),
    (
        AXOLOTL,
        "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n",
        {"memory.offload_optimizer": True, "memory.offload_master": True, "parallel.zero": 3},
    ),
    (
        AXOLOTL,
        "adapter: lora\nlora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'\n",
        {"lora.target_modules": r"(?:layers.[\d]+.(mlp|self_attn).(up|q)_proj)$"},
    ),
    (
        AXOLOTL,
        "special_tokens: {pad_token: <p>, additional_special_tokens: [<a>]}\n",
        {"data.special_tokens": ("<a>",)},
    ),
    # ERNIEKit
    (ERNIEKIT, "num_samples_each_epoch: 6000000\n", {"data.samples_per_epoch": None}),
    (ERNIEKIT, "lora: true\n", {"lora.rank": 8, "lora.alpha": 16.0, "optim.learning_rate": 3e-4}),
    (ERNIEKIT, "lora: true\nrslora: true\n", {"lora.alpha": 4.0, "lora.use_rslora": True}),
    (ERNIEKIT, "lora: true\nrslora_plus: true\n", {"lora.alpha": 4.0, "lora.lr_ratio": 4.0}),
    (ERNIEKIT, "fine_tuning: LoRA\nweight_quantize_algo: weight_only_mix\n", {"quant.format": "weight_only_mix"}),
    (
        ERNIEKIT,
        "weight_quantize_algo: fp8_linear\n",
        {"precision.recipe": "fp8_hybrid", "precision.fp8.hadamard": True, "precision.fp8.online_scale_steps": 200},
    ),
    (ERNIEKIT.replace("bf16: true\n", ""), "", {"precision.recipe": "bf16", "model.dtype": "float32"}),
    (ERNIEKIT.replace("bf16: true", "bf16: false"), "", {"precision.recipe": "fp32", "model.dtype": "float32"}),
    (ERNIEKIT.replace("bf16", "fp16"), "", {"precision.recipe": "fp16", "model.dtype": "float32"}),
    (ERNIEKIT.replace("bf16", "fp16"), "fp16_opt_level: O2\n", {"precision.recipe": "fp16", "model.dtype": "float16"}),
    (ERNIEKIT, "fp16_opt_level: O2\n", {"precision.gradient_dtype": "bfloat16", "model.dtype": "bfloat16"}),
    (ERNIEKIT, "lr_scheduler_type: polynomial\npower: 2.0\n", {"optim.power": 2.0, "optim.min_lr": 1e-7}),
    (ERNIEKIT, "lr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\n", {"optim.schedule": "constant"}),
    (
        ERNIEKIT,
        "do_eval: true\neval_dataset_path: e.jsonl\n",
        {"data.eval_datasets[0].path": "e.jsonl", "eval.max_batches": 1},
    ),
    (
        ERNIEKIT,
        "sharding: stage2\nsharding_parallel_degree: 4\n",
        {"parallel.zero": 2, "mesh.fsdp": 4, "mesh.data": -1},
    ),
    (ERNIEKIT, "recompute: true\nrecompute_granularity: core_attn\n", {"memory.remat": "dots"}),
    (
        ERNIEKIT,
        "stage: DPO\nloss_type: simpo\nbeta: 2.0\nsimpo_gamma: 1.0\nmax_prompt_len: 32\n",
        {
            "preference.loss": "simpo",
            "preference.beta": 2.0,
            "preference.simpo_gamma": 1.0,
            "data.datasets[0].type": "preference",
            "data.datasets[0].max_prompt_tokens": 32,
        },
    ),
    (ERNIEKIT, "stage: DPO\nreference_free: true\n", {"preference.loss": "sigmoid", "preference.reference": None}),
    (ERNIEKIT, "beta: 0.2\n", {"preference.loss": None}),
    # QEfficient
    (QEFFICIENT, "", {"data.datasets[0].path": "a.json", "data.validation_split": 0.2, "precision.recipe": "fp16"}),
    (QEFFICIENT, "training: {eval_strategy: steps, eval_steps: 5}\n", {"eval.steps": 5}),
    (QEFFICIENT, "training: {save_strategy: steps, save_steps: 5}\n", {"ckpt.save_steps": 5}),
    (QEFFICIENT, "training: {num_train_epochs: 3}\n", {"ckpt.save_epochs": 1.0, "eval.epochs": 1.0}),
    (QEFFICIENT, "callbacks:\n  early_stopping:\n", {"eval.patience": 3, "eval.min_improvement": 0.01}),
    (
        QEFFICIENT.replace("'Sum up: {text}'", "'f\"Sum up:\n\n\n{text}\\n\"'"),
        "",
        {"data.datasets[0].prompt_format": "Sum up:\n\n{text}\n"},
    ),
    (QEFFICIENT.replace("lr: 1e-4", "optimizer_name: adam"), "", {"optim.name": "adamw", "optim.weight_decay": 0.0}),
    (QEFFICIENT, "training: {seed: 1, logging_strategy: epoch, seed: 2}\n", {"train.seed": 2, "log.every": 10}),
    (ERNIEKIT, "stage: PT\n", {"data.datasets[0].type": "text", "optim.learning_rate": 3e-5}),
    (ERNIEKIT, "stage: DPO\n", {"data.datasets[0].type": "preference", "optim.learning_rate": 1e-6}),
    (ERNIEKIT, "lora: true\nlearning_rate: 1e-3\n", {"optim.learning_rate": 1e-3}),
    (ERNIEKIT, "compute_type: wint4/8\nlora: true\n", {"quant.format": "weight_only_mix", "precision.recipe": "bf16"}),
    (ERNIEKIT, "compute_type: wint8\nfine_tuning: LoRA\n", {"quant.format": "int8", "lora.enabled": True}),
    (ERNIEKIT, "compute_type: fp8\nlora: true\n", {"quant.format": "fp8", "precision.recipe": "bf16"}),
    (
        ERNIEKIT,
        "compute_type: fp8\n",
        {"optim.state_dtype": "bfloat16", "memory.offload_optimizer": True, "precision.recipe": "fp8_hybrid"},
    ),
    (
        ERNIEKIT,
        "offload_optim: true\npipeline_parallel_degree: 2\n",
        {"mesh.stage": 2, "memory.offload_optimizer": False},
    ),
    (ERNIEKIT, "fine_tuning: Full\nlora: true\n", {"lora.enabled": False}),
    (ERNIEKIT, "packing: false\n", {"data.packing": False}),
    (ERNIEKIT, "split_multi_turn: true\nuse_sp_callback: true\n", {"data.packing": True}),
    (
        ERNIEKIT.replace("a.jsonl", "a.jsonl,b.jsonl"),
        'train_dataset_type: erniekit\ntrain_dataset_prob: "0.5,0.5"\nmix_strategy: concat\n',
        {"data.mixing": "concat", "data.datasets[0].weight": None, "data.datasets[0].system_field": "system"},
    ),
    (ERNIEKIT, "num_samples_each_epoch: 500\nmix_strategy: concat\n", {"data.samples_per_epoch": None}),
    (ERNIEKIT, "save_strategy: epoch\n", {"ckpt.save_epochs": 1.0, "ckpt.save_steps": 0}),
    (ERNIEKIT, "", {"ckpt.save_steps": 500, "ckpt.at_end": True}),
    (ERNIEKIT, "save_steps: 2\n", {"ckpt.save_steps": 2}),
    (
        ERNIEKIT,
        "save_strategy: no\nevaluation_strategy: no\ndo_eval: true\neval_dataset_path: e.jsonl\n",
        {"ckpt.at_end": False, "data.eval_datasets": ()},
    ),
    (XORL.replace("out}", "out, load_checkpoint_path: other/run}"), "", {"ckpt.start": "other/run"}),
    (QEFFICIENT, "training: {fsdp_config: {min_num_params: 1}}\n", {"mesh.fsdp": -1, "mesh.data": 1}),
    (QEFFICIENT, "scheduler: {scheduler_name: cosine, warmup_steps: 0.05}\n", {"optim.warmup_ratio": 0.05}),
    (QEFFICIENT, "scheduler: {scheduler_name: cosine, warmup_steps: 100}\n", {"optim.warmup_steps": 100}),
    (QEFFICIENT.replace("dataset: {", "dataset: {num_workers: 3, "), "", {"data.num_workers": 3}),
    (
        QEFFICIENT.replace("dataset: {", "dataset: {num_workers: 3, dataloader_num_workers: 2, "),
        "",
        {"data.num_workers": 2, "data.prefetch": 1},
    ),
    (QEFFICIENT, "callbacks: [tensorboard]\n", {"log.tensorboard": True}),
    (
        "model: {model_name: my/model, auto_class_name: AutoModelForSequenceClassification}\n"
        "dataset: {dataset_name: imdb, target_column: label, input_columns: [title, body], dataset_subset: plain}\n",
        "",
        {
            "model.head": "classification",
            "data.datasets[0].text_field": "{title} {body}",
            "data.datasets[0].subset": "plain",
        },
    ),
]


@pytest.mark.parametrize(
    ("system", "more", "expected"), TRANSLATED, ids=lambda part: str(part)[-60:].replace("\n", ";")
)
def test_options_become_ours(system, more, expected):
    config = resolve_text(system + more)
    assert {key: value(config, key) for key in expected} == expected


def test_a_key_that_is_written_twice_is_noted():
    notes = resolve_text(QEFFICIENT + "training:\n  seed: 1\n  seed: 2\n").notes
    assert "  training.seed = 2 -> written twice, in lines 5 and 6; the last counts" in notes


def test_what_switches_nothing_on_is_a_note():
    notes = "\n".join(resolve_text(SUROGATE + "trackio_space: null\n").notes)
    assert (
        "trackio_space = None -> left out: the table of Surogate lacks it, and its value switches nothing on" in notes
    )


def test_a_line_says_what_a_user_would_look_for_elsewhere():
    text = "output_dir: ./out\nspecial_tokens: {pad_token: <p>}\nloss_watchdog_threshold: 5.0\n"
    notes = "\n".join(resolve_text(AXOLOTL + text).notes)
    assert "train.output_dir = './out'; the result is in <output_dir>/<train.run_name>/export" in notes
    assert "special_tokens.pad_token = '<p>' -> padding is neither attended to nor trained" in notes
    assert "loss_watchdog_threshold = 5.0 -> guard.max_loss = 5.0" in notes


def test_what_is_not_there_yet_at_its_default_is_a_note_and_so_is_a_reason():
    (note,) = [note for note in resolve_text(TRL + "eval_delay: 0\n").notes if "eval_delay" in note]
    assert note == "  eval_delay = 0 -> not supported yet, and not used by this value"
    notes = resolve_text(SUROGATE + "padding_side: left\nnormuon_beta2: 0.9\n").startup_notes
    assert notes[0] == "its.yaml: a config of Surogate, translated as follows:"
    assert any(
        note.startswith("  padding_side = 'left' -> padding is neither attended to nor trained") for note in notes
    )
    (moot,) = [note for note in notes if note.startswith("left out")]
    assert "optim.normuon.beta2 = 0.9: has no effect" in moot


def test_the_dialect_can_be_said_and_our_own_options_come_on_top():
    text = "learning_rate: 1e-4\nmodel_name_or_path: my/model\ntrain_dataset_path: a.jsonl\n"
    config = resolve_text(text, "erniekit", [("optim.learning_rate", "3e-4")])
    assert config.optim.learning_rate == 3e-4 and config.model.path == "my/model"
    pathlib.Path("top.yaml").write_text("base: its.yaml\noptim: {beta2: 0.95}\n")
    config = read_recipe("top.yaml").resolve()
    assert (config.optim.beta2, config.optim.learning_rate) == (0.95, 1e-4)
    assert config.startup_notes[0] == "its.yaml: a config of ERNIEKit, translated as follows:"
