"""Configs of other systems: recognition, the translation of each option, and the names of untranslatable ones."""

import pathlib
import re

import pytest

from jaxtune import command, options
from jaxtune.config import foreign, keys, read_recipe
from jaxtune.config.sources import yaml_file
from jaxtune.errors import UserError
from jaxtune.train import train

SUROGATE = "model: my/model\ndatasets: [{path: a.jsonl, type: conversation}]\nsequence_len: 512\n"
XORL = "model: {model_path: my/model}\ndata: {datasets: [{path: a.jsonl}]}\ntrain: {output_dir: out}\n"
ERNIEKIT = "model_name_or_path: my/model\ntrain_dataset_path: a.jsonl\nmax_seq_len: 64\nbf16: true\n"
QEFFICIENT = (
    "model: {model_name: my/model}\n"
    "dataset: {json_file_path: a.json, prompt_template: 'Sum up: {text}', completion_template: '{summary}'}\n"
    "optimizers: {lr: 1e-4}\n"
)
TRL = "model_name_or_path: my/model\ndataset_name: a/b\nmax_length: 64\n"
AXOLOTL = "base_model: my/model\ndatasets: [{path: a.jsonl, type: chat_template}]\nlearning_rate: 1e-4\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def resolve_text(text: str, dialect: str | None = None, overrides=()):
    pathlib.Path("its.yaml").write_text(text)
    return read_recipe("its.yaml", dialect=dialect).resolve(overrides)


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SUROGATE + "learning_rat: 1\n",
            "line 4: learning_rat = 1: no such option of Surogate; nearest: learning_rate",
        ),
        (
            SUROGATE + "report_to: [mlflow]\n",
            r"report_to = \['mlflow'\]: not supported yet; supported are aim, wandb, tensor",
        ),
        (
            SUROGATE + "template: minicpm\n",
            "template = 'minicpm': not supported yet: template is one of chatml, q",
        ),
        (TRL + "save_steps: .nan\n", "save_steps = nan: expected a value such as 500"),
        (SUROGATE + "zero_level: two\n", "zero_level = 'two': expected a value such as 1"),
        (
            SUROGATE.replace("type:", "tpye:"),
            r"line 2: datasets\[0\].tpye = 'conversation': no such option of Surogate's datasets; nearest: type",
        ),
        (
            SUROGATE.replace("[{path: a.jsonl, type: conversation}]", "a.jsonl"),
            "expected a list of datasets with a path",
        ),
        (SUROGATE + "lora_rank: -1\n", "its.yaml: lora.rank = -1: must be at least 1"),
        (
            SUROGATE + "distributed: {num_nodes: 2}\ngpus: 0\n",
            "num_nodes = 2: not supported yet: several nodes without",
        ),
        (SUROGATE + "loss: {ratio_type: token}\n", "loss.ratio_type = 'token': not supported yet: GRPO's trainer"),
        (SUROGATE + "early_stop: true\n", "early_stop = True: not supported yet: its four criteria; --config.eval"),
        (SUROGATE + "distillation: {teacher_model: t, teacher_api_base: 'http://a'}\n", "a teacher behind a server"),
        (
            SUROGATE.replace("conversation", "instruction, system_prompt_type: fixed"),
            "system_prompt_type = 'fixed': not supported yet: system_prompt_type fixed without system_prompt",
        ),
        (XORL.replace("out}", "out, load_weights_mode: skip}"), "load_weights_mode = 'skip': not supported yet"),
        (XORL.replace("out}", "out, enable_fp8_training: true}"), "enable_fp8_training = True: not supported yet: FP8"),
        (XORL.replace("out}", "out, data_parallel_mode: ddp, expert_parallel_size: 2}"), "without data_parallel_mode"),
        (TRL + "eval_delay: 5\n", "line 4: eval_delay = 5: not supported yet: evaluations that begin later"),
        (XORL.replace("my/model}", "my/model, foundation: [a]}"), "foundation = .*: expected a value such as {}"),
        (SUROGATE + "rope_scaling: 3\n", "rope_scaling = 3: not supported yet: .* linear, dynamic, yarn or JSON"),
        (XORL + "optim: {lr: 1}\n", "optim = .*: no such option of XORL"),
        (SUROGATE + "more: &a {b: 1}\nrope_scaling: {<<: *a, c: 2}\n", "line 4: more = .*: no such option of Surogate"),
        (TRL + "attn_implementation: [eager, sdpa]\n", "attn_implementation = .*: expected a value such as 'eager'"),
        (
            TRL + "use_peft: true\nbeta: 0.1\ndisable_dropout: false\n",
            "not supported yet: dropout when the model is comp",
        ),
        (ERNIEKIT + "stage: GRPO\n", "stage = 'GRPO': not supported yet: the stages are SFT, PT and DPO"),
        (
            ERNIEKIT + "do_train: false\n",
            "do_train = False: not supported yet: a file that neither trains nor evaluates",
        ),
        (ERNIEKIT + "compute_type: int3\n", "compute_type = 'int3': not supported yet: compute_type is one of bf16, "),
        (ERNIEKIT + "mix_strategy: all\n", "mix_strategy = 'all': not supported yet: mix_strategy is one of random, "),
        (
            ERNIEKIT + "train_dataset_type: kto\n",
            "train_dataset_type = 'kto': .* train_dataset_type is one of erniekit",
        ),
        (
            ERNIEKIT + "unified_checkpoint_config: async_save fast\n",
            "unified_checkpoint_config = 'async_save fast': not supported yet: fast; the words of",
        ),
        (
            ERNIEKIT + "amp_custom_white_list: matmul softmax\n",
            "amp_custom_white_list = 'matmul softmax': not supported yet: jaxtune computes softmax in float32",
        ),
        (
            ERNIEKIT + "amp_custom_black_list: matmul_v2\n",
            "amp_custom_black_list = 'matmul_v2': .* computes matmul_v2 in the recipe's dtype",
        ),
        (QEFFICIENT + "training: {type: ppo}\n", "training.type = 'ppo': not supported yet: type is one of sft, base"),
        (
            QEFFICIENT.replace("a.json", "a.json, dataset_type: mine"),
            "dataset_type = 'mine': not supported yet: dataset",
        ),
        (
            QEFFICIENT + "training: {fp16: true, bf16: true}\n",
            "training.bf16 = True: contradicts training.fp16 = True .line 4.",
        ),
        (TRL.replace("64", "null"), "line 3: max_length = None: not supported yet: no limit; .* write the tokens"),
        (TRL + "max_seq_length: 32\n", "max_seq_length = 32: contradicts max_length = 64 .line 3."),
        (TRL + "bf16: true\nfp16: true\n", "line 5: fp16 = True: contradicts bf16 = True .line 4."),
        (ERNIEKIT + "fp16: true\n", "line 5: fp16 = True: contradicts bf16 = True .line 4."),
        (TRL + "load_in_8bit: true\nload_in_4bit: true\n", "load_in_4bit = True: contradicts load_in_8bit"),
        (AXOLOTL + "warmup_steps: 3\nwarmup_ratio: 0.5\n", "warmup_ratio = 0.5: contradicts warmup_steps = 3 .line 4."),
        (
            AXOLOTL + "save_strategy: no\nsave_steps: 5\n",
            "save_steps = 5: .* save_strategy: no with save_steps; remove one of them",
        ),
        (
            AXOLOTL + "val_set_size: 0.1\neval_strategy: epoch\nevals_per_epoch: 4\n",
            "evals_per_epoch = 4: .* eval_strategy: epoch with evals_per_epoch; remove one of them",
        ),
        (AXOLOTL + "load_in_4bit: true\n", "load_in_4bit = True: .* without an adapter"),
        (
            AXOLOTL + "adapter: qlora\nload_in_8bit: true\n",
            "adapter = 'qlora': .* load_in_8bit with adapter: qlora, whose weights have 4 bits",
        ),
        (
            TRL.replace("a/b", "a.txt") + "eval_strategy: steps\n",
            "line 4: eval_strategy = 'steps': .* a test split .dataset_test_split. of a.txt, which is one file",
        ),
        (QEFFICIENT + "training: {dtype: int8}\n", "training.dtype = 'int8': not supported yet: int8; dtype and torch"),
        (
            QEFFICIENT.replace("lr: 1e-4", "optimizer_name: Adam, weight_decay: 0.01"),
            "optimizers.weight_decay = 0.01: not supported yet: weight_decay of Adam, which torch adds to the gradient",
        ),
        (QEFFICIENT.replace("lr: 1e-4", "optimizer_name: lamb"), "the optimizers are adamw, adam, sgd"),
        (
            QEFFICIENT + "scheduler: {scheduler_name: cosine_with_min_lr}\n",
            "cosine_with_min_lr without scheduler.lr_scheduler_kwargs: {min_lr: ...}, which it needs",
        ),
        (
            QEFFICIENT.replace("json_file_path: a.json", "dataset_name: x/y, dataset_subset: a, config_name: b"),
            "dataset.dataset_subset = 'a': .* two subsets, a and b",
        ),
        (
            QEFFICIENT.replace("'Sum up: {text}'", """'f"\\x"'"""),
            "prompt_template = .*: not supported yet: a Python text that cannot be read",
        ),
        (
            ERNIEKIT + "stage: DPO\nloss_type: ppo\n",
            "loss_type = 'ppo': not supported yet: for DPO, loss_type is one of sigmoid, ipo",
        ),
        (ERNIEKIT + "save_strategy: weekly\n", "save_strategy = 'weekly': not supported yet: the strategies are steps"),
        (
            ERNIEKIT + "per_device_train_batch_size: 2\nbatch_size: 4\n",
            "batch_size = 4: per_device_train_batch_size .line 5. already sets train.micro_batch_size to 2",
        ),
        (
            QEFFICIENT.replace("prompt_template:", "prompt_func: 'a.py:f', prompt_template:"),
            "prompt_template = .*: dataset.prompt_func .line 2. already sets data.datasets.i..prompt_format",
        ),
        (
            QEFFICIENT.replace("prompt_template: 'Sum up: {text}'", "prompt_func: 'a.py:f', completion_func: 'a.py:g'"),
            "prompt_func = .*: not supported yet: two functions; write one that returns",
        ),
        (
            QEFFICIENT + "callbacks:\n  my_callback:\n",
            "callbacks.my_callback = None: not supported yet: callbacks of your own; train.plugins names Python files",
        ),
        (
            TRL + "lr_scheduler_type: reduce_lr_on_plateau\n",
            "lr_scheduler_type = .*: not supported yet: the schedules are",
        ),
        (
            SUROGATE + "gradient_dtype: fp32\n",
            "gradient_dtype = 'fp32': not supported yet: gradients of activations in another dtype; .* they are bf16",
        ),
        (TRL + "optim: galore_adamw\n", "optim = 'galore_adamw': not supported yet: the optimizers are adamw_torch,"),
        (TRL + "gradient_acumulation_steps: 1\n", "no such option of TRL; nearest: gradient_accumulation_steps"),
        (
            TRL + "loss_type: nefl\n",
            "loss_type = 'nefl': not supported yet: loss_type must be nll, chunked_nll or dft, or for DPO",
        ),
        (
            TRL + "sync_ref_model: true\n",
            "sync_ref_model = True: not supported yet: mixing the model into the reference",
        ),
        (
            TRL + "eval_strategy: often\n",
            "eval_strategy = 'often': not supported yet: eval_strategy must be no, steps or epoch",
        ),
        (AXOLOTL + "sample_paking: true\n", "no such option of Axolotl; nearest: sample_packing"),
        (AXOLOTL + "rl: grpo\n", "rl = 'grpo': not supported yet: rl must be one of dpo, ipo, orpo, kto, simpo"),
        (
            AXOLOTL + "chat_template: llama4\n",
            "chat_template = 'llama4': not supported yet: the template llama4 for a model whose name is not of that",
        ),
        (AXOLOTL + "optimizer: adamw_torch_4bit\n", "optimizer state in 4 bits or FP8; adamw_torch_8bit needs 8 bits"),
        (AXOLOTL + "unfrozen_parameters: ['a$[:9]']\n", r"training a range of rows \(a\$\[:9\]\)"),
        (AXOLOTL + "kd_trainer: true\n", "distill.teacher names a model instead"),
        (
            TRL + "reward_funcs: [cosine]\n",
            "reward_funcs = .*: not supported yet: the reward function 'cosine', which has settings in open-r1",
        ),
        (
            TRL + "reward_funcs: [a.b]\nloss_type: cispo\n",
            "not supported yet: for cispo, epsilon_high is the largest ratio itself",
        ),
        (TRL + "num_generations: 4\n", "num_generations = 4: not supported yet: GRPO without reward_funcs"),
        (TRL + "teacher_model_name_or_path: a\nseq_kd: true\n", "write lmbda: 1.0, or seq_kd: false"),
        (TRL + "dataset_kwargs: {skip_prepare_dataset: true}\n", "not supported yet: dataset_kwargs skip_prepare"),
        (
            AXOLOTL + "plugins: [a.SpectrumPlugin]\n",
            "plugins = .*: not supported yet: plugins of torch, such as a.Spectrum",
        ),
        (
            AXOLOTL.replace("type: chat_template", "type: sharegpt"),
            r"datasets\[0\].type = 'sharegpt': not supported yet: type must be completion, chat_template, alpaca",
        ),
        (
            AXOLOTL.replace("}]", ", train_on_eos: all}, {path: b, type: chat_template, train_on_eos: turn}]"),
            "train_on_inputs = False: not supported yet: a different train_on_eos for each dataset; use one for all",
        ),
        (
            "learning_rate: 1\nmax_steps: 3\n",
            "Surogate, ERNIEKit, TRL and Axolotl have these options; choose one with --dialect=surogate",
        ),
    ],
)
def test_what_cannot_be_translated_is_an_error_by_name(text, told):
    with pytest.raises(UserError, match=told):
        resolve_text(text)


