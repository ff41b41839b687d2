"""Whole files of other systems train at tiny size, on as many simulated devices as their systems would use.

Changed for all files: the model, the data, `data.seq_len`, `train.max_steps`, `train.output_dir`, `data.cache_dir`; one
micro-batch a step, or as many as there are stages; `log.wandb.enabled`, as no network is there. The table has the rest.
"""

import math
import re
import shutil
from dataclasses import astuple
from pathlib import Path

import jax
import pytest
from foreign_runs import flags, write_data
from golden import test_erniekit_and_qefficient_files as texts
from golden import test_foreign_files, test_whole_files
from runs import call, metrics, run, write_model_folder

from jaxtune.config import read_recipe
from jaxtune.config.schema import Config

TAKES_LONG = True
COVERS = ("jaxtune", "tests/golden", "tests/foreign_runs.py")
GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    **{name: GOLDEN / "foreign_files" / f"{name}.yaml" for name in test_foreign_files.EXPECTED},
    **{name.replace("_", "/", 1): GOLDEN / "foreign" / "files" / f"{name}.yaml" for name in test_whole_files.FILES},
}
TEXTS = {
    **{f"erniekit/{name}": text for name, (text, _) in texts.ERNIEKIT.items()},
    **{f"qefficient/{name}": text for name, (text, _) in texts.QEFFICIENT.items()},
}
# Widths that four devices, and of experts eight, divide into blocks of 64, and that FP8's blocks of 128 divide.
SIZES = dict(
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=512,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1)
# name: config class and further sizes. The deep one has a layer 20, and a multiple of 8 layers.
MODELS = {"dense": ("Qwen3", {"num_hidden_layers": 4}), "deep": ("Qwen3", {"num_hidden_layers": 24})}
MODELS["experts"] = ("Qwen3Moe", EXPERTS | {"num_hidden_layers": 4, "hidden_size": 512})
DEEP = ("xorl/stages_of_unlike_size", "axolotl/frozen_offload")
LONG: dict[str, object] = {"data.seq_len": 256}  # for Axolotl's prompt of instructions
CHATML: dict[str, object] = {"chat.template": "chatml"}  # whose tokens the tokenizer has
# The module that a file of open-r1 names.
REWARDS = """
def accuracy_reward(completions, **columns):
    return [float(len(completion) % 3) for completion in completions]

format_reward = tag_count_reward = accuracy_reward
"""
# Further options that differ from the file.
MORE: dict[str, dict[str, object]] = {
    "xorl/full_made_up": {"data.datasets[0].max_tokens": 64, "data.datasets[0].dummy_length": 64},
    "xorl/quantized_experts": {"experts.backend": "auto"},  # its kernel, of GPUs only
    "xorl/muon_and_experts": {"data.datasets[0].dummy_length": 64},
    "xorl/student_of_a_teacher": {"distill.teacher": "MODEL"},
    "surogate/student_of_a_teacher": {"distill.teacher": "MODEL", **CHATML},
    "surogate/adapters": CHATML | {"data.datasets[0].max_tokens": 48},
    "surogate/quantized_experts": LONG | CHATML,
    "surogate/preferences": LONG,
    "surogate/experts_on_the_host": {"device.command_buffers": "auto"},  # CUDA graphs, of GPUs only
    "surogate/two_nodes": {"device.gpus": 16},  # one process for both
    "axolotl/full_fsdp": CHATML,
    "axolotl/dpo": CHATML,
    "axolotl/experts": LONG,
    "axolotl/frozen_offload": LONG,
    "axolotl/long_context": LONG,
    "trl/distillation": {"distill.teacher": "MODEL"},
    "trl/open_r1_grpo": LONG | {"train.micro_batch_size": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 8},
    "qefficient/a function writes the prompts": LONG,
    "qefficient/LoRA of a summary": {"device.platform": "cpu"},
    "qefficient/4 bits, long rows, and a key written twice": {"ckpt.start": None},  # no checkpoint is there
}
# Kinds of samples for datasets whose type the file does not say.
AUTO = {
    "xorl": "tokenized",
    "trl": "conversation",
    "axolotl/dpo": "Axolotl's preference",
    "axolotl/reward_model": "Axolotl's rewards",
    "trl/open_r1_grpo": "problem",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder of tiny models by kind."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, sizes) in MODELS.items():
        write_model_folder(folder / name, kind, **SIZES | sizes)
    return folder


@pytest.fixture(autouse=True)
def compiled_quickly_in_its_folder(tmp_path, monkeypatch):
    """Compile without optimisations, in a folder of its own: some systems write next to the config."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "foreign" / "data", "preprocess", ignore=shutil.ignore_patterns("*.yaml"))
    Path("open_r1").mkdir()
    Path("open_r1/rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("name", [*FILES, *TEXTS])
def test_a_whole_file_trains(name, models, tmp_path):
    file = FILES.get(name) or tmp_path / "its.yaml"
    if name in TEXTS:
        file.write_text(TEXTS[name])
    config = read_recipe(str(file)).resolve()
    system = name.partition("/")[0]
    experts = re.search(r"-A\d+B", str(config.model.path))
    model = models / ("experts" if experts else "deep" if name in DEEP else "dense")
    kinds = {
        "auto": AUTO.get(name, AUTO.get(system, "")),
        **({"conversation": "erniekit"} if system == "erniekit" else {}),
    }
    options: dict[str, object] = {
        "model.path": model,
        "data.seq_len": 64,
        "data.cache_dir": tmp_path / "cache",
        "train.max_steps": 3,
        "train.grad_accum_steps": config.mesh.stage,
        "train.output_dir": tmp_path / "runs",
    }
    lists = {"datasets": config.data.datasets, "eval_datasets": config.data.eval_datasets}
    options |= write_data(tmp_path / "data", lists, kinds)
    if config.log.wandb.enabled:
        options["log.wandb.enabled"] = False
    options |= {key: model if value == "MODEL" else value for key, value in MORE.get(name, {}).items()}
    arguments = [file, *flags(options)]
    devices = devices_of(name, config)
    if devices <= len(jax.devices()):
        printed = call("jaxtune.train", *arguments, devices=devices)
    else:
        printed = run("jaxtune.train", *arguments, devices=devices)
    (rows,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert [row["step"] for row in metrics(rows.parent) if "loss" in row][-1] == 3, printed


def devices_of(name: str, config: Config) -> int:
    """Return how many devices the system would use; two if it shards over all that there are."""
    if name in test_foreign_files.EXPECTED:
        return test_foreign_files.EXPECTED[name][0]
    return math.prod(size for size in astuple(config.mesh) if size != -1) * (2 if config.mesh.fsdp == -1 else 1)
