"""What the model card of a run says: its data, options and losses, without a path of the machine."""

import json
import math
from pathlib import Path

from jaxtune.config.schema import Config
from jaxtune.monitor import metrics
from jaxtune.run.folder import RunFolder


def card_rows(config: Config, folder: RunFolder, steps: int, tokens: int) -> dict[str, str]:
    """Rows of the card's table, for a model as it was after so many steps and tokens."""
    data, optim, lora = config.data, config.optim, config.lora
    paths = [path for entry in data.datasets for path in _several(entry.path or "")]
    rows = {"data": ", ".join(Path(path).name for path in paths)}
    if folder.counts.is_file():
        found = json.loads(folder.counts.read_text())
        counted = f"{found['target_tokens']:,} of {found['tokens']:,} tokens trained"
        counted = counted if config.model.head == "lm" else f"{found['tokens']:,} tokens"
        rows["documents"] = f"{found['documents']:,}, {counted}"
    rows |= {
        "steps": f"{steps:,}",
        "tokens": f"{tokens:,}, in rows of {data.seq_len:,}",
        "optimizer": f"{optim.name}, learning rate {optim.learning_rate:g}, {optim.schedule} schedule",
        "precision": config.precision.recipe + (f", base in {config.quant.format}" if config.quant.format else ""),
    }
    if lora.enabled:
        targets = ", ".join(_several(lora.target_modules))
        of_rank = {"DoRA" if lora.use_dora else "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, {targets}"}
        rows |= {"(IA)^3": targets} if lora.kind == "ia3" else of_rank
    seen = [row for row in metrics.read(folder.metrics) if row["step"] <= steps] if folder.metrics.is_file() else []
    shown = {
        "loss": "training loss, last step",
        "eval_loss": "validation loss",
        "eval_accuracy": "validation accuracy",
    }
    for name, label in shown.items():
        if values := [row[name] for row in seen if name in row and math.isfinite(row[name])]:
            rows[label] = f"{values[-1]:.4f}"
    return rows


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