@pytest.mark.parametrize(
    "lines, named",
    [
        ("stage: KTO\nbeta: 0.2\nloss_type: sigmoid\nmax_prompt_len: 5\n", "stage"),
        ("stage: DPO\nloss_type: ppo\nbeta: 0.2\n", "loss_type"),
        ("compute_type: int3\nweight_quantize_algo: nf4\napply_hadamard: false\n", "compute_type"),
        ("train_dataset_prob: a\nmix_strategy: concat\n", "train_dataset_prob"),
        ("beta: 0.5\nlabel_smoothing: 0.1\nsync_ref_model: true\n", "sync_ref_model"),
        ("bf16: true\nfp16: 'false'\n", "fp16"),
    ],
)
def test_one_wrong_value_is_one_error(lines, named):
    dialect, least = ("trl", TRL) if "sync" in lines else ("erniekit", ERNIEKIT)
    pathlib.Path("its.yaml").write_text(least + lines)
    problems = foreign.translate(yaml_file.read(pathlib.Path("its.yaml"), "its.yaml"), dialect).problems
    assert [problem.keys for problem in problems] == [(named,)]


def test_a_file_that_only_evaluates_is_refused_by_train():
    config = resolve_text(ERNIEKIT + "do_train: false\ndo_eval: true\neval_dataset_path: e.jsonl\n")
    assert not config.data.datasets and config.data.eval_datasets[0].path == "e.jsonl"
    with pytest.raises(UserError, match="nothing to train on: .* evaluate only, with jaxtune evaluate"):
        train(config)


