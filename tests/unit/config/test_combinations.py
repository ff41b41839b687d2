"""Options that contradict each other, or have no effect with others, are refused; valid combinations are not."""

import operator

import pytest

from jaxtune.config import dataset, keys, resolve
from jaxtune.config.schema import Config
from jaxtune.errors import UserError

FACTORS = {"lora.enabled": "true", "lora.kind": "ia3"}
REWARDED = {"rollout.rewards": "rewards.py:one", "data.datasets[0].type": "auto"}
PAIRS = {"preference.loss": "sigmoid"}
ASKED = {"decision.loss": "brier"}
TAUGHT = {"serve.format": "int4", "serve.distill": "yes"}
OWN = {"distill.teacher": "x", "distill.own_answers": "1", "data.datasets[0].type": "auto"}
REWARDED_IMAGES = {"vision.patches_per_row": "64", "rollout.rewards": "r.py:r", "data.datasets[0].type": "auto"}
ONE_SCORED = {"data.datasets[1].chosen_score_field": "good", "data.datasets[1].rejected_score_field": "bad"}
OFFSET = {name.replace("1", "0"): field for name, field in ONE_SCORED.items()} | ONE_SCORED
OFFSET["preference.offset_alpha"] = "1"
LABELS = {
    "model.head": "classification",
    "data.datasets[0].type": "classification",
    "data.datasets[1].type": "classification",
}


