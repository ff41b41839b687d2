"""The tables of predicted speeds: predictions of `jaxtune plan` for common models and recipes; no step is run.

    JAX_PLATFORMS=cpu python benchmarks/predicted_speeds.py --out=benchmarks/results/predicted_speeds.json [--only=fp8]
    JAX_PLATFORMS=cpu python benchmarks/predicted_speeds.py --versions=jaxtune/plan/jax_versions.json

Rows that are already in the file are kept unless --only selects them. Each row takes a minute or two. --versions
predicts five recipes with the installed jax and adds them to the file by which `jaxtune plan` says whether another jax
is faster: run it once with each version.
"""

import argparse
import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

from jaxtune.config import load_recipe, resolve
from jaxtune.plan import calibration
from jaxtune.plan.prediction import Plan, TargetGpus, predict
from pallas_kernels.gpus import GPUS

QWEN = ("0.6B", "1.7B", "4B", "8B")
NONE = {"memory.remat": "none"}
# The shapes of results/published_speeds.json, which has the sources. A host has 8 GPUs. If the source recomputes parts
# of a layer in its own way, the row has the policy of jaxtune that is nearest.
_TITAN = {"data.seq_len": "8192", "train.micro_batch_size": "2", "train.grad_accum_steps": "1", "memory.remat": "dots"}
_LORA = {"data.seq_len": "4096", "train.micro_batch_size": "2", "mesh.tensor": "2", "memory.remat": "block"}
_BF16 = {"precision.master_dtype": "bfloat16", "precision.gradient_dtype": "bfloat16"}
_PRETRAIN = _BF16 | {"data.seq_len": "8192", "train.micro_batch_size": "1", "train.grad_accum_steps": "4"}
_MIXTURE = _BF16 | {
    "data.seq_len": "4096",
    "train.micro_batch_size": "2",
    "train.grad_accum_steps": "16",
    "memory.remat": "block",
}
_MAXTEXT = _TITAN | {"data.seq_len": "4096", "memory.remat": "none"}
# MPT 7B has no family here; Llama 2 7B has the same width, layers and heads, and within 1% the same FLOPs for a token.
_FOUNDRY = _MAXTEXT | {"data.seq_len": "2048", "train.micro_batch_size": "6"}
_TITAN_70B = _TITAN | {"train.micro_batch_size": "16", "mesh.tensor": "8", "memory.remat": "block"}
_LLAMA_2 = "meta-llama/Llama-2-"
# The number of micro-batches is not published; torchtitan's default is the number of stages.
_TITAN_405B = {"mesh.tensor": "8", "mesh.stage": "8", "precision.recipe": "fp8_hybrid", "memory.remat": "none"}
# Its sizes in the architecture that is nearest (marin_mixture/config.json), and half of its rows at a time, which fit.
_MARIN = {"data.seq_len": "4096", "train.micro_batch_size": "16", "train.grad_accum_steps": "2", "optim.name": "muon"}
_LLAMA, _CONTEXT = "meta-llama/Llama-3.1-", {"mesh.context": "2", "memory.remat": "block"}
# torchtitan's GPUs have 2.4 TB/s. Their limit of 500 W is not modelled: no source says what it costs.
TITAN_GPUS = {"h100 of 2.4 TB/s": dataclasses.replace(GPUS["h100"], memory_bandwidth=2_400_000_000_000)}
# Experts in place on their devices, as AutoModel has them, and tokens sent to them.
_EXCHANGE = {"mesh.expert": "8", "experts.dispatch": "all_to_all"}
CLUSTERS = {
    "torchtitan 8B, 8": ("qwen_full", f"{_LLAMA}8B", "h100 of 2.4 TB/s", 8, _TITAN),
    "torchtitan 8B, 128": ("qwen_full", f"{_LLAMA}8B", "h100 of 2.4 TB/s", 8, _TITAN, 16),
    "AutoModel LoRA 32B, 8": ("qwen_lora", "Qwen/Qwen2.5-32B", "h100", 8, _LORA | {"train.grad_accum_steps": "4"}),
    "AutoModel LoRA 32B, 16": ("qwen_lora", "Qwen/Qwen2.5-32B", "h100", 8, _LORA | {"train.grad_accum_steps": "2"}, 2),
    "AutoModel LoRA 70B, 8": ("qwen_lora", f"{_LLAMA}70B", "h100", 8, _LORA | {"train.grad_accum_steps": "4"}),
    "AutoModel LoRA 70B, 16": ("qwen_lora", f"{_LLAMA}70B", "h100", 8, _LORA | {"train.grad_accum_steps": "2"}, 2),
    "AutoModel 70B, 64": ("qwen_full", f"{_LLAMA}70B", "h100", 8, _PRETRAIN | _CONTEXT, 8),
    "AutoModel 30B-A3B, 8": (
        "qwen_full",
        "Qwen/Qwen3-30B-A3B",
        "h100",
        8,
        _MIXTURE | {"train.micro_batch_size": "4", "train.grad_accum_steps": "16"},
    ),
    "AutoModel 30B-A3B, 8, EP 8": (
        "qwen_full",
        "Qwen/Qwen3-30B-A3B",
        "h100",
        8,
        _MIXTURE | _EXCHANGE | {"train.micro_batch_size": "4", "train.grad_accum_steps": "16"},
    ),
    "AutoModel gpt-oss-20b, 8": ("qwen_full", "openai/gpt-oss-20b", "h100", 8, _MIXTURE | _EXCHANGE | NONE),
    "AutoModel gpt-oss-120b, 64": (
        "qwen_full",
        "openai/gpt-oss-120b",
        "h100",
        8,
        _MIXTURE | _EXCHANGE | {"train.grad_accum_steps": "4", "mesh.expert": "64"},
        8,
    ),
    "MaxText 7B, 8": ("qwen_full", "meta-llama/Llama-2-7b-hf", "h100", 8, _MAXTEXT),
    "LLM Foundry 7B, 8": ("qwen_full", "meta-llama/Llama-2-7b-hf", "h100", 8, _FOUNDRY),
    "LLM Foundry 7B, 256": ("qwen_full", "meta-llama/Llama-2-7b-hf", "h100", 8, _FOUNDRY, 32),
    "torchtitan 70B, 256": ("qwen_full", f"{_LLAMA}70B", "h100 of 2.4 TB/s", 8, _TITAN_70B, 32),
    "torchtitan 405B, 128": (
        "qwen_full",
        f"{_LLAMA}405B",
        "h100 of 2.4 TB/s",
        8,
        _TITAN | {"mesh.tensor": "8", "memory.remat": "block"},
        16,
    ),
    "torchtitan 405B, 512": (
        "qwen_full",
        f"{_LLAMA}405B",
        "h100 of 2.4 TB/s",
        8,
        _TITAN | _TITAN_405B | {"train.micro_batch_size": "4", "train.grad_accum_steps": "8"},
        64,
    ),
    "torchtitan 405B, 512, interleaved": (
        "qwen_full",
        f"{_LLAMA}405B",
        "h100 of 2.4 TB/s",
        8,
        _TITAN | _TITAN_405B | {"train.grad_accum_steps": "16", "parallel.virtual_stages": "2"},
        64,
    ),
    "torchtitan 8B, 64 A100": ("qwen_full", f"{_LLAMA}8B", "a100", 8, _TITAN | {"train.micro_batch_size": "1"}, 8),
    "torchtitan 70B, 64 A100": (
        "qwen_full",
        f"{_LLAMA}70B",
        "a100",
        8,
        _TITAN | {"train.micro_batch_size": "1", "memory.remat": "block"},
        8,
    ),
    "torchtitan 13B, 64 A100": ("qwen_full", f"{_LLAMA_2}13b-hf", "a100", 8, _MAXTEXT, 8),
    "torchtitan Llama 2 70B, 64 A100": (
        "qwen_full",
        f"{_LLAMA_2}70b-hf",
        "a100",
        8,
        _MAXTEXT | {"memory.remat": "block"},
        8,
    ),
    "marin mixture, 8": (
        "qwen_full",
        str(Path(__file__).parent / "marin_mixture"),
        "h100",
        8,
        _MARIN | {"memory.remat": "block"},
    ),
}
# Name of a row: recipe, model, GPU, GPUs of a host, options; number of hosts if there are several.
ROWS = {
    **{f"LoRA, bf16 {size}": ("qwen_lora", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"LoRA on NF4 {size}": ("qwen_qlora_nf4", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"LoRA, FP8 {size}": ("qwen_fp8", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"full, 8-bit AdamW {size}": ("qwen_full_8bit", f"Qwen/Qwen3-{size}", "h100", 1, {}) for size in QWEN},
    "full, 8-bit AdamW, 3 rows 8B": ("qwen_full_8bit", "Qwen/Qwen3-8B", "h100", 1, {"train.micro_batch_size": "3"}),
    "LoRA, bf16, in a loop 0.6B": ("qwen_lora", "Qwen/Qwen3-0.6B", "h100", 1, NONE | {"memory.unroll": "False"}),
    "LoRA on NF4 Llama-3 70B": ("qwen_qlora_nf4", "meta-llama/Llama-3.1-70B", "h200", 1, NONE),
    "full, 8-bit AdamW, 8 GPUs 8B": ("qwen_full_8bit", "Qwen/Qwen3-8B", "h100", 8, {}),
    "LoRA, bf16 Nemotron-3 Nano": (
        "nemotron3_lora",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "h100",
        1,
        {"memory.remat": "block"},
    ),
    "LoRA on NF4 Qwen3.5 27B": ("qwen3_5_27b_qlora", "Qwen/Qwen3.5-27B", "h100", 1, NONE),
    "LoRA on NF4 Gemma 4 31B": ("gemma4_31b_qlora", "google/gemma-4-31B-it", "h100", 1, NONE),
    "LoRA, bf16 Gemma 4 26B-A4B": ("gemma4_lora", "google/gemma-4-26B-A4B-it", "h100", 1, {}),
    **CLUSTERS,
}

# Rows that are predicted with each version of jax, by their names in jax_versions.json.
OF_VERSIONS = {
    "LoRA 0.6B": "LoRA, bf16, in a loop 0.6B",
    "LoRA 8B": "LoRA, bf16 8B",
    "LoRA on NF4 8B": "LoRA on NF4 8B",
    "LoRA in FP8 8B": "LoRA, FP8 8B",
    "full 8-bit AdamW 8B": "full, 8-bit AdamW, 3 rows 8B",
}


# Parts of a step: a word in a launch's kind or in the line of jaxtune that it comes from. The first that fits counts.
PARTS = {
    "head and loss": "linear_cross_entropy",
    "attention": "flash_attention",
    "products of adapters": "lora.py",
    "products of weights": "product",
    "quantization": "quant matmul.py array.py",
    "norms and rope": "norm.py rope.py",
    "activations of feed-forward": "mlp.py",
    "copies into and out of stacks": "stack.py copy fill",
    "update": "step.py build.py adamw_8bit",
}


def parts_of(plan: Plan) -> dict[str, float]:
    """Return the ms of a step by its parts, divided by the number of micro-batches."""
    parts = dict.fromkeys([*PARTS, "rest"], 0.0)
    for group in plan.groups:
        where = f"{group.kind} {group.source}"
        part = next((part for part, words in PARTS.items() if any(word in where for word in words.split())), "rest")
        parts[part] += group.ms / plan.config.train.grad_accum_steps
    return {part: round(ms, 2) for part, ms in parts.items()}


def predict_row(recipe: str, model: str, gpu: str, gpus: int, options: dict[str, str], hosts: int = 1) -> dict:
    """Return the plan of a row in the form of the JSON file."""
    config = resolve(load_recipe(recipe, model), recipe, list(options.items()))
    plan = predict(config, TargetGpus(gpu, gpus, hosts), calibration.find(gpu))
    return {
        "gpu": gpu,
        "gpus": gpus,
        "hosts": hosts,
        "options": options,
        "remat": plan.config.memory.remat,
        "rows": config.train.micro_batch_size,
        "memory_gb": plan.needed / 1e9,
        "fits": plan.fits,
        "launches": plan.launches,
        "compile_seconds": plan.seconds,
        "date": f"{datetime.date.today()}",
        "jax": jax.__version__,
        "tokens_per_second": {name: speed.tokens_per_second / gpus / hosts for name, speed in plan.speeds.items()},
        "exposed_communication": sum(one.exposed_ms for one in plan.collectives)
        / (1e3 * plan.speeds["central"].seconds),
        "mfu": {name: speed.mfu for name, speed in plan.speeds.items()},
        "parts": parts_of(plan),
    }


def line(name: str, row: dict) -> str:
    """Format a row of the Markdown table: thousands of tokens a second and GPU, their range, MFU, GB per GPU."""
    speed, mfu = row["tokens_per_second"], row["mfu"]["central"]
    spread = f"{speed['pessimistic'] / 1e3:.1f} - {speed['optimistic'] / 1e3:.1f}"
    return f"| {name} | {speed['central'] / 1e3:.1f} | {spread} | {mfu:.0%} | {row['memory_gb']:.1f} |"


def predict_with_this_jax(file: Path) -> None:
    """Add the installed jax to a file of predicted speeds by version, in tokens a second on one H100."""
    speeds = {}
    for name, row in OF_VERSIONS.items():
        predicted = predict_row(*ROWS[row])
        speeds[name] = round(predicted["tokens_per_second"]["central"])
        print(f"jax {jax.__version__}, {name}: {speeds[name]:,}, memory.remat={predicted['remat']}", flush=True)
    written = json.loads(file.read_text()) if file.exists() else {}
    written[jax.__version__] = {"date": f"{datetime.date.today()}", "tokens_per_second": speeds}
    ordered = sorted(written.items(), key=lambda item: [int(number) for number in item[0].split(".")])
    file.write_text(json.dumps(dict(ordered), indent=1) + "\n")


def main() -> None:
    """Predict the missing or selected rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path)
    files.add_argument("--versions", type=Path)
    parser.add_argument("--only", help="repeat the prediction of rows whose name contains this text")
    options = parser.parse_args()
    GPUS.update(TITAN_GPUS)  # in this process only; `predict` knows a GPU by its name there
    if options.versions:
        return predict_with_this_jax(options.versions)
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, row in ROWS.items():
        if name not in rows or (options.only and options.only in name):
            rows[name] = predict_row(*row)
            options.out.write_text(json.dumps(rows, indent=1))
            print(line(name, rows[name]), file=sys.stderr, flush=True)
    print("\n".join(line(name, rows[name]) for name in ROWS))


if __name__ == "__main__":
    main()