def test_a_key_that_is_written_twice_is_noted():
    notes = resolve_text(QEFFICIENT + "training:\n  seed: 1\n  seed: 2\n").notes
    assert "  training.seed = 2 -> written twice, in lines 5 and 6; the last counts" in notes


LLAMA_FACTORY = "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\ncutoff_len: 2048\n"
TORCHTUNE = "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8}\nepochs: 1\nseed: null\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            LLAMA_FACTORY,
            "a config of LLaMA-Factory .it has finetuning_type., which is not supported; use jaxtune's options "
            r"\(`jaxtune options finetuning_type` names ours\); --dialect=NAME reads a config of Surogate, XORL",
        ),
        (
            TORCHTUNE,
            r"a config of torchtune .it has _component_., which is not supported; .*\(`jaxtune options --all` lists",
        ),
        (
            "train: {epochs: 1}\ndata: {class_path: litgpt.data.Alpaca}\nout_dir: a\nlora_r: 8\nseed: 1\n",
            "a config of LitGPT .it has class_path., which is not supported",
        ),
    ],
)
def test_a_system_without_a_table_is_named(text, told):
    with pytest.raises(UserError, match=told):
        resolve_text(text)


def test_marks_of_systems_without_a_table_are_options_of_no_other():
    marks = {mark for text in foreign.MARKS.values() for mark in text.split()}
    theirs = {part for dialect in foreign.DIALECTS for name in foreign.table(dialect) for part in name.split(".")}
    assert not marks & (theirs | {key.rpartition(".")[2] for key in keys.options()})
    with pytest.raises(UserError, match="lora.lora_target = 'all': no such option; nearest: lora.target_modules"):
        resolve_text("base: qwen_lora:my/model\nlora: {lora_target: all}\n")


