"""Training steps with few bits: LoRA in FP8, whole models with 8-bit AdamW, and NorMuon beside AdamW.

Three loads. LoRA is that of `train_step`, at bf16 and fp8_hybrid; frozen weights are FP8 operands from the start.
Whole models take rows of 1024 tokens as LLMQ does, with bfloat16 weights and gradients and 8-bit moments, without
LLMQ's half a million tokens a step: an update comes more often here. NorMuon and AdamW train a whole model in float32
on the same batch, at two accumulation counts: orthogonalisation costs the same however many tokens a step has.

`published` are figures of others on one H100: Surogate's benchmarks.md (LoRA), LLMQ's H100x1.md (Qwen2.5). MFU is against
the card's bf16 peak, also in FP8.
"""

from typing import Any

from gpu import models
from gpu.qwen3 import CONFIGS
from gpu.train_step import SMOKE_LENGTH, measure_step
from gpu.train_step import shape as lora_shape
from gpu.workers import Job, Piece, Row

LENGTH = 1024
# Most telling first.
LORA_SIZES = ("8B", "0.6B")
# (accumulation, rows) of a step that trains the whole model; 7B keeps no sums of gradients besides the gradients.
WHOLE = {"0.6B": (4, 32), "Qwen2.5-0.5B": (4, 32), "Qwen2.5-1.5B": (4, 32), "Qwen2.5-7B": (1, 16)}
ACCUMULATIONS = (1, 8)
RECIPES = {"bf16": "bf16", "fp8": "fp8_hybrid"}
PUBLISHED = {  # tokens/s
    "lora-bf16": {"0.6B": 53_900, "8B": 10_200},
    "lora-fp8": {"0.6B": 51_200, "8B": 11_600},
    "whole-bf16": {"Qwen2.5-0.5B": 149_000, "Qwen2.5-1.5B": 58_700, "Qwen2.5-7B": 13_863},
    "whole-fp8": {"Qwen2.5-0.5B": 164_000, "Qwen2.5-1.5B": 72_800, "Qwen2.5-7B": 19_194},
}
TARGETS = {"lora-fp8": {"8B": 18_000}}
MOST_OVER_ADAMW = 1.15  # of a step's time


def piece(smoke: bool) -> Piece:
    """Ways to train by models."""
    jobs = []

    def add(contender: str, case: str, **arguments: Any) -> None:
        jobs.append(Job(contender, case, __name__, {"contender": contender, "smoke": smoke, **arguments}))

    def by_recipe(kind: str, size: str) -> None:
        for short in RECIPES:
            add(f"{kind}-{short}", size, size=size)

    by_recipe("lora", "tiny" if smoke else LORA_SIZES[0])
    if not smoke:
        by_recipe("lora", LORA_SIZES[1])
    for accumulation in ACCUMULATIONS:
        for name in ("normuon", "adamw"):
            size = "tiny" if smoke else "0.6B"
            add(name, f"{size}-x{accumulation}", size=size, accumulation=accumulation)
    for size in ("tiny",) if smoke else WHOLE:
        by_recipe("whole", size)
    columns = (
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("published", "published", ",.0f"),
        ("target", "target", ",.0f"),
        ("ms", "milliseconds", ",.0f"),
        ("MFU %", "mfu_percent", ".1f"),
        ("peak GB", "peak_gb", ".1f"),
        ("remat", "remat", ""),
    )
    title = "a training step by recipe of precision and by optimizer"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return Piece("precision_step", title, jobs, columns, 0.30, 150, environment, fresh=True, conclude=compared)


def measure(contender: str, size: str, smoke: bool, accumulation: int = 1) -> Row:
    """The step of one way to train."""
    kind, _, short = contender.partition("-")
    if kind == "lora":
        shape, options = lora_shape(smoke), {"precision": models.Precision(recipe=RECIPES[short])}
    elif kind == "whole":
        few_bytes = {"master_dtype": "bfloat16", "gradient_dtype": "bfloat16"}
        shape = (*WHOLE.get(size, (2, 2)), LENGTH)
        options = {
            "lora": False,
            "optim": models.Optim(name="adamw_8bit", learning_rate=models.RATE),
            "precision": models.Precision(recipe=RECIPES[short], **few_bytes),
        }
    else:
        shape = (accumulation, 8, LENGTH)
        options = {"lora": False, "optim": models.Optim(name=contender, learning_rate=models.RATE)}
    shape = (*shape[:2], SMOKE_LENGTH) if smoke else shape
    row = measure_step(CONFIGS[size], shape, 2 if smoke else 5, **options)
    row |= {"milliseconds": row["seconds"] * 1e3, "tokens_per_step": shape[0] * shape[1] * shape[2]}
    for key, figures in (("published", PUBLISHED), ("target", TARGETS)):
        if size in figures.get(contender, {}):
            row[key] = figures[contender][size]
    return row


def compared(rows: dict[str, Row]) -> dict[str, Any]:
    """FP8's tokens/s over bfloat16's, and NorMuon's time of a step over AdamW's."""
    found = {}
    for name, row in rows.items():
        contender, case = name.split("/", 1)
        other = rows.get(f"{contender.replace('fp8', 'bf16').replace('normuon', 'adamw')}/{case}", {})
        if other is row or "seconds" not in row or "seconds" not in other:
            continue
        if contender == "normuon":
            found[f"{name}: time of a step over AdamW's, to be at most {MOST_OVER_ADAMW}"] = (
                row["seconds"] / other["seconds"]
            )
        else:
            found[f"{name}: tokens/s over bfloat16's"] = row["tokens_per_second"] / other["tokens_per_second"]
    return found
