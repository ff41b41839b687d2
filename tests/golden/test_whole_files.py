"""Whole files of Axolotl and in the shape of TRL's, as users write them: their settings here, and their recipes.

Each file in foreign/files combines options as that system's users do.
"""

import pathlib
from typing import Any

import pytest

from jaxtune import convert
from jaxtune.config import foreign, read_recipe
from jaxtune.config.schema import Config

HERE = pathlib.Path(__file__).parent / "foreign"
FILES = {
    "axolotl_full_fsdp": {
        "lora.enabled": False,
        "chat.template": "llama3",
        "data.datasets[0].split": "train[:20%]",
        "data.datasets[0].message_property_mappings": ("role=from", "content=value"),
        "data.datasets[1].path": "data/ours.jsonl",
        "data.packing_method": "first_fit_decreasing",
        "eval.packing": False,
        "eval.epochs": 0.5,
        "optim.final_lr_fraction": 0.1,
        "mesh.fsdp": -1,
        "parallel.zero": 3,
        "memory.remat": "block",
        "memory.offload_optimizer": False,
        "log.wandb.project": "chats",
        "optim.no_decay": "norm|bias",
        "guard.max_loss": 5.0,
        "guard.max_loss_steps": 3,
    },
    "axolotl_qlora_template_of_family": {
        "chat.template": None,
        "quant.format": "nf4",
        "lora.target_modules": r"(?:layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj)$",
        "optim.name": "adamw_8bit",
        "data.truncation": "right",
        "data.validation_split": 100.0,
        "memory.remat": "offload",
        "mesh.data": -1,
    },
    "axolotl_experts": {
        "mesh.expert": 2,
        "mesh.fsdp": 4,
        "quant.format": "nf4",
        "lora.target_modules": r"(^|\.)q_proj$|(^|\.)k_proj$|(^|\.)v_proj$|(^|\.)o_proj$"
        r"|(^|\.)mlp\.experts(\.\d+)?\.(gate_up_proj|gate_proj|up_proj|w1|w3)$"
        r"|(^|\.)mlp\.experts(\.\d+)?\.(down_proj|w2)$",
        "data.datasets[0].shards": 10,
        "train.max_steps": 300,
        "ckpt.at_end": False,
    },
    "axolotl_dpo": {
        "preference.loss": "sigmoid",
        "preference.beta": 0.05,
        "preference.label_smoothing": 0.1,
        "data.datasets[0].prompt_field": "conversation",
        "data.datasets[0].chosen_field": "best",
        "data.datasets[0].rejected_field": "worst",
        "lora.dropout": 0.0,
        "quant.format": "int8",
    },
    "axolotl_reward_model": {
        "preference.loss": "bradley_terry",
        "model.head": "classification",
        "model.num_labels": 1,
        "data.datasets[0].prompt_field": "input",
        "data.datasets[0].system_field": "system",
        "chat.template": None,
    },
    "axolotl_pretrain_stream": {
        "model.from_scratch": True,
        "data.streaming": True,
        "data.shuffle": False,
        "data.packing_method": "sequential",
        "data.datasets[0].subset": "sample-10BT",
        "optim.name": "muon",
        "parallel.zero": 2,
        "train.max_steps": 1000,
        "ckpt.save_steps": 500,
        "log.tensorboard": True,
    },
    "axolotl_long_context": {
        "mesh.context": 4,
        "mesh.data": -1,
        "data.seq_len": 65536,
        "data.datasets[0].glob": ("*.txt",),
        "data.datasets[1].type": "instruction",
        "data.datasets[2].path": "data/qa.jsonl",
        "data.datasets[2].prompt_format": "Q: {instruction}\nA: ",
        "chat.template": "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
        "{% endfor %}",
        "lora.lr_ratio": 16.0,
        "optim.name": "adamw",
        "optim.beta2": 0.99,
        "memory.remat": "offload",
    },
    "axolotl_frozen_offload": {
        "train.freeze": r"^(?!(?:^lm_head\.weight$)|(?:^model\.embed_tokens\.weight$)"
        r"|(?:model\.layers\.2[0-9]+\.mlp\.down_proj))",
        "data.datasets[0].prompt_format_no_input": "<|system|>\nBelow is an instruction that describes a task. Write a "
        "response that appropriately completes the request.<|end|>\n<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
        "memory.offload_optimizer": True,
        "memory.offload_master": True,
        "parallel.zero": 3,
    },
    "trl_handbook_sft": {
        "chat.template": "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + "
        "eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "data.datasets[0].subset": "everyday-conversations",
        "data.datasets[0].select_columns": ("messages",),
        "data.datasets[1].shards": 2,
        "data.datasets[2].split": "train[:30%]",
        "data.validation_split": 0.01,
        "log.wandb.enabled": True,
        "log.wandb.project": "smol",
        "log.tensorboard": True,
        "model.dtype": "bfloat16",
        "optim.final_lr_fraction": 0.1,
        "train.max_steps": None,
    },
    "trl_handbook_dpo": {
        "preference.loss": "sigmoid",
        "preference.beta": 0.01,
        "quant.format": "nf4",
        "data.datasets[0].split": "train_prefs",
        "data.datasets[0].type": "preference",
        "data.datasets[0].max_prompt_tokens": 512,
        "data.datasets[0].max_tokens": 1024,
        "data.datasets[0].longer": "right",
        "data.seq_len": 2048,
        "data.eval_datasets[0].split": "test_prefs",
        "data.num_proc": 12,
        "lora.rank": 128,
        "optim.name": "adamw",
    },
    "trl_open_r1_grpo": {
        "rollout.rewards": (
            *("open_r1.rewards:accuracy_reward", "open_r1.rewards:format_reward", "open_r1.rewards:tag_count_reward"),
        ),
        "rollout.reward_weights": ("accuracy_reward=1.0", "format_reward=0.5", "tag_count_reward=0.5"),
        "rollout.group_size": 16,
        "rollout.max_new_tokens": 2048,
        "rollout.temperature": 0.7,
        "data.seq_len": 2560,
        "data.datasets[0].prompt_field": "problem",
        "grpo.loss": "dr_grpo",
        "grpo.advantage_scale": "none",
        "grpo.clip_high": 0.28,
        "preference.loss": None,
    },
    "trl_kto": {
        "preference.loss": "kto",
        "preference.undesirable_weight": 1.33,
        "data.shuffle": False,
        "data.datasets[0].type": "unpaired_preference",
        "optim.learning_rate": 1e-6,
        "lora.dropout": 0.0,
        "eval.steps": 500,
    },
    "trl_reward": {
        "preference.loss": "bradley_terry",
        "model.head": "classification",
        "lora.enabled": True,
        "data.datasets[0].type": "preference",
        "data.seq_len": 4096,
        "data.datasets[0].max_tokens": 2048,
    },
    "trl_distillation": {
        "distill.teacher": "Qwen/Qwen2-1.5B-Instruct",
        "distill.divergence": "js",
        "distill.js_beta": 0.5,
        "distill.temperature": 1.0,  # the loss of TRL's trainer does not read its `temperature`
        "chat.loss_scale": "last_round",
        "parallel.zero": 3,
        "memory.offload_optimizer": True,
    },
}


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