def test_what_switches_nothing_on_is_a_note():
    notes = "\n".join(resolve_text(SUROGATE + "trackio_space: null\n").notes)
    assert (
        "trackio_space = None -> left out: the table of Surogate lacks it, and its value switches nothing on" in notes
    )


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--learning_rate=2e-5", "nearest: --config.optim.learning_rate"),
        ("--per_device_train_batch_size 4", "nearest: --config.train.micro_batch_size"),
        ("--micro_batch_size=4", "nearest: --config.train.micro_batch_size"),
        ("--gradient_accumulation_steps=8", "nearest: --config.train.grad_accum_steps"),
        ("--num_train_epochs=3", "nearest: --config.train.epochs"),
        ("--num_epochs=3", "nearest: --config.train.epochs"),
        ("--model_name_or_path=a/b", "nearest: --config.model.path"),
        ("--base_model=a/b", "nearest: --config.model.path"),
        ("--dataset_name=a/b", "nearest: --config.data.datasets"),
        ("--output_dir=out", "nearest: --config.train.output_dir"),
        ("--lr_scheduler_type=cosine", "nearest: --config.optim.schedule"),
        ("--max_seq_length=2048", "nearest: --config.data.seq_len"),
        ("--sequence_len=2048", "nearest: --config.data.seq_len"),
        ("--bf16", "nearest: --config.precision.recipe"),
        ("--gradient_checkpointing", "nearest: --config.memory.remat"),
        ("--lora_r=8", "nearest: --config.lora.rank"),
        ("--use_peft", "nearest: --config.lora.enabled"),
        ("--load_in_4bit", "nearest: --config.quant.format"),
        ("--logging_steps=5", "nearest: --config.log.every"),
        ("--report_to=wandb", "nearest: --config.log.wandb.enabled"),
        ("--beta=0.1", "nearest: --config.preference.beta"),
        ("--attn_implementation=sdpa", "nearest: --config.attention.backend"),
        ("--val_set_size=0.1", "nearest: --config.data.validation_split"),
        ("--train.seed=3", "nearest: --config.train.seed"),
        ("--train.lr 2e-5", "XORL's option is here --config.optim.learning_rate=2e-05"),
        ("--lora.enable_lora", "XORL's option is here --config.lora.enabled=True"),
        ("--training.num_train_epochs=3", "QEfficient's option is here --config.train.epochs=3"),
        ("--tensor_parallel_degree=4", "ERNIEKit's option is here --config.mesh.tensor=4"),
        ("--eval_num_steps=9", "Surogate's option is here --config.eval.max_batches=9"),
        ("--save_only_model", "TRL's option is here --config.ckpt.save_optimizer=False"),
        ("--text_column=a", "TRL's option is here --config.data.datasets[0].text_field=a"),
        ("--expert_parallel_size=2", "Axolotl's option is here --config.mesh.expert=2"),
        ("--train.gc_steps=3", "nearest: "),
    ],
)
def test_a_flag_of_another_system_is_answered_with_ours(flags, answer, capsys):
    assert command.main("train", ["--config=quickstart", *flags.split()]) == 2
    flag = re.split("[= ]", flags)[0]
    assert f"jaxtune: error: {flag}: no such flag; {answer}" in capsys.readouterr().err


