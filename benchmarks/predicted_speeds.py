"""The README's table of predicted speeds: predictions of `jaxtune plan` for common models and recipes; no step is run.

    JAX_PLATFORMS=cpu python benchmarks/predicted_speeds.py --out=benchmarks/results/predicted_speeds.json [--only=fp8]

Rows that are already in the file are kept unless --only selects them. Each row takes a minute or two.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from jaxtune.config import load_recipe, resolve
from jaxtune.plan import calibration
from jaxtune.plan.prediction import TargetGpus, predict

QWEN = ("0.6B", "1.7B", "4B", "8B")
NONE = {"memory.remat": "none"}
# Name of a row: recipe, model, GPU, number of GPUs, options.
ROWS = {
    **{f"LoRA, bf16 {size}": ("qwen_lora", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"LoRA on NF4 {size}": ("qwen_qlora_nf4", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"LoRA, FP8 {size}": ("qwen_fp8", f"Qwen/Qwen3-{size}", "h100", 1, NONE) for size in QWEN},
    **{f"full, 8-bit AdamW {size}": ("qwen_full_8bit", f"Qwen/Qwen3-{size}", "h100", 1, {}) for size in QWEN},
    "full, 8-bit AdamW, 3 rows 8B": ("qwen_full_8bit", "Qwen/Qwen3-8B", "h100", 1, {"train.micro_batch_size": "3"}),
    "LoRA, bf16, unrolled 0.6B": ("qwen_lora", "Qwen/Qwen3-0.6B", "h100", 1, NONE | {"memory.unroll": "True"}),
    "LoRA on NF4 Llama-3 70B": ("qwen_qlora_nf4", "meta-llama/Llama-3.1-70B", "h200", 1, NONE),
    "full, 8-bit AdamW, 8 GPUs 8B": ("qwen_full_8bit", "Qwen/Qwen3-8B", "h100", 8, {}),
}


def predict_row(recipe: str, model: str, gpu: str, gpus: int, options: dict[str, str]) -> dict:
    """Return the plan of a row in the form of the JSON file."""
    config = resolve(load_recipe(recipe, model), recipe, list(options.items()))
    plan = predict(config, TargetGpus(gpu, gpus), calibration.find(gpu))
    return {
        "gpu": gpu,
        "gpus": gpus,
        "options": options,
        "remat": plan.config.memory.remat,
        "rows": config.train.micro_batch_size,
        "memory_gb": plan.needed / 1e9,
        "fits": plan.fits,
        "launches": plan.launches,
        "compile_seconds": plan.seconds,
        "tokens_per_second": {name: speed.tokens_per_second / gpus for name, speed in plan.speeds.items()},
        "mfu": {name: speed.mfu for name, speed in plan.speeds.items()},
    }


def line(name: str, row: dict) -> str:
    """Format a row of the Markdown table: thousands of tokens a second and GPU, their range, MFU, GB per GPU."""
    speed, mfu = row["tokens_per_second"], row["mfu"]["central"]
    spread = f"{speed['pessimistic'] / 1e3:.1f} - {speed['optimistic'] / 1e3:.1f}"
    return f"| {name} | {speed['central'] / 1e3:.1f} | {spread} | {mfu:.0%} | {row['memory_gb']:.1f} |"


def main() -> None:
    """Predict the missing or selected rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="repeat the prediction of rows whose name contains this text")
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, row in ROWS.items():
        if name not in rows or (options.only and options.only in name):
            rows[name] = predict_row(*row)
            options.out.write_text(json.dumps(rows, indent=1))
            print(line(name, rows[name]), file=sys.stderr, flush=True)
    print("\n".join(line(name, rows[name]) for name in ROWS))


if __name__ == "__main__":
    main()