@pytest.mark.parametrize(
    ("given_settings", "key", "reason"),
    [
        ({"model.path": ""}, "model.path", "must name"),
        ({"lora.enabled": "true", "lora.target_modules": "all"}, "lora.target_modules", "'all-linear' selects all"),
        ({"mtp.weight": "0.3", "mesh.stage": "2"}, "mtp.weight", "cannot be combined with mesh.stage: a pipeline"),
        ({"mtp.weight": "0.3", **PAIRS}, "mtp.weight", "with preference.loss: a preference loss reads whole answers"),
        ({"mtp.weight": "0.3", "distill.teacher": "x"}, "mtp.weight", "with distill.teacher: a teacher's scores"),
        ({"mtp.only": "yes"}, "mtp.only", "only when mtp.weight"),
        (
            {"vision.patches_per_row": "64", "data.streaming": "yes", "train.max_steps": "3"},
            "vision.patches_per_row",
            "sizes of all images, which a stream does not know",
        ),
        ({"vision.patches_per_row": "64", **OWN}, "vision.patches_per_row", "prompts of distillation have no images"),
        ({**REWARDED_IMAGES, "rollout.server": "http://a"}, "vision.patches_per_row", "a server gets the tokens"),
        (
            {**REWARDED_IMAGES, "rollout.tools": "t.py:t"},
            "vision.patches_per_row",
            "prompts of episodes have no images",
        ),
        (
            {"mtp.weight": "1", "mtp.only": "yes", "train.freeze": "mlp"},
            "train.freeze",
            "mtp.only trains nothing of the",
        ),
        ({"mtp.weight": "1", "mtp.only": "yes", "train.z_loss": "0.1"}, "train.z_loss", "mtp.only has no next-token"),
        ({"data.datasets[1].path": ""}, r"data.datasets\[1\].path", "must name"),
        (
            {"data.datasets[0].message_property_mappings": "role"},
            r"data.datasets\[0\].message_property_mappings",
            "not 'KEY=NAME'",
        ),
        ({"data.datasets[0].samples": "0"}, r"data.datasets\[0\].samples", "at least 1"),
        ({"data.datasets[0].prompt_format_no_input": "x"}, r"data.datasets\[0\].prompt_format_no", "prompt_format"),
        (
            {"data.datasets[0].type": "text", "data.datasets[0].output_field": "x"},
            r"data.datasets\[0\].output_field",
            "no effect",
        ),
        (
            {"optim.warmup_steps": "5", "optim.warmup_ratio": "0.1"},
            "optim.warmup_ratio",
            "no effect.*not optim.warmup_steps.*optim.warmup_steps = 5",
        ),
        ({"model.num_labels": "2"}, "model.num_labels", "only when model.head == 'classification'"),
        ({"eval.tasks": "mmlu", "eval.at_end": "no"}, "eval.tasks", "they never score: set eval.tasks_steps"),
        ({**LABELS, "data.datasets[1].type": "text"}, r"data.datasets\[1\].type", "needs type='classification'"),
        ({"data.datasets[0].type": "classification"}, r"data.datasets\[0\].type", "need model.head = 'classification'"),
        ({"data.datasets[0].target_column": "x"}, r"data.datasets\[0\].target_column", "no effect"),
        ({**LABELS, "train.z_loss": "0.1"}, "train.z_loss", "only when model.head == 'lm'"),
        ({**LABELS, "eval.sample_prompt": "x"}, "eval.sample_prompt", "only when model.head == 'lm'"),
        ({**LABELS, "data.truncation": "split"}, "data.truncation", "label of a document"),
        ({**LABELS, "model.num_labels": "3", "model.id2label": "a,b"}, "model.num_labels", "names 2 labels"),
        ({**LABELS, "model.id2label": "a,a"}, "model.id2label", "a label twice"),
        ({"optim.warmup_ratio": "1.5"}, "optim.warmup_ratio", "from 0 to 1"),
        ({"optim.final_lr_fraction": "-0.1"}, "optim.final_lr_fraction", "from 0 to 1"),
        ({"data.packing": "no", "data.packing_method": "sequential"}, "data.packing_method", "only when data.packing"),
        (
            {"data.packing_method": "first_fit_decreasing", "data.shuffle": "no"},
            "data.packing_method",
            "sorts documents by length.*data.shuffle = False keeps their order",
        ),
        (
            {"data.packing_method": "first_fit_decreasing", "data.shuffle_each": "yes"},
            "data.packing_method",
            "sorts documents by length.*data.shuffle_each = True keeps their order",
        ),
        ({"data.streaming": "yes"}, "train.max_steps", "data.streaming is endless"),
        ({**PAIRS, "data.datasets[0].prompt_format": "x"}, r"data.datasets\[0\].prompt_format", "no effect"),
        ({**PAIRS, "data.datasets[0].type": "text"}, r"data.datasets\[0\].type", "needs type 'preference'"),
        ({"data.datasets[0].type": "preference"}, r"data.datasets\[0\].type", "needs preference.loss"),
        ({**PAIRS, "data.truncation": "left"}, "data.truncation", "paired answers cannot be cut"),
        ({**PAIRS, "train.z_loss": "0.1"}, "train.z_loss", "preference.loss is None"),
        (
            {**PAIRS, **ONE_SCORED, "preference.offset_alpha": "1"},
            r"data.datasets\[0\].chosen_score_field",
            "needs the scores of both",
        ),
        *(
            ({**OFFSET, "preference.loss": loss}, "preference.offset_alpha", "only when")
            for loss in ("orpo", "ipo", "kto_pair")
        ),
        ({**ASKED, **PAIRS}, "decision.loss", "questions have no chosen and rejected answer"),
        ({**ASKED, "data.truncation": "left"}, "data.truncation", "which cannot be cut: choose 'delete'"),
        ({**ASKED, "model.head": "classification", "model.num_labels": "2"}, "model.num_labels", "has 32 rows"),
        ({**ASKED, "decision.label_tokens": "1,2"}, "decision.label_tokens", "names 2 tokens"),
        ({**ASKED, "decision.label_tokens": ",".join(["7"] * 32)}, "decision.label_tokens", "a token of its own"),
        ({**ASKED, "data.datasets[0].type": "text"}, r"data.datasets\[0\].type", "decision.loss needs type 'decision'"),
        ({**ASKED, "train.z_loss": "0.1"}, "train.z_loss", "decision.loss is None"),
        ({**ASKED, **REWARDED}, "rollout.rewards", "trains only on tokens that the model generates"),
        ({**ASKED, "mtp.weight": "1"}, "mtp.weight", "a decision model predicts no further tokens"),
        ({"data.datasets[0].type": "decision"}, r"data.datasets\[0\].type", "needs decision.loss"),
        ({"data.datasets[0].state_field": "x"}, r"data.datasets\[0\].state_field", "no effect"),
        ({**REWARDED, "rollout.correction_max": "2"}, "rollout.correction_max", "only when rollout.correction"),
        ({"rollout.replay_routing": "yes"}, "rollout.replay_routing", "only when rollout.rewards"),
        ({**REWARDED, "grpo.off_policy_kl": "1"}, "grpo.off_policy_kl", "only when grpo.iterations > 1"),
        (
            {**REWARDED, "rollout.correction": "token_mask", "rollout.correction_min": "5"},
            "rollout.correction_min",
            "must be below rollout.correction_max = 3",
        ),
        ({**OWN, "distill.weight": "0.5"}, "distill.weight", "teaches it nothing; leave it at 1"),
        ({**OWN, "rollout.group_size": "4"}, "rollout.group_size", "only when rollout.rewards"),
        ({**OWN, "mesh.stage": "2"}, "distill.own_answers", "not available with mesh.stage"),
        ({**OWN, "data.packing": "no"}, "data.packing", "with distill.own_answers the data is prompts"),
        ({**OWN, "guard.action": "skip"}, "guard.action", "no baseline for spikes"),
        ({**OWN, "distill.teacher": "base"}, "distill.teacher", "set lora.enabled and distill.own_answers"),
        ({"distill.teacher": "http://a:8000"}, "distill.teacher", "a server scores the answers of each step: set"),
        ({**OWN, "distill.teacher": "http://a:8000", "distill.temperature": "2"}, "distill.temperature", "1 only"),
        ({"distill.teacher": "a=x,b=y"}, "distill.teacher", "several teachers score the answers of each step: set"),
        ({**TAUGHT, "model.from_scratch": "yes"}, "serve.distill", "random weights teaches"),
        ({**TAUGHT, "distill.teacher": "x"}, "serve.distill", "only when distill.teacher is None"),
        ({**TAUGHT, "mtp.weight": "0.3"}, "mtp.weight", "with serve.distill: a teacher's scores"),
        (
            {**TAUGHT, "data.streaming": "yes", "train.max_steps": "5"},
            "serve.distill",
            "scores all documents before the first step",
        ),
        (
            {"serve.format": "int4", **REWARDED, "serve.start_step": "5"},
            "serve.start_step",
            "not available when the model samples",
        ),
        ({"distill.own_answers": "1"}, "distill.own_answers", "only when distill.teacher is not None"),
        (
            {**OWN, "distill.teacher": "base", "lora.enabled": "yes", "lora.bias": "all"},
            "lora.bias",
            "trains weights of the base, which is the teacher",
        ),
        (
            {**OWN, "mesh.context": "2", "data.datasets[0].teacher_prompt_field": "x"},
            r"data.datasets\[0\].teacher_prompt_field",
            "not available with mesh.context",
        ),
        (
            {**OWN, "distill.own_answers": "0.5", "data.datasets[0].teacher_prompt_field": "x"},
            r"data.datasets\[0\].teacher_prompt_field",
            "only with distill.own_answers = 1",
        ),
        ({"preference.loss": "exo_pair"}, "preference.label_smoothing", "exo_pair needs a value above 0"),
        ({"preference.loss": "bradley_terry"}, "preference.loss", "a reward model outputs one number"),
        ({"preference.loss": "orpo", "preference.reference": "x"}, "preference.reference", "no effect"),
        ({"preference.beta": "1"}, "preference.beta", "only when preference.loss is not None"),
        (
            {
                "data.streaming": "yes",
                "train.max_steps": "5",
                "preference.loss": "sigmoid",
                "preference.precompute_reference": "yes",
            },
            "preference.precompute_reference",
            "scores all answers before the first step",
        ),
        (
            {"data.streaming": "yes", "train.max_steps": "5", "data.validation_split": "0.1"},
            "data.validation_split",
            "a stream has no held-out part; set data.eval_datasets",
        ),
        (
            {"data.streaming": "yes", "train.max_steps": "5", "data.num_proc": "2"},
            "data.num_proc",
            "only when not data.cache_only and .*data.streaming = True",
        ),
        ({"data.shuffle_each": "yes", "data.shuffle": "no"}, "data.shuffle_each", "only when data.shuffle and"),
        ({"data.group_by_length": "yes"}, "data.group_by_length", "only when not data.packing and data.shuffle"),
        ({"data.drop_last": "yes", "train.max_steps": "5"}, "data.drop_last", "only when train.max_steps is None"),
        ({"data.validation_split": "1.5"}, "data.validation_split", "number of documents, or a fraction below 1"),
        ({"data.datasets[0].path": "dummy"}, r"data.datasets\[0\].samples", "set the number of samples"),
        ({"data.datasets[0].dummy_length": "8"}, r"data.datasets\[0\].dummy_length", "only when path == 'dummy'"),
        ({"data.datasets[0].shards": "2"}, r"data.datasets\[0\].shard_idx", "one of the parts, 0 to 1"),
        (
            {"data.datasets[0].shards": "2", "data.datasets[0].shard_idx": "2"},
            r"data.datasets\[0\].shard_idx",
            "one of the parts, 0 to 1",
        ),
        ({"data.datasets[0].weight": "1"}, r"data.datasets\[0\].weight", "has no effect: data.mixing = 'concat'"),
        (
            {"data.mixing": "interleave_under", "data.datasets[0].weight": "1"},
            r"data.datasets\[1\].weight",
            "give one to each, or to none",
        ),
        (
            {"data.mixing": "interleave_over", "data.datasets[0].weight": "1", "data.mixing_temperature": "2"},
            r"data.datasets\[0\].weight",
            "not with data.mixing_temperature",
        ),
        ({"data.mixing_temperature": "2"}, "data.mixing_temperature", "only when data.mixing != 'concat'"),
        ({"data.datasets[0].shard_idx": "0"}, r"data.datasets\[0\].shard_idx", "only when shards is not None"),
        ({"lora.enabled": "true", "lora.dropout": "1"}, "lora.dropout", "below 1"),
        (
            {**PAIRS, "lora.enabled": "true", "lora.dropout": "0.5"},
            "lora.dropout",
            "no effect: preference.loss = 'sigmoid' compares with a reference without dropout",
        ),
        ({"preference.loss": "kto", "train.hidden_dropout": "0.1"}, "train.hidden_dropout", "a reference without"),
        ({"data.seq_len": "0"}, "data.seq_len", "at least"),
        ({"train.micro_batch_size": "-1"}, "train.micro_batch_size", "at least 1"),
        ({"train.max_steps": "0"}, "train.max_steps", "at least 1"),
        ({"train.epochs": "0"}, "train.epochs", "above 0"),
        (
            {"train.max_steps": "5", "train.epochs": "2"},
            "train.epochs",
            "only when train.max_steps is None, and train.max_steps = 5",
        ),
        (
            {"lora.enabled": "true", "precision.master_dtype": "bfloat16"},
            "precision.master_dtype",
            "only when not lora.enabled",
        ),
        ({"optim.learning_rate": "0"}, "optim.learning_rate", "above 0"),
        ({"train.run_name": "../x"}, "train.run_name", "must be a folder name"),
        ({"mesh.data": "-1"}, "mesh.data and mesh.fsdp", "only one axis"),
        ({"mesh.tensor": "0"}, "mesh.tensor", "at least 1"),
        ({"parallel.virtual_stages": "2"}, "parallel.virtual_stages", "only when mesh.stage != 1"),
        ({"mesh.sequence": "-1"}, "mesh.fsdp and mesh.sequence", "only one axis"),
        ({"experts.dispatch": "all_to_all"}, "experts.dispatch", "only when mesh.expert != 1"),
        ({"mesh.expert": "2", "experts.capacity_factor": "2"}, "experts.capacity", "only when experts.dispatch =="),
        ({"mesh.expert": "2", "optim.name": "adafactor"}, "mesh.expert", "not available with optim.name = 'adafactor'"),
        ({"parallel.zero": "2", "parallel.reshard_after_forward": "false"}, "parallel.reshard", "parallel.zero == 3"),
        (
            {"memory.offload_optimizer": "true", "optim.name": "schedule_free", "optim.schedule": "constant"},
            "memory.offload_optimizer",
            "choose another optimizer",
        ),
        ({"memory.unroll": "true", "precision.recipe": "fp8_hybrid"}, "memory.unroll", "XLA multiplies in bfloat16"),
        ({"memory.offload_master": "true", "lora.enabled": "true"}, "memory.offload_master", "only when not lora"),
        (
            {"memory.offload_gradients": "true", "precision.recipe": "fp8_hybrid"},
            "memory.offload_gradients",
            "'fp8_hybrid' quantizes all trained weights",
        ),
        ({"memory.offload_master": "true", "parallel.zero": "1"}, "memory.offload_master", "needs parallel.zero = 3"),
        ({"memory.offload_optimizer": "true", "mesh.expert": "2"}, "memory.offload_optimizer", "not available with"),
        (
            {"optim.schedule": "cosine", "optim.cooldown_steps": "5", "optim.decay_ratio": "0.5"},
            "optim.cooldown_steps",
            "optim.decay_ratio.*one of the two",
        ),
        ({"optim.schedule": "wsd"}, "optim.cooldown_steps", "needs steps"),
        (
            {"attention.backend": "flash", "train.deterministic": "true"},
            "attention.backend",
            "runs are not bit-identical; set attention.backend = 'auto'",
        ),
        (
            {"attention.documents_per_row": "9"},
            "attention.documents_per_row",
            "only when attention.backend in .'fa3', 'flash'",
        ),
        (
            {"optim.schedule": "constant", "optim.final_lr_fraction": "0.1"},
            "optim.final_lr_fraction",
            "only when .*optim.cooldown_steps",
        ),
        ({"optim.cycles": "2"}, "optim.cycles", "only when optim.schedule in .'cosine', 'cosine_with_restarts'"),
        ({"optim.schedule": "cosine", "optim.cycles": "0"}, "optim.cycles", "above 0"),
        ({"optim.schedule": "cosine_with_restarts", "optim.cycles": "1.5"}, "optim.cycles", "whole number.*'cosine'"),
        ({"optim.start_lr": "1e-5"}, "optim.start_lr", "no effect.*optim.warmup_steps or optim.warmup_ratio"),
        ({"optim.start_lr": "-1", "optim.warmup_steps": "5"}, "optim.start_lr", "at least 0"),
        ({"optim.start_lr": "1", "optim.warmup_steps": "5"}, "optim.start_lr", "at most the peak.*0.0002"),
        ({"optim.min_lr": "1"}, "optim.min_lr", "at most the peak"),
        ({"optim.min_lr": "-1"}, "optim.min_lr", "at least 0"),
        (
            {"optim.min_lr": "1e-5", "optim.final_lr_fraction": "0.1"},
            "optim.final_lr_fraction",
            "only when optim.min_lr is None",
        ),
        ({"optim.schedule": "constant", "optim.min_lr": "1e-5"}, "optim.min_lr", "only when .*optim.cooldown_steps"),
        ({"optim.decay_ratio": "0"}, "optim.decay_ratio", "above 0 and at most 1"),
        ({"optim.decay_ratio": "0.3", "optim.warmup_ratio": "0.3"}, "optim.decay_ratio", "above optim.warmup_ratio"),
        (
            {"optim.schedule": "inverse_sqrt", "optim.decay_ratio": "0.5"},
            "optim.decay_ratio",
            "only when optim.schedule in .'linear', 'cosine'",
        ),
        ({"optim.layerwise_lr_decay": "1.1"}, "optim.layerwise_lr_decay", "above 0 and at most 1"),
        ({"optim.layerwise_lr_decay_bound": "0"}, "optim.layerwise_lr_decay_bound", "above 0 and at most 1"),
        (
            {"optim.layerwise_lr_decay": "0.9", "optim.layerwise_lr_decay_bound": "0.5"},
            "optim.layerwise_lr_decay_bound",
            "only when optim.layerwise_lr_decay == 1, and optim.layerwise_lr_decay = 0.9",
        ),
        ({"optim.power": "2"}, "optim.power", "polynomial"),
        ({"chat.loss_scale": "hermes+last_round"}, "chat.loss_scale", "one of default, .*qwen, or a sum such as"),
        ({"chat.loss_scale": "all", "chat.train_on_eos": "none"}, "chat.train_on_eos", "'all' not in chat.loss_scale"),
        ({"chat.roles": "('human',)"}, "chat.roles", "expected .*'user'.*roles whose messages"),
        (
            {"data.datasets[0].type": "text", "data.datasets[1].type": "tokenized", "chat.roles": "user"},
            "chat.roles",
            "no effect: no entry of data.datasets uses a chat template",
        ),
        ({"chat.roles": "()"}, "chat.roles", "nothing would be trained"),
        ({"chat.pattern_weights": "('x',)"}, "chat.pattern_weights", "'x' is not 'REGEX=FACTOR'"),
        ({"optim.no_decay": "x"}, "optim.no_decay", "only when optim.weight_decay, and optim.weight_decay = 0.0"),
        ({"optim.weight_decay": "0.1", "optim.no_decay": "("}, "optim.no_decay", "not a regular expression"),
        (
            {"optim.decay_multipliers": "('x=2',)"},
            "optim.decay_multipliers",
            "only when optim.weight_decay, and optim.weight_decay = 0.0",
        ),
        ({"optim.lr_multipliers": "('x',)"}, "optim.lr_multipliers", "'x' is not 'REGEX=FACTOR'.*such as"),
        ({"optim.lr_multipliers": "('x=2=',)"}, "optim.lr_multipliers", "is not 'REGEX=FACTOR'"),
        ({"optim.lr_multipliers": "('=2',)"}, "optim.lr_multipliers", "is not 'REGEX=FACTOR'"),
        ({"optim.lr_multipliers": "('x=-1',)"}, "optim.lr_multipliers", "factor of 0 or more"),
        ({"optim.lr_multipliers": "('x=nan',)"}, "optim.lr_multipliers", "factor of 0 or more"),
        ({"optim.lr_multipliers": "('(=1',)"}, "optim.lr_multipliers", "not a regular expression"),
        (
            {"optim.muon.momentum": "0.9"},
            "optim.muon.momentum",
            "no effect: .*only when optim.name == 'muon', and optim.name = 'adamw'",
        ),
        ({"optim.name": "muon", "optim.normuon.beta2": "0.9"}, "optim.normuon.beta2", "optim.name = 'muon'"),
        ({"optim.name": "muon", "optim.muon.momentum": "1"}, "optim.muon.momentum", "below 1"),
        ({"optim.name": "muon", "optim.muon.ns_steps": "0"}, "optim.muon.ns_steps", "at least 1"),
        ({"optim.name": "muon", "optim.muon.learning_rate": "0"}, "optim.muon.learning_rate", "above 0"),
        ({"optim.name": "normuon", "optim.normuon.momentum": "1"}, "optim.normuon.momentum", "below 1"),
        ({"optim.name": "normuon", "optim.normuon.beta2": "1"}, "optim.normuon.beta2", "below 1"),
        ({"optim.name": "normuon", "optim.normuon.ns_steps": "0"}, "optim.normuon.ns_steps", "at least 1"),
        (
            {"optim.name": "sgd", "optim.beta2": "0.9"},
            "optim.beta2",
            "only when optim.name not in .*, and optim.name = 'sgd'",
        ),
        (
            {"optim.name": "lion", "optim.epsilon": "1e-6"},
            "optim.epsilon",
            "only when optim.name not in .*, and optim.name = 'lion'",
        ),
        ({"optim.name": "adafactor", "optim.beta1": "0.8"}, "optim.beta1", "only when optim.name != 'adafactor'"),
        (
            {"optim.name": "adamw_8bit", "optim.state_dtype": "bfloat16"},
            "optim.state_dtype",
            "only when optim.name in .*and optim.name = 'adamw_8bit'",
        ),
        (
            {"optim.name": "adafactor", "optim.state_dtype": "bfloat16"},
            "optim.state_dtype",
            "only when optim.name in .*and optim.name = 'adafactor'",
        ),
        (
            {"optim.name": "sgd", "optim.beta1": "0", "optim.state_dtype": "bfloat16"},
            "optim.state_dtype",
            "only when .*optim.beta1 = 0.0",
        ),
        (
            {"optim.name": "schedule_free", "optim.schedule": "constant", "optim.state_dtype": "bfloat16"},
            "optim.state_dtype",
            "only when optim.name in .*and optim.name = 'schedule_free'",
        ),
        ({"optim.name": "schedule_free"}, "optim.schedule", "set optim.schedule = 'constant'"),
        (
            {"optim.name": "schedule_free", "optim.schedule": "constant", "optim.beta1": "0"},
            "optim.beta1",
            "above 0",
        ),
        ({"train.z_loss": "-1"}, "train.z_loss", "at least 0"),
        (
            {"precision.fp16.loss_scale": "2"},
            "precision.fp16.loss_scale",
            "no effect.*only when precision.recipe == 'fp16', and precision.recipe = 'bf16'",
        ),
        ({"precision.fp8.hadamard": "true"}, "precision.fp8.hadamard", "only when precision.recipe == 'fp8_hybrid'"),
        ({"precision.nvfp4.hadamard": "false"}, "precision.nvfp4.hadamard", "only when precision.recipe == 'nvfp4'"),
        (
            {"precision.recipe": "nvfp4", "precision.nvfp4.hadamard": "false", "lora.enabled": "true"},
            "precision.nvfp4.hadamard",
            "no effect.*only when not lora.enabled",
        ),
        (
            {"optim.name": "muon", "optim.beta2": "0.5", "lora.enabled": "true"},
            "optim.beta2",
            "no effect.*adapters",
        ),
        (
            {"precision.recipe": "fp16", "model.dtype": "float32", "precision.fp16.loss_scale": "1e39"},
            "precision.fp16.loss_scale",
            "from 1 to 1.7e.38",
        ),
        ({"optim.lr_multipliers": "embed(=0.1"}, "optim.lr_multipliers", r"such as \('embed\(=0.1',\)"),
        ({"optim.lr_multipliers": "[(a|b)=2, c=1]"}, "optim.lr_multipliers", r"such as \('\(a|b\)=2', 'c=1'\)"),
        ({"optim.lr_multipliers": "(a|b)=2,c=1"}, "optim.lr_multipliers", r"such as \('\(a|b\)=2', 'c=1'\)"),
        ({"optim.lr_multipliers": "{'a': 'x'}"}, "optim.lr_multipliers", "'a=x' is not 'REGEX=FACTOR'"),
        ({"data.special_tokens": "{'a': 1}"}, "data.special_tokens", r"expected tuple\[str"),
        ({"optim.learning_rate": "1e999"}, "optim.learning_rate", "a finite float"),
        ({"precision.recipe": "fp8_hybrid", "precision.fp8.amax_history": "0"}, "precision.fp8.amax", "at least 1"),
        (
            {"precision.recipe": "fp8_hybrid", "precision.fp8.online_scale_steps": "-1"},
            "precision.fp8.online_scale_steps",
            "at least 0",
        ),
        (
            {"precision.recipe": "fp8_hybrid", "precision.fp8.scaling": "current", "precision.fp8.amax_history": "16"},
            "precision.fp8.amax_history",
            "only when precision.fp8.scaling == 'delayed'",
        ),
        (
            {
                "precision.recipe": "fp8_hybrid",
                "precision.fp8.scaling": "current",
                "precision.fp8.online_scale_steps": "9",
            },
            "precision.fp8.online_scale_steps",
            "only when precision.fp8.scaling == 'delayed'",
        ),
        (
            {"precision.recipe": "fp32", "precision.skip_first_layers": "1"},
            "precision.skip_first_layers",
            "only when precision.recipe != 'fp32'",
        ),
        ({"precision.recipe": "nvfp4", "precision.skip_last_layers": "-1"}, "precision.skip_last", "at least 0"),
        (
            {"precision.recipe": "fp32", "precision.exclude": "q_proj"},
            "precision.exclude",
            "only when precision.recipe != 'fp32'",
        ),
        ({"precision.recipe": "nvfp4", "precision.exclude": "("}, "precision.exclude", "not a regular expression"),
        ({"precision.recipe": "fp16"}, "model.dtype", "'float16' or 'float32', or .* precision.recipe = 'bf16'"),
        (
            {"precision.recipe": "fp16", "model.dtype": "float32", "precision.gradient_dtype": "bfloat16"},
            "precision.gradient_dtype",
            "set it to 'float32'",
        ),
        (
            {"precision.recipe": "fp16", "model.dtype": "float32", "precision.master_dtype": "bfloat16"},
            "precision.master_dtype",
            "set it to 'float32'",
        ),
        (
            {
                "precision.recipe": "fp16",
                "model.dtype": "float16",
                "lora.enabled": "true",
                "lora.dtype": "bfloat16",
            },
            "lora.dtype",
            "set it to 'float32'",
        ),
        (
            {"precision.recipe": "fp16", "model.dtype": "float16", "precision.fp16.loss_scale": "0.5"},
            "precision.fp16.loss_scale",
            "from 1 to 1.7e.38",
        ),
        (
            {"precision.recipe": "fp16", "model.dtype": "float16", "precision.fp16.growth_steps": "0"},
            "precision.fp16.growth_steps",
            "at least 1",
        ),
        ({"train.freeze": "["}, "train.freeze", "not a regular expression"),
        ({"lora.enabled": "true", "lora.target_modules": "*"}, "lora.target_modules", "not a regular expression"),
        ({"lora.enabled": "true", "lora.target_modules": "()"}, "lora.target_modules", "at least one"),
        ({"lora.rank": "8"}, "lora.rank", "only when lora.enabled, and lora.enabled = False"),
        ({**FACTORS, "lora.rank": "8"}, "lora.rank", "only when lora.kind == 'lora'"),
        ({**FACTORS, "lora.merge_interval": "5"}, "lora.merge_interval", "not factors"),
        ({**FACTORS, "optim.name": "muon"}, "optim.name", "ia3 trains vectors"),
        ({"lora.enabled": "true", "model.from_scratch": "true"}, "model.from_scratch", "adapters"),
        ({"lora.enabled": "true", "train.freeze": "norm"}, "train.freeze", "lora.enabled"),
        (
            {"eval.steps": "10"},
            "eval.steps",
            "only when data.validation_split or data.eval_datasets, and .* = 0.0, data.eval_datasets is empty",
        ),
        (
            {"eval.max_batches": "10"},
            "eval.max_batches",
            "only when data.validation_split or data.eval_datasets, and .* = 0.0, data.eval_datasets is empty",
        ),
        ({"ckpt.resume": "-1"}, "ckpt.resume", "at least 0"),
        ({"log.wandb.name": "x"}, "log.wandb.name", "only when log.wandb.enabled"),
        ({"prof.start_step": "9"}, "prof.start_step", "only when prof.enabled"),
    ],
)
def test_impossible_combination(given_settings, key, reason, base):
    with pytest.raises(UserError, match=f"^recipe: {key}.*{reason}"):
        resolve(base, "recipe", given_settings.items())


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ({"data.validation_split": "0"}, "eval.steps", "data.validation_split = 0.0"),
        ({"optim.warmup_steps": "5"}, "optim.warmup_ratio", "optim.warmup_steps = 5"),
        ({"lora.enabled": "false"}, "lora.rank", "lora.enabled = False"),
    ],
)
def test_what_an_override_made_moot_is_a_note_and_its_default_takes_its_place(settings, key, reason, base):
    recipe = base
    recipe.data.validation_split, recipe.eval.steps = 0.1, 100
    recipe.optim.warmup_ratio, recipe.lora.enabled, recipe.lora.rank = 0.1, True, 4
    config = resolve(recipe, "recipe", settings.items())
    (moot,) = [said for said in config.said if said.moot]
    assert moot.key == key and moot.by == "recipe" and reason in moot.moot
    assert operator.attrgetter(key)(config) == keys.options()[key].default
    with pytest.raises(UserError, match=f"{key}.*no effect"):  # it is an error if typed as well
        resolve(recipe, "recipe", {**settings, key: "3"}.items())