def test_every_file_is_here():
    assert {path.stem for path in (HERE / "files").iterdir()} == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_becomes_these_settings(name):
    path = HERE / "files" / f"{name}.yaml"
    config = read_recipe(str(path)).resolve()
    assert config.notes[0].endswith(f"{foreign.DIALECTS[name.partition('_')[0]]}, translated as follows:")
    assert {key: value_of(config, key) for key in FILES[name]} == FILES[name]


@pytest.mark.parametrize("name", [*FILES, *foreign.DIALECTS])
def test_a_converted_recipe_has_the_same_options(name, tmp_path, monkeypatch, capsys):
    path = HERE / "files" / f"{name}.yaml" if name in FILES else HERE / f"{name}.yaml"
    monkeypatch.chdir(tmp_path)
    assert convert.main([str(path), "--output=recipes/mine.py"]) == 0
    assert "recipes/mine.py: the same options as" in capsys.readouterr().out
    text = (tmp_path / "recipes" / "mine.py").read_text()
    assert text.startswith(f'"""The options of {path.name}, a config of ')
    assert read_recipe("recipes/mine.py").resolve() == read_recipe(str(path)).resolve()


def test_a_recipe_names_the_origin_of_each_option_and_what_has_no_meaning_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = str(HERE / "axolotl.yaml")
    assert convert.main([file, "--output=mine.py", "--config.train.max_steps=7"]) == 0
    text = (tmp_path / "mine.py").read_text()
    assert "\n    config.lora.rank = 32  # lora_r\n" in text and "\n    config.train.max_steps = 7\n" in text
    assert "\n    config.mesh.data = -1  # Axolotl's default of deepspeed\n" in text
    assert "\n# flash_attention = True: attention.backend = 'auto' uses the fastest kernel" in text
    assert "wandb_entity" not in text  # without a value
    for arguments, message in (
        ([file, "--output=mine.py"], "--output=mine.py: exists; choose another name"),
        ([file, "--output=mine.yaml"], "a recipe is a Python file: end the name in .py"),
        (["--config=quickstart", "--output=other.py"], "quickstart: not a YAML file of another system"),
        ([file], "--output=... is missing"),
    ):
        assert convert.main(arguments) == 2
        assert message in capsys.readouterr().err