def test_each_option_that_has_one_key_here_is_answered_with_it_on_the_command_line():
    for dialect in foreign.DIALECTS:
        for name, row in foreign.table(dialect).items():
            if not row.keys[0] or row.values:
                continue
            value = 3 if row.sample is None else row.sample
            nearest, translated = keys.nearest_option(name), foreign.translate_flag(name, value)
            answers = set(translated[1]) if translated else {nearest.key if nearest else ""}
            assert answers & set(row.keys), (dialect, name, answers)


def test_a_flag_that_no_system_translates_is_not_answered_as_theirs():
    assert foreign.translate_flag("train.gc_steps", 3) is foreign.translate_flag("train.foo", 3) is None


def test_a_line_says_what_a_user_would_look_for_elsewhere():
    text = "output_dir: ./out\nspecial_tokens: {pad_token: <p>}\nloss_watchdog_threshold: 5.0\n"
    notes = "\n".join(resolve_text(AXOLOTL + text).notes)
    assert "train.output_dir = './out'; the result is in <output_dir>/<train.run_name>/export" in notes
    assert "special_tokens.pad_token = '<p>' -> padding is neither attended to nor trained" in notes
    assert "loss_watchdog_threshold = 5.0 -> guard.max_loss = 5.0" in notes
    notes = "\n".join(resolve_text(TRL + "reward_funcs: [a.b]\nbeta: 0.1\n").notes)


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


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (
            AXOLOTL + "micro_batchsize: 2\n",
            "line 4: micro_batchsize = 2: no such option of Axolotl; nearest: micro_batch_size -> write "
            "micro_batch_size, or remove it",
        ),
        (AXOLOTL + "xyzzy_qwq: 2\n", "line 4: xyzzy_qwq = 2: no such option of Axolotl -> remove it"),
        (
            AXOLOTL + "s2_attention: true\n",
            "s2_attention = True: not supported yet: shifted sparse attention -> remove it: its default, None, is "
            "supported",
        ),
        (AXOLOTL + "lora_r: x\n", "lora_r = 'x': expected a value such as 8 -> write such a value"),
        (
            ERNIEKIT + "per_device_train_batch_size: 2\nbatch_size: 4\n",
            "already sets train.micro_batch_size to 2 -> remove one of the two, such as batch_size",
        ),
        # One fault of options that are read together blames those that the file states, once.
        (AXOLOTL + "rl: grpo\n", "change 1 option:\n  line 4: rl = 'grpo': "),
        (
            AXOLOTL + "dp_shard_size: -3\n",
            "mesh.fsdp = -3: must be at least 1, or -1 .*\n  line 4: dp_shard_size = -3 ",
        ),
        (
            AXOLOTL.replace("my/model", "x\nload_in_4bit: true\nquant: 1"),
            "no such option of Axolotl",
        ),
    ],
    ids=lambda part: part[-50:].replace("\n", ";"),
)
def test_a_verdict_says_which_lines_to_change_to_what(text, verdict, capsys):
    pathlib.Path("its.yaml").write_text(text)
    assert options.main(["--from=its.yaml"]) == 2
    assert re.search(verdict, capsys.readouterr().err)


