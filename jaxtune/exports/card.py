"""Contents of a run's model card: data, options, losses and recipe, without local paths."""

import math
import re
from pathlib import Path
from typing import Any

import yaml

from jaxtune.config import keys, option_rules
from jaxtune.config.schema import Config, Dataset
from jaxtune.data.reading.readers import SUFFIXES
from jaxtune.hf import Evaluation
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import TITLES
from jaxtune.monitor import metrics

# Options for storage, logging and machine resources. They do not describe the model, and are the likeliest to hold
# private names or addresses.
_LOCAL_OPTIONS = (
    "ckpt", "device", "export", "log", "prof", "rollout.server", "data.cache_dir", "data.cache_only", "data.num_proc",
    "data.num_workers", "data.prefetch", "train.output_dir", "train.run_name", "train.hang_seconds",
)  # fmt: skip


def card_rows(config: Config, folder: RunFolder, steps: int, tokens: int) -> dict[str, str]:
    """Return the rows of the card's table, for a model after `steps` steps and `tokens` tokens."""
    data, optim, lora = config.data, config.optim, config.lora
    rows = {"data": _data_in_words(data.datasets)}
    if counts := folder.read_counts():
        trained = f", {counts.target_tokens:,} of them trained" if counts.target_tokens else ""
        rows["documents"] = f"{counts.documents:,}, {counts.tokens:,} tokens{trained}"
        if counts.images:
            rows["images"] = f"{counts.images:,}, {counts.patches:,} patches"
    rows |= {
        "steps": f"{steps:,}",
        "tokens": f"{tokens:,}, in rows of {data.seq_len:,}",
        "optimizer": f"{optim.name}, learning rate {optim.learning_rate:g}, {optim.schedule} schedule",
        "precision": config.precision.recipe + (f", base in {config.quant.format}" if config.quant.format else ""),
    }
    if lora.enabled:
        targets = ", ".join(_several(lora.target_modules))
        low_rank = {"DoRA" if lora.use_dora else "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, {targets}"}
        rows |= low_rank if lora.kind == "lora" else {TITLES[lora.kind]: targets}
    shown = {
        "loss": "training loss, last step",
        "eval_loss": "validation loss",
        "eval_accuracy": "validation accuracy",
        "eval_ece": "validation calibration error (ECE)",
    }
    history = _metrics_until(folder, steps)
    for name, label in shown.items():
        if values := [row[name] for row in history if name in row and math.isfinite(row[name])]:
            rows[label] = f"{values[-1]:.4f}"
    return rows


def card_recipe(config: Config) -> str:
    """Return the model's options that differ from the defaults, as a YAML recipe; paths and URLs by their last part."""
    sections: dict[str, Any] = {}
    for key, value in option_rules.non_default_options(config).items():
        if "[" in key or any(key == local or key.startswith(f"{local}.") for local in _LOCAL_OPTIONS):
            continue
        if keys.has_entries(key):
            value = [_entry(config, f"{key}[{i}].") for i in range(len(value))]
        *names, last = key.split(".")
        section = sections
        for name in names:
            section = section.setdefault(name, {})
        section[last] = _public(value)
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=120)


def card_datasets(config: Config) -> list[str]:
    """Return the hub ids of the training data."""
    return list(dict.fromkeys(name for entry in config.data.datasets if (name := _hub_id(entry)) is not None))


def card_evaluation(config: Config, folder: RunFolder, steps: int) -> Evaluation | None:
    """Return the last evaluation up to step `steps`; None if there is none."""
    rows = [row for row in _metrics_until(folder, steps) if any(name.startswith("eval_") for name in row)]
    if not rows:
        return None
    values = {name.removeprefix("eval_"): value for name, value in rows[-1].items() if name.startswith("eval_")}
    entries = config.data.eval_datasets or config.data.datasets
    words = _data_in_words(entries) + ("" if config.data.eval_datasets else ", held-out part")
    return Evaluation(
        {name: value for name, value in values.items() if math.isfinite(value)},
        words,
        _hub_id(entries[0]) if len(entries) == 1 else None,
    )


def _metrics_until(folder: RunFolder, steps: int) -> list[dict[str, Any]]:
    """Return the rows of metrics up to a step."""
    return [row for row in metrics.read(folder.metrics) if row["step"] <= steps] if folder.metrics.is_file() else []


def _entry(config: Config, prefix: str) -> dict[str, Any]:
    """Return the options of an entry that differ from the defaults."""
    return {
        key.removeprefix(prefix): value
        for key, value in option_rules.non_default_options(config).items()
        if key.startswith(prefix)
    }


def _data_in_words(entries: tuple[Dataset, ...]) -> str:
    return ", ".join(_last_part(path) for entry in entries for path in _several(entry.path or ""))


def _hub_id(entry: Dataset) -> str | None:
    """Return a dataset's hub id, told from a path as in `data.reading.sources`; None for a name without a slash.

    A name without a slash might be a local folder.
    """
    path = entry.path
    if not isinstance(path, str) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        return None
    return None if Path(path).suffix in SUFFIXES or Path(path).exists() else path


def _public(value: Any) -> Any:
    """Return an option's value with absolute paths, existing paths and URLs cut to their last part."""
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_public(one) for one in value]
    if not isinstance(value, str) or "\n" in value or "{" in value:  # a text or a template
        return value
    is_path = re.match(r"[/~].*/", value) or re.fullmatch(r"\w+://\S+", value)
    return _last_part(value) if is_path or ("/" in value and Path(value).exists()) else value


def _last_part(path: str) -> str:
    """Return the last part of a path or a URL, without the URL's query, which may hold a token."""
    return Path(path.partition("?")[0] if "://" in path else path).name


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
