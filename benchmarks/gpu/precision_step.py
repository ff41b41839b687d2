"""Training steps in low precision: LoRA in FP8, whole models with 8-bit AdamW, and NorMuon against AdamW.

There are three loads. LoRA has the load of `train_step`, at bf16 and fp8_hybrid; frozen weights are stored as FP8
operands. Whole models take rows of 1024 tokens like LLMQ, with bfloat16 weights and gradients and 8-bit moments, but
fewer than LLMQ's half a million tokens a step, so updates are more frequent here. NorMuon and AdamW train a whole model
in float32 on the same batch, at two accumulation counts, because orthogonalisation costs the same for any number of
tokens.

`published` are figures of other projects on one H100: Surogate's benchmarks.md (LoRA), LLMQ's H100x1.md (Qwen2.5). MFU
is relative to the GPU's bf16 peak, also in FP8.
"""

import math
from typing import Any

from gpu import models, train_step
from gpu.qwen3 import CONFIGS
from gpu.train_step import ACCUMULATION, REMATS, ROWS, SMOKE_LENGTH, measure_step
from gpu.workers import Job, Piece, Row

LENGTH = 1024
# The most important first.
LORA_SIZES = ("8B", "0.6B")
# (accumulation, rows) of a step that trains the whole model; 7B does not accumulate, to save a copy of the gradients.
WHOLE = {"0.6B": (4, 32), "Qwen2.5-0.5B": (4, 32), "Qwen2.5-1.5B": (8, 16), "Qwen2.5-7B": (1, 16)}
SMOKE = ("whole-fp8", "normuon")  # low_precision_correct has LoRA in FP8
ONLY_BLOCK = ("Qwen2.5-7B",)  # needs 67 GB; 103 GB with less rematerialisation, compiled for an H100
ACCUMULATIONS = (1, 8)
RECIPES = {"fp8": "fp8_hybrid", "bf16": "bf16"}
PUBLISHED = {  # tokens/s
    "lora-bf16": {"0.6B": 53_900, "8B": 10_200},
    "lora-fp8": {"0.6B": 51_200, "8B": 11_600},
    "whole-bf16": {"Qwen2.5-0.5B": 149_000, "Qwen2.5-1.5B": 58_700, "Qwen2.5-7B": 13_863},
    "whole-fp8": {"Qwen2.5-0.5B": 164_000, "Qwen2.5-1.5B": 72_800, "Qwen2.5-7B": 19_194},
}
TARGETS = {"lora-fp8": {"8B": 18_000}}
MOST_OVER_ADAMW = 1.15  # ratio of step times


def piece(smoke: bool) -> Piece:
    """The jobs: ways to train by models."""
    lora = [(f"lora-{short}", size, {}) for size in LORA_SIZES for short in RECIPES]
    by_optimizer = [(name, "0.6B", {"accumulation": count}) for count in ACCUMULATIONS for name in ("normuon", "adamw")]
    whole = [(f"whole-{short}", size, {}) for size in WHOLE for short in RECIPES]
    cases = [(contender, "tiny", {}) for contender in SMOKE] if smoke else [*lora, *by_optimizer, *whole]
    jobs = [
        Job(
            contender,
            f"{size}-x{options['accumulation']}" if options else size,
            __name__,
            {"contender": contender, "size": size, "smoke": smoke, **options},
        )
        for contender, size, options in cases
    ]
    columns = (
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("published", "published", ",.0f"),
        ("target", "target", ",.0f"),
        ("ms", "milliseconds", ",.0f"),
        ("MFU %", "mfu_percent", ".1f"),
        ("peak GB", "peak_gb", ".1f"),
        ("remat", "remat", ""),
    )
    title = "a training step by precision recipe and by optimizer"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return Piece("precision_step", title, jobs, columns, 0.05, 150, environment, fresh=True, conclude=compare_recipes)


def measure(contender: str, size: str, smoke: bool, accumulation: int = 1) -> Row:
    """Measure the step of one way to train."""
    kind, _, short = contender.partition("-")
    options: dict[str, Any] = {"lora": kind == "lora"}
    if kind == "lora":
        accumulation, rows, length = ACCUMULATION, ROWS, train_step.LENGTH
        options["precision"] = models.PrecisionOptions(recipe=RECIPES[short])
    elif kind == "whole":
        accumulation, rows, length = *WHOLE.get(size, (2, 2)), LENGTH
        options["precision"] = models.PrecisionOptions(
            recipe=RECIPES[short], master_dtype="bfloat16", gradient_dtype="bfloat16"
        )
        options["optim"] = models.OptimOptions(name="adamw_8bit", learning_rate=models.RATE)
    else:
        rows, length = 8, LENGTH
        options["optim"] = models.OptimOptions(name=contender, learning_rate=models.RATE)
    shape = accumulation, rows, SMOKE_LENGTH if smoke else length
    steps, remats = 2 if smoke else 5, ("block",) if size in ONLY_BLOCK else REMATS
    row = measure_step(CONFIGS[size], shape, steps, remats, **options)
    row |= {"milliseconds": row["seconds"] * 1e3, "tokens_per_step": math.prod(shape)}
    for key, figures in (("published", PUBLISHED), ("target", TARGETS)):
        if size in figures.get(contender, {}):
            row[key] = figures[contender][size]
    return row


def compare_recipes(rows: dict[str, Row]) -> dict[str, Any]:
    """Return FP8's tokens/s over bfloat16's, and NorMuon's step time over AdamW's."""
    ratios = {}
    for name, row in rows.items():
        contender, case = name.split("/", 1)
        other = rows.get(f"{contender.replace('fp8', 'bf16').replace('normuon', 'adamw')}/{case}", {})
        if other is row or "seconds" not in row or "seconds" not in other:
            continue
        if contender == "normuon":
            name = f"{name}: time over AdamW's, at most {MOST_OVER_ADAMW} is wanted"
            ratios[name] = row["seconds"] / other["seconds"]
        else:
            ratios[f"{name}: tokens/s over bfloat16's"] = row["tokens_per_second"] / other["tokens_per_second"]
    return ratios
