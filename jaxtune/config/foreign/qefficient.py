"""Options of QEfficient that are translated together (see `conversions`)."""

import ast
import re
from typing import Any

from jaxtune.config.foreign.conversions import (
    Options,
    Settings,
    Unsupported,
    conversions_of,
    lines_of,
    names_of,
    saves_of,
    strategy_of,
)


def qefficient_data(o: Options) -> Settings:
    """A file has priority over a dataset name. Validation data is the named split, or a part of the training data."""
    file, name, label = o["dataset.json_file_path"], o["dataset.dataset_name"], o.get("dataset.target_column")
    entry = {"path": file or name, "type": "classification" if label else "instruction"}
    if label:
        columns = names_of(o["dataset.input_columns"])
        text = columns[0] if len(columns) == 1 else " ".join(f"{{{column}}}" for column in columns)
        entry |= {"target_column": label, "text_field": text}
    subset = o["dataset.dataset_subset"]
    if not file:
        entry |= {"split": o["dataset.train_split"]} | ({"subset": subset} if subset != "default" else {})
    settings: Settings = {"data.datasets": [entry]} | ({"model.head": "classification"} if label else {})
    if not o["training.do_eval"] or o["training.eval_strategy"] == "no":
        return settings
    if o.get("dataset.test_split") and not file:
        return settings | {"data.eval_datasets": [entry | {"split": o["dataset.test_split"]}]}
    # Rounded, because 1 - 0.8 is 0.19999999999999996 in floating point.
    return settings | {"data.validation_split": round(1 - o["dataset.split_ratio"], 6)}


def qefficient_function(o: Options) -> Settings:
    """FILE:NAME of a function that returns the text of the prompt or of the completion."""
    prompt, completion = o["dataset.prompt_func"], o["dataset.completion_func"]
    if prompt and completion:
        raise Unsupported(
            "two functions; write one that returns {'prompt': ..., 'completion': ...} and set "
            "data.datasets[i].function = 'FILE.py:NAME'"
        )
    if not (prompt or completion):
        return {}
    place, _, name = str(prompt or completion).rpartition(":")
    if not place:
        raise Unsupported("a function that is not written as FILE:NAME")
    # Their paths leave out the suffix .py; a place without a slash is a module.
    function = f"{place}:{name}" if place.endswith(".py") or "/" not in place else f"{place}.py:{name}"
    written = {"prompt_format": "{returned}"} if prompt else {"output_field": "returned"}
    return {f"data.datasets[i].{key}": value for key, value in {"function": function, **written}.items()}


def qefficient_prompt(o: Options) -> Settings:
    """A template with columns, possibly written as a Python f-string, f"...\\n", as in their grammar example."""
    return _qefficient_text("prompt_format", o["dataset.prompt_template"])


def qefficient_completion(o: Options) -> Settings:
    """A template with columns."""
    return _qefficient_text("output_field", o["dataset.completion_template"])


def _qefficient_text(key: str, template: Any) -> Settings:
    if template is None:
        return {}
    text = str(template)
    if re.fullmatch(r'f"(?:[^"\\]|\\.)*"', text):
        text = ast.literal_eval(text[1:])
    return {f"data.datasets[i].{key}": text}


def qefficient_eval(o: Options) -> Settings:
    """Evaluation by steps or by epochs."""
    strategy = strategy_of(o["training.eval_strategy"] if o["training.do_eval"] else "no")
    by = {"steps": {"eval.steps": o.get("training.eval_steps", 0)}, "epoch": {"eval.epochs": 1.0}}
    return {"eval.steps": 0} | by.get(strategy, {})


def qefficient_early(o: Options) -> Settings:
    """Early stopping, if the callback is listed."""
    if "callbacks.early_stopping" not in o:
        return {}
    patience, least = (o[f"callbacks.early_stopping.early_stopping_{part}"] for part in ("patience", "threshold"))
    return {"eval.patience": patience, "eval.min_improvement": least}


def qefficient_save(o: Options) -> Settings:
    """Checkpoints by steps, by epochs, or never."""
    return saves_of(o["training.save_strategy"], o["training.save_steps"])


def qefficient_log(o: Options) -> Settings:
    """Progress lines by steps, or none."""
    return lines_of(o["training.logging_strategy"], o["training.logging_steps"])


def qefficient_devices(o: Options) -> Settings:
    """FSDP over all devices, or a replica on each."""
    return {"mesh.fsdp": -1} if o["training.fsdp_config"] else {"mesh.fsdp": 1, "mesh.data": -1}


def qefficient_device(o: Options) -> Settings:
    """use_cpu overrides device; XLA has no backend for qaic."""
    if o["training.use_cpu"]:
        return {"device.platform": "cpu"}
    return {"device.platform": o["training.device"]} if o["training.device"] in ("cuda", "cpu") else {}


def qefficient_warmup(o: Options) -> Settings:
    """Warm-up steps; a value below 1 is a fraction of all steps."""
    warmup = o["scheduler.warmup_steps"]
    return {"optim.warmup_ratio": warmup} if 0 < warmup < 1 else {"optim.warmup_steps": int(warmup)}


def qefficient_workers(o: Options) -> Settings:
    """Two options for the same thing; dataloader_num_workers has priority."""
    return {"data.num_workers": o.get("dataset.dataloader_num_workers", o.get("dataset.num_workers"))}


def qefficient_length(o: Options) -> Settings:
    """Row length; longer documents are cut at the end."""
    return {"data.seq_len": o["dataset.max_seq_length"], "data.truncation": "right"}


def qefficient_tokenizer(o: Options) -> Settings:
    """The tokenizer, if it differs from the model's."""
    name = o["dataset.tokenizer_name"]
    return {"model.tokenizer": name} if name != o["model.model_name"] else {}


CONVERSIONS = conversions_of(vars(), "qefficient")