def test_a_recipe_that_contradicts_itself_is_an_error_and_a_translated_file_is_not(base):
    recipe = base
    recipe.lora.rank = 4
    with pytest.raises(UserError, match="lora.rank = 4: has no effect"):
        resolve(recipe, "recipe")
    config = resolve(recipe, "recipe", source="translation")
    assert config.lora.rank == 16 and [said.by for said in config.said if said.moot] == ["translation"]


def test_no_training_data(base):
    config = base
    config.data.datasets = ()
    with pytest.raises(UserError, match=r"data.datasets = \(\): no training data"):
        resolve(config, "recipe")


def test_two_kinds_of_validation_data(base):
    config = base
    config.data.eval_datasets = (dataset(path="c.jsonl"),)
    config.data.validation_split = 0.1
    with pytest.raises(
        UserError, match=r"data.validation_split.*only when not data.eval_datasets, and data.eval_datasets has 1 entry"
    ):
        resolve(config, "recipe")


@pytest.mark.parametrize(
    "given_settings",
    [
        {"optim.schedule": "wsd", "optim.cooldown_steps": "10"},
        {"optim.schedule": "linear", "optim.cooldown_steps": "10"},
        {"optim.schedule": "cosine", "optim.cooldown_steps": "10"},
        {"optim.schedule": "cosine_with_restarts", "optim.cycles": "3"},
        {"optim.schedule": "polynomial", "optim.power": "2", "optim.min_lr": "1e-7"},
        {"optim.schedule": "cosine", "optim.cycles": "2.5", "optim.decay_ratio": "0.9"},
        {"optim.start_lr": "1e-5", "optim.warmup_steps": "5"},
        {"optim.weight_decay": "0.1", "optim.decay_multipliers": "('(?=a)=1', 'norm=0')", "optim.no_decay": "bias"},
        {"optim.lr_multipliers": "('embed_tokens=0.1',)", "optim.layerwise_lr_decay": "0.9"},
        {"optim.name": "muon", "optim.muon.learning_rate": "0.02", "lora.enabled": "true"},
        {"optim.name": "muon", "optim.beta2": "0.5", "lora.enabled": "true", "lora.use_dora": "true"},
        {"optim.name": "muon", "optim.beta2": "0.5", "lora.enabled": "true", "lora.modules_to_save": "embed_tokens"},
        {"optim.name": "normuon", "optim.state_dtype": "bfloat16", "optim.normuon.cautious_wd": "false"},
        {"optim.name": "lion", "optim.beta2": "0.99", "optim.state_dtype": "bfloat16"},
        {"optim.name": "schedule_free", "optim.schedule": "constant", "optim.warmup_steps": "5"},
        {"precision.recipe": "fp16", "model.dtype": "float16", "precision.fp16.loss_scale": "1024"},
        {"precision.recipe": "fp8_hybrid", "precision.fp8.online_scale_steps": "9", "precision.exclude": "down_proj"},
        {"precision.recipe": "nvfp4", "precision.nvfp4.hadamard": "false", "precision.skip_last_layers": "2"},
        {"precision.recipe": "fp32", "quant.format": "nf4", "lora.enabled": "true"},
        {"lora.enabled": "true", "lora.rank": "4", "lora.dropout": "0.1"},
        {**PAIRS, "preference.loss": "orpo", "lora.enabled": "true", "lora.dropout": "0.1"},
        {**PAIRS, "preference.reference": "None", "train.attention_dropout": "0.1"},
        {"eval.steps": "10", "data.validation_split": "0.1"},
        {"mesh.data": "-1", "mesh.fsdp": "2", "mesh.tensor": "2"},
        {"attention.backend": "fa3", "attention.documents_per_row": "9", "attention.fallback": "warn"},
        {"attention.backend": "triton", "train.deterministic": "true"},
        {"train.max_steps": "5"},
        {"train.epochs": "0.5"},
        {"preference.loss": "kto", "data.datasets[0].desirable_field": "kto_tag", "chat.agent_template": "hermes"},
        {**PAIRS, "data.datasets[0].type": "preference", "chat.agent_template": "hermes"},
        {"log.wandb.enabled": "true", "log.wandb.name": "x"},
        {"data.datasets[0].type": "conversation", "data.datasets[0].messages_field": "turns"},
    ],
)
def test_possible_combination(given_settings, base):
    assert isinstance(resolve(base, "recipe", given_settings.items()), Config)
