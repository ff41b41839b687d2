"""Whole files of other systems, with many options each, are translated without an error, to what those systems do.

The files were written for this test, as users write them: each combines options that a row of a table has alone.
"""

import dataclasses
import math
import pathlib

import pytest

from jaxtune.config import keys, read_recipe
from jaxtune.config.option_rules import every_option
from jaxtune.config.schema import Config

FILES = pathlib.Path(__file__).parent / "foreign_files"
DUMMY = {"data.datasets[0].path": "dummy", "data.datasets[0].samples": 4096}
# file: (the devices that its system would use, the options of the translation, words of its log)
EXPECTED = {
    "xorl/full_made_up": (
        8,
        DUMMY
        | {
            "data.datasets[0].dummy_length": 8192,
            "mesh.fsdp": 8,
            "optim.no_decay": "",
            "optim.beta2": 0.95,
            "ckpt.save_epochs": None,
            "export.at_end": False,
        },
        ["every parameter decays, norms and embeddings too"],
    ),
    "xorl/adapters_of_fused_layers": (
        8,
        {
            "mesh.data": 2,
            "mesh.fsdp": 4,
            "data.shuffle_each": True,
            "data.packing_method": "best_fit",
            "data.datasets[1].shards": 4,
            "data.datasets[1].shard_idx": 0,
            "optim.state_dtype": "bfloat16",
            "lora.target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "export.merge": True,
        },
        ["norms, biases and embeddings are not trained with adapters", "ce_mode"],
    ),
    "xorl/quantized_experts": (
        8,
        {
            "data.datasets[0].samples": 256,
            "mesh.fsdp": 1,
            "mesh.expert": 8,
            "quant.format": "nvfp4",
            "memory.remat": "experts",
            "experts.backend": "kernel",
        },
        ["gc_steps"],
    ),
    "xorl/experts_of_half_the_shards": (
        16,
        DUMMY | {"mesh.fsdp": 2, "mesh.expert": 8, "optim.no_decay": "norm|bias", "prof.steps": 3},
        ["jaxtune does not use DeepEP"],
    ),
    "xorl/experts_of_a_sequence": (
        8,
        {"mesh.fsdp": 1, "mesh.expert": 1, "mesh.sequence": 8, "memory.remat": "offload"},
        ["over the others experts are sharded like other weights"],
    ),
    "xorl/muon_and_experts": (
        8,
        {"mesh.fsdp": 1, "mesh.expert": 8, "optim.muon.learning_rate": 2e-4, "optim.state_dtype": "float32"},
        ["one Newton-Schulz iteration"],
    ),
    "xorl/stages_of_unlike_size": (
        8,
        {"mesh.fsdp": 2, "mesh.stage": 4, "parallel.pipeline": "1f1b", "parallel.virtual_stages": 2},
        ["stages have equally many layers"],
    ),
    "xorl/student_of_a_teacher": (
        8,
        {
            "mesh.context": 4,
            "mesh.sequence": 2,
            "memory.remat": "ffn",
            "distill.teacher": "Qwen/Qwen3-8B",
            "distill.divergence": "reverse_kl",
        },
        ["num_experts_of_another_version = 0", "its value switches nothing on"],
    ),
    "surogate/full_fp8": (
        4,
        {
            "precision.recipe": "fp8_hybrid",
            "precision.skip_last_layers": 2,
            "optim.warmup_steps": 50,
            "optim.no_decay": "norm|bias",
            "parallel.zero": 2,
            "log.every": 5,
            "log.wandb.enabled": True,
        },
        ["warmup_steps overrides it"],
    ),
    "surogate/adapters": (
        1,
        {
            "data.datasets[0].max_tokens": 1024,
            "data.datasets[0].longer": "left",
            "data.datasets[0].system_prompt": "You are short.\nYou are kind.",
            "data.truncation": "left",
            "data.packing": False,
            "log.tensorboard": True,
            "export.merge": True,
        },
        ["padding is never attended to or trained"],
    ),
    "surogate/quantized_experts": (
        4,
        {
            "mesh.expert": 4,
            "lora.modules_to_save": ("gate",),
            "experts.router_loss": 0.001,
            "quant.format": "fp8",
            "data.datasets[0].system_prompt": "Answer\nin one line.",
            "data.datasets[0].system_field": None,
        },
        ["none of their tokens is dropped"],
    ),
    "surogate/experts_on_the_host": (
        1,
        {"quant.format": "nf4", "memory.offload_quants": True, "memory.remat": "offload", "data.validation_split": 0.0},
        [],
    ),
    "surogate/streamed_from_the_host": (
        2,
        {
            "memory.offload_master": True,
            "memory.offload_gradients": True,
            "memory.offload_optimizer": True,
            "optim.name": "adamw",
            "parallel.zero": 3,
            "eval.max_batches": 20,
            "data.validation_split": 0.0,
        },
        [],
    ),
    "surogate/two_nodes": (
        16,
        {"mesh.fsdp": 8, "mesh.sequence": 2, "device.gpus": 8, "guard.action": "lower_rate", "optim.name": "normuon"},
        ["launch/ray_train.py --workers=2 --gpus_per_worker=8"],
    ),
    "surogate/preferences": (
        1,
        {
            "preference.loss": "sigmoid_norm",
            "preference.beta": 0.1,
            "train.micro_batch_size": 2,
            "data.seq_len": 2048,
            "data.packing": False,
            "lora.dropout": 0.0,
        },
        ["of the adapters' gradients"],
    ),
    "surogate/student_of_a_teacher": (
        2,
        {
            "distill.weight": 0.8,
            "distill.temperature": 2.0,
            "distill.top_k": 16,
            "data.datasets[0].longer": "split",
            "chat.template": "templates/own.jinja",
        },
        ["the loss is divided by 2.5", "unknown_of_another_version"],
    ),
}


def test_each_file_is_in_the_table():
    assert {f"{file.parent.name}/{file.stem}" for file in FILES.rglob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("file", EXPECTED)
def test_a_whole_file_becomes_what_its_system_does(file):
    devices, options, words = EXPECTED[file]
    config = read_recipe(str(FILES / f"{file}.yaml")).resolve()
    found = {key: value for key, value in _values(config) if key in options}
    log = "\n".join(config.startup_notes)
    assert found == options, log
    assert _fits(config, devices), (config.mesh, log)
    assert [word for word in words if word not in log] == [], log


def _values(config: Config):
    for key, option, section in every_option(config):
        if not keys.has_entries(key):
            yield key, getattr(section, option.key.rpartition(".")[2])


def _fits(config: Config, devices: int) -> bool:
    """Whether the mesh can be made of this number of devices."""
    sizes = dataclasses.astuple(config.mesh)
    known = math.prod(size for size in sizes if size != -1)
    return devices % known == 0 if -1 in sizes else devices == known
