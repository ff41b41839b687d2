"""Whole configs of ERNIEKit and QEfficient, shaped as their users write them: what is trained, where, and how."""

import pytest

from jaxtune.config import read_recipe

ERNIEKIT = {
    "SFT of all weights": (
        """
### data
train_dataset_type: "erniekit"
eval_dataset_type: "erniekit"
train_dataset_path: "data/chats.jsonl"
train_dataset_prob: "1.0"
eval_dataset_path: "data/held_out.jsonl"
eval_dataset_prob: "1.0"
max_seq_len: 8192
num_samples_each_epoch: 6000000

### model
model_name_or_path: baidu/ERNIE-4.5-0.3B-PT
fine_tuning: Full
fuse_rope: true
use_sparse_head_and_loss_fn: true

### finetuning
stage: SFT
seed: 23
do_train: true
do_eval: true
distributed_dataloader: false
dataloader_num_workers: 1
batch_size: 1
num_train_epochs: 2
max_steps: -1
max_evaluate_steps: 10000
eval_steps: 10000
evaluation_strategy: steps
save_steps: 10000
save_total_limit: 5
save_strategy: steps
logging_steps: 1
release_grads: true
gradient_accumulation_steps: 8
logging_dir: ./vdl_log
output_dir: ./output
disable_tqdm: true
warmup_steps: 20
learning_rate: 3.0e-5
lr_scheduler_type: cosine
min_lr: 1.0e-6
layerwise_lr_decay_bound: 1.0
weight_decay: 0.1
adam_epsilon: 1.0e-8
adam_beta1: 0.9
adam_beta2: 0.95
offload_optim: false
tensor_parallel_degree: 1
pipeline_parallel_degree: 1
sharding_parallel_degree: 1
sharding: stage1
sequence_parallel: true
pipeline_parallel_config: disable_partial_send_recv enable_clear_every_step_cache
recompute: false
recompute_use_reentrant: true
compute_type: bf16
fp16_opt_level: O2
disable_ckpt_quant: true
amp_master_grad: true
amp_custom_white_list: [lookup_table, flash_attn, matmul]
amp_custom_black_list: [reduce_sum, elementwise_div]
unified_checkpoint: true
unified_checkpoint_config: async_save
""",
        {
            "precision.recipe": "bf16",
            "model.dtype": "bfloat16",
            "lora.enabled": False,
            "optim.no_decay": "norm|bias",
            "optim.schedule": "cosine",
            "train.epochs": 2,
            "train.max_steps": None,
            "data.datasets[0].system_field": "system",
            "data.eval_datasets[0].path": "data/held_out.jsonl",
            "mesh.fsdp": 1,
            "mesh.data": -1,
        },
    ),
    "LoRA of a model in int8": (
        """
train_dataset_type: alpaca
train_dataset_path: data/alpaca.json
train_dataset_prob: "1.0"
max_seq_len: 8192
packing: true
mix_strategy: concat
model_name_or_path: baidu/ERNIE-4.5-21B-A3B-PT
moe_group: dummy
fine_tuning: LoRA
lora_rank: 32
lora_alpha: -1
lora_plus_scale: 1.0
rslora: false
stage: SFT
do_train: true
batch_size: 1
max_steps: 3000
gradient_accumulation_steps: 8
learning_rate: 3.0e-4
warmup_steps: 20
save_strategy: steps
save_steps: 500
output_dir: ./output
tensor_parallel_degree: 2
sharding_parallel_degree: 1
sequence_parallel: true
use_sp_callback: true
compute_type: wint8
fp16_opt_level: O2
recompute: true
recompute_granularity: full_attn
""",
        {
            "quant.format": "int8",
            "lora.rank": 32,
            "lora.alpha": 64.0,
            "data.datasets[0].type": "instruction",
            "data.datasets[0].instruction_field": "{instruction}{input}",
            "data.packing": True,
            "mesh.tensor": 2,
            "memory.remat": "attention+qkv",
        },
    ),
    "LoRA of experts in int4, other layers in int8": (
        """
train_dataset_type: erniekit
train_dataset_path: data/chats.jsonl
max_seq_len: 8192
model_name_or_path: baidu/ERNIE-4.5-300B-A47B-PT
moe_group: mp
moe_multimodal_dispatch_use_allgather: v2-alltoall-unpad
fine_tuning: LoRA
lora_rank: 32
stage: SFT
do_train: true
batch_size: 1
num_train_epochs: 1
gradient_accumulation_steps: 16
warmup_steps: 20
tensor_parallel_degree: 4
pipeline_parallel_degree: 1
sharding: stage1
compute_type: wint4/8
use_flash_attention: true
use_sparse_flash_attn: true
use_attn_mask_start_row_indices: true
save_strategy: "no"
""",
        {
            "quant.format": "weight_only_mix",
            "precision.recipe": "bf16",
            "optim.learning_rate": 3e-4,
            "mesh.tensor": 4,
            "ckpt.at_end": False,
        },
    ),
    "FP8 with stages": (
        """
train_dataset_type: erniekit
train_dataset_path: data/chats.jsonl
max_seq_len: 8192
model_name_or_path: baidu/ERNIE-4.5-300B-A47B-PT
fine_tuning: Full
stage: SFT
do_train: true
batch_size: 1
max_steps: 2000
gradient_accumulation_steps: 16
learning_rate: 1.0e-5
warmup_steps: 50
tensor_parallel_degree: 4
tensor_parallel_config: sync_param sync_grad sync_moment
pipeline_parallel_degree: 4
pp_seg_method: "[0, 14, 28, 42, 57]"
virtual_pp_degree: 1
add_tail_layers: 1
sharding_parallel_degree: 1
sharding: stage1
compute_type: fp8
apply_hadamard: true
use_lowprecision_moment: true
tensorwise_offload_optimizer: true
apply_online_actscale_step: 200
optim_shard_num: 8
unified_checkpoint_config: ignore_merge_optimizer
optim: adamw_custom
recompute: true
""",
        {
            "precision.recipe": "fp8_hybrid",
            "precision.fp8.hadamard": True,
            "precision.fp8.online_scale_steps": 200,
            "optim.state_dtype": "bfloat16",
            "mesh.stage": 4,
            "memory.offload_optimizer": False,
            "memory.remat": "block",
        },
    ),
    "DPO of all weights": (
        """
train_dataset_type: erniekit
train_dataset_path: data/pairs.jsonl
train_dataset_prob: "1.0"
eval_dataset_type: erniekit
eval_dataset_path: data/pairs_eval.jsonl
max_seq_len: 8192
max_prompt_len: 2048
model_name_or_path: baidu/ERNIE-4.5-0.3B-PT
fine_tuning: Full
stage: DPO
do_train: true
do_eval: true
beta: 0.1
loss_type: sigmoid
pref_loss_ratio: 1.0
sft_loss_ratio: 0.2
label_smoothing: 0.0
offset_alpha: 0.0
simpo_gamma: 0.5
reference_free: false
ref_model_update_steps: -1
attention_probs_dropout_prob: 0.0
batch_size: 1
gradient_accumulation_steps: 36
num_train_epochs: 1
max_steps: 800
lr_scheduler_type: cosine
warmup_steps: 50
evaluation_strategy: steps
eval_steps: 20000
max_evaluate_steps: -1
compute_type: bf16
fp16_opt_level: O2
""",
        {
            "preference.loss": "sigmoid",
            "preference.sft_weight": 0.2,
            "data.datasets[0].type": "preference",
            "data.datasets[0].max_prompt_tokens": 2048,
            "data.eval_datasets[0].type": "preference",
            "optim.learning_rate": 1e-6,
            "eval.max_batches": None,
        },
    ),
    "SimPO of adapters": (
        """
train_dataset_type: alpaca
train_dataset_path: data/pairs.json
max_seq_len: 4096
model_name_or_path: baidu/ERNIE-4.5-0.3B-PT
fine_tuning: LoRA
lora_rank: 8
rslora_plus: true
stage: DPO
loss_type: simpo
beta: 2.0
simpo_gamma: 1.0
batch_size: 1
max_steps: 800
compute_type: bf16
""",
        {
            "preference.loss": "simpo",
            "preference.simpo_gamma": 1.0,
            "lora.use_rslora": True,
            "lora.lr_ratio": 4.0,
            "optim.learning_rate": 1e-5,
            "data.datasets[0].type": "preference",
        },
    ),
    "pre-training with long rows": (
        """
train_dataset_type: erniekit
train_dataset_path: corpus/part.jsonl
eval_dataset_type: erniekit
eval_dataset_path: corpus/held_out.jsonl
max_seq_len: 131072
model_name_or_path: baidu/ERNIE-4.5-0.3B-PT
continue_training: true
fine_tuning: Full
stage: PT
do_train: true
do_eval: true
packing: true
greedy_intokens: false
batch_size: 1
max_steps: 10000
learning_rate: 3.0e-4
sharding_parallel_degree: 8
sharding: stage3
recompute: true
recompute_granularity: full
use_sparse_head_and_loss_fn: true
use_fused_head_and_loss_fn: true
compute_type: bf16
""",
        {
            "data.datasets[0].type": "text",
            "data.eval_datasets[0].type": "text",
            "data.seq_len": 131072,
            "data.packing_method": "sequential",
            "parallel.zero": 3,
            "mesh.fsdp": 8,
        },
    ),
    "several datasets": (
        """
train_dataset_type: "erniekit,alpaca,messages"
train_dataset_path: "data/a.jsonl, data/b.json, data/c.jsonl"
train_dataset_prob: "0.6,0.3,0.1"
eval_dataset_type: "erniekit,erniekit"
eval_dataset_path: "one/eval.jsonl,two/eval.jsonl"
eval_dataset_prob: "0.5,0.5"
mix_strategy: interleave_under
split_multi_turn: false
packing: false
max_seq_len: 4096
model_name_or_path: baidu/ERNIE-4.5-0.3B-PT
lora: true
stage: SFT
do_train: true
do_eval: true
evaluation_strategy: epoch
per_device_train_batch_size: 4
per_device_eval_batch_size: 4
num_train_epochs: 3
bf16: true
save_strategy: epoch
use_flash_attention: false
""",
        {
            "data.mixing": "interleave_under",
            "data.datasets[1].weight": 0.3,
            "data.datasets[2].tools_field": "tools",
            "data.eval_datasets[0].name": "eval_0",
            "data.eval_datasets[1].name": "eval_1",
            "eval.epochs": 1.0,
            "data.packing": False,
            "attention.backend": "xla",
        },
    ),
}
QEFFICIENT = {
    "LoRA of a summary": (
        """
model:
  model_type: hf
  auto_class_name: AutoModelForCausalLM
  model_name: meta-llama/Llama-3.2-1B
  use_peft: true
  peft_config:
    lora_r: 16
    lora_alpha: 32
    lora_dropout: 0.05
    target_modules: ["q_proj", "v_proj"]
    bias: none
    task_type: CAUSAL_LM
    peft_type: LORA
dataset:
  tokenizer_name: meta-llama/Llama-3.2-1B
  dataset_type: sft_dataset
  dataset_name: knkarthick/samsum
  train_split: train
  test_split: test
  max_seq_length: 512
  prompt_template: "Summarize the following conversation:\\n\\n{dialogue}\\n\\nSummary:\\n"
  completion_template: "{summary}"
  collate_fn: dynamic_padding
  group_by_length: true
  dataloader_num_workers: 4
  data_seed: 7
training:
  type: sft
  output_dir: ./results
  do_eval: true
  eval_strategy: epoch
  torch_dtype: bf16
  seed: 42
  device: cuda
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  num_train_epochs: 3
  ddp_config: {ddp_backend: nccl, ddp_bucket_cap_mb: 25}
optimizers: {optimizer_name: AdamW, lr: 5e-5, weight_decay: 0.01}
scheduler: {scheduler_name: cosine, warmup_steps: 100}
callbacks:
  early_stopping: {early_stopping_patience: 3, early_stopping_threshold: 0.001}
  tensorboard:
""",
        {
            "lora.rank": 16,
            "precision.recipe": "bf16",
            "data.datasets[0].split": "train",
            "data.eval_datasets[0].split": "test",
            "data.seed": 7,
            "train.seed": 42,
            "optim.warmup_steps": 100,
            "eval.patience": 3,
            "log.tensorboard": True,
            "mesh.data": -1,
        },
    ),
    "a function writes the prompts": (
        """
model: {model_name: HuggingFaceTB/SmolLM-135M, use_peft: true}
dataset:
  tokenizer_name: HuggingFaceTB/SmolLM-135M
  dataset_type: seq_completion
  dataset_name: yahma/alpaca-cleaned
  train_split: train
  split_ratio: 0.9
  prompt_func: "preprocess/alpaca_func:create_alpaca_prompt"
  completion_template: "{output}"
training: {dtype: fp16, num_train_epochs: 1, logging_strategy: epoch, save_strategy: "no"}
optimizers: {optimizer_name: adam, lr: 1e-4}
scheduler: {scheduler_name: linear, warmup_steps: 0.05}
""",
        {
            "data.datasets[0].function": "preprocess/alpaca_func.py:create_alpaca_prompt",
            "data.datasets[0].output_field": "{output}",
            "data.validation_split": 0.1,
            "precision.recipe": "fp16",
            "optim.name": "adamw",
            "optim.warmup_ratio": 0.05,
            "ckpt.at_end": False,
        },
    ),
    "all weights, sharded": (
        """
model: {model_name: meta-llama/Llama-3.2-3B, use_peft: false, torch_dtype: bf16, attn_implementation: sdpa}
dataset:
  json_file_path: data/train.json
  prompt_template: "{question}"
  completion_template: "{answer}"
  max_seq_length: 2048
training:
  bf16: true
  gradient_checkpointing: true
  gradient_checkpointing_kwargs: {preserve_rng_state: true, use_reentrant: false}
  fsdp_config: {fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer}
  max_steps: 1000
optimizers: {optimizer_name: adamw, lr: 1e-5, weight_decay: 0.1}
""",
        {
            "lora.enabled": False,
            "precision.master_dtype": "bfloat16",
            "memory.remat": "block",
            "mesh.fsdp": -1,
            "optim.no_decay": "norm|bias",
            "data.datasets[0].prompt_format": "{question}",
        },
    ),
    "ZeRO of DeepSpeed": (
        """
model: {model_name: my/model, use_peft: false}
dataset: {json_file_path: data/train.json, prompt_template: "{q}", completion_template: "{a}"}
training:
  dtype: bf16
  deepspeed_config: {zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}, bf16: {enabled: true}}
optimizers: {lr: 1e-5}
""",
        {"parallel.zero": 3, "mesh.fsdp": -1, "memory.offload_optimizer": True},
    ),
    "tensor parallelism with replicas": (
        """
model: {model_name: meta-llama/Llama-3.1-8B, torch_dtype: fp16}
dataset:
  dataset_name: openai/gsm8k
  config_name: main
  train_split: train
  test_split: test
  prompt_template: "Solve:\\n\\n{'question'}\\n\\nAnswer:\\n"
  completion_template: "{answer}"
training: {fp16: false, bf16: true, tp_degree: 4, ddp_degree: 2, do_eval: false}
optimizers: {optimizer_name: AdamW, lr: 2e-4}
scheduler: {scheduler_name: cosine_with_restarts, warmup_ratio: 0.1}
""",
        {
            "mesh.tensor": 4,
            "mesh.data": 2,
            "mesh.fsdp": 1,
            "precision.recipe": "bf16",
            "model.dtype": "float16",
            "data.datasets[0].subset": "main",
            "data.eval_datasets": (),
            "optim.warmup_ratio": 0.1,
        },
    ),
    "DPO": (
        """
model: {model_name: Qwen/Qwen2.5-0.5B-Instruct, use_peft: true, peft_config: {lora_r: 8}}
dataset:
  dataset_type: dpo_dataset
  dataset_name: my/pairs
  train_split: train
  test_split: test
  max_seq_length: 1024
training: {type: dpo, torch_dtype: bf16, eval_strategy: steps, eval_steps: 50}
optimizers: {optimizer_name: AdamW, lr: 5e-6}
scheduler: {scheduler_name: constant_with_warmup, warmup_steps: 10}
""",
        {
            "preference.loss": "sigmoid",
            "preference.beta": 0.1,
            "data.datasets[0].type": "preference",
            "data.eval_datasets[0].type": "preference",
            "eval.steps": 50,
            "optim.schedule": "constant",
        },
    ),
    "a classifier": (
        """
model:
  model_name: my/model
  auto_class_name: AutoModelForSequenceClassification
  peft_config: {task_type: SEQ_CLS, target_modules: [q_proj, v_proj]}
dataset:
  dataset_name: stanfordnlp/imdb
  input_columns: [text]
  target_column: label
  train_split: train
  test_split: test
  dataset_num_samples: 1000
training: {dtype: fp32, use_cpu: true, metric_for_best_model: eval_loss}
optimizers: {optimizer_name: SGD, lr: 1e-3}
""",
        {
            "model.head": "classification",
            "data.datasets[0].type": "classification",
            "data.datasets[0].samples": 1000,
            "data.eval_datasets[0].samples": 1000,
            "precision.recipe": "fp32",
            "device.platform": "cpu",
            "optim.name": "sgd",
        },
    ),
    "4 bits, long rows, and a key written twice": (
        """
model: {model_name: my/model, load_in_4bit: true, attn_implementation: eager}
dataset:
  json_file_path: data/train.json
  max_seq_length: 16384
  prompt_template: f"Correct:\\n\\n{'input'}\\n\\nCorrected:\\n"
  completion_template: "{target}"
training:
  dtype: bf16
  gradient_checkpointing: true
  save_strategy: steps
  save_steps: 200
  save_steps: 500
  resume_from_checkpoint: results/checkpoint-100
optimizers: {lr: 1e-4}
scheduler:
  scheduler_name: warmup_stable_decay
  lr_scheduler_kwargs: {num_decay_steps: 100, min_lr_ratio: 0.1}
""",
        {
            "quant.format": "nf4",
            "attention.backend": "xla",
            "data.seq_len": 16384,
            "data.datasets[0].prompt_format": "Correct:\n\n{'input'}\n\nCorrected:\n",
            "ckpt.save_steps": 500,
            "ckpt.start": "results/checkpoint-100",
            "optim.schedule": "wsd",
            "optim.cooldown_steps": 100,
            "optim.final_lr_fraction": 0.1,
        },
    ),
}


def value(config, key: str):
    for part in key.replace("[", ".").replace("]", "").split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize("name", [*ERNIEKIT, *QEFFICIENT])
def test_a_whole_file_is_recognised_and_translated(name, tmp_path):
    text, expected = {**ERNIEKIT, **QEFFICIENT}[name]
    (tmp_path / "its.yaml").write_text(text)
    config = read_recipe(str(tmp_path / "its.yaml")).resolve()
    system = "ERNIEKit" if name in ERNIEKIT else "QEfficient"
    assert config.startup_notes[0].endswith(f"a config of {system}, translated as follows:")
    assert {key: value(config, key) for key in expected} == expected