def test_options_from_shows_what_becomes_of_a_config_without_training(capsys):
    pathlib.Path("its.yaml").write_text(SUROGATE + "normuon_beta2: 0.9\n")
    assert options.main(["--from=its.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "sequence_len = 512 -> data.seq_len = 512\n" in shown
    assert "lora_dropout = 0.05 (its default) -> lora.dropout = 0.05\n" in shown
    assert "left out: translation: optim.normuon.beta2 = 0.9: has no effect" in shown
    assert shown.endswith("\nits.yaml runs as it is: jaxtune train its.yaml\n")
    pathlib.Path("its.yaml").write_text(SUROGATE + "report_to: mlflow\n")
    assert options.main(["--from=its.yaml"]) == 2
    shown = capsys.readouterr()
    assert (
        "sequence_len = 512 -> data.seq_len = 512\n" in shown.out
        and "report_to = 'mlflow': not supported yet" in shown.err
    )
    assert shown.err == (
        "jaxtune: error: its.yaml: does not run as it is; change 1 option:\n  line 4: report_to = 'mlflow': not "
        "supported yet; supported are aim, wandb, tensorboard, surogate, none -> write one of these\n"
    )
    pathlib.Path("its.yaml").write_text("base: qwen_lora\n")
    assert options.main(["--from=its.yaml"]) == 2
    assert "its options match none of Surogate, XORL, ERNIEKit, QEfficient, TRL, Axolotl" in capsys.readouterr().err
    assert options.main(["--from=its.yaml", "--dialect=unsloth"]) == 2
    assert "not one of surogate, xorl, erniekit, qefficient, trl, axolotl" in capsys.readouterr().err
