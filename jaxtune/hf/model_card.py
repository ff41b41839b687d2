"""The model card, README.md of an exported model or adapter."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.hf.model_folder import is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


@dataclass(frozen=True)
class Evaluation:
    """Results of the last evaluation.

    Attributes:
        metrics: values by metric name.
        data: the evaluation data, in words.
        hub_id: id of the dataset, if the data is a single dataset on the hub.
    """

    metrics: Mapping[str, float]
    data: str
    hub_id: str | None = None


def write_card(
    folder: Path,
    *,
    title: str,
    name: str,
    base_model: str | None,
    adapter: bool,
    auto_class: str = "AutoModelForCausalLM",
    base_options: Mapping[str, Any] = {},
    ends: Sequence[int] = (),
    rows: Mapping[str, str],
    curve: Path,
    recipe: str = "",
    datasets: Sequence[str] = (),
    evaluation: Evaluation | None = None,
) -> None:
    """Write README.md, and copy the loss curve next to it if there is one.

    Args:
        folder: the exported folder, which must exist.
        title: name of the model.
        name: hub id or folder name, with which the model is loaded.
        base_model: hub id or path of the model that was fine-tuned; None: trained from random weights. Only the last
            part of a local path is written.
        adapter: whether the folder holds a PEFT adapter instead of a whole model.
        auto_class: the transformers class that loads the model, or the base of an adapter.
        base_options: keyword arguments for loading the base of an adapter.
        ends: the tokens that end an answer, if the base of an adapter does not stop at every one.
        rows: rows of the card's table, label to value.
        curve: image of the loss curve; skipped if the file does not exist.
        recipe: YAML of the training options.
        datasets: hub ids of the training datasets that have one.
        evaluation: results of the last evaluation; None: the run did not evaluate.
    """
    local = base_model is not None and (Path(base_model).expanduser().exists() or not is_hub_id(base_model))
    base = Path(base_model).name if base_model and local else base_model
    if adapter and local and base == name:  # equal folder names: write more of both paths
        base, name = _distinct_names(Path(base_model or ""), folder)
    classifier = auto_class.endswith("SequenceClassification")
    task = "text-classification" if classifier else "text-generation"
    from huggingface_hub import ModelCardData  # takes long to import

    data = ModelCardData(
        base_model=None if local else base_model,
        datasets=list(datasets) or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        tags=["jaxtune", *(["lora"] if adapter else [])],
        model_name=title,
        eval_results=_results(evaluation, task) or None,
    )
    decision = "decision model" if auto_class.endswith("Decision") else "language model"
    kind = "LoRA adapter" if adapter else "text classifier" if classifier else decision
    origin = f"fine-tuned from {base}" if base else "trained from random weights"
    table = "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows.items())
    text = f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nA {kind}, {origin} with jaxtune.\n\n| | |\n|---|---|\n{table}"
    text += f"\n{_block('python', _loading_code(name, base if adapter else None, auto_class, base_options, ends))}"
    if curve.is_file():
        shutil.copyfile(curve, folder / curve.name)
        text += f"\n![Losses and learning rate over the steps]({curve.name})\n"
    if recipe:
        text += f"\n<details><summary>Recipe</summary>\n\n{_block('yaml', recipe)}\n</details>\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _results(evaluation: Evaluation | None, task: str) -> "list[EvalResult]":
    """The metrics as entries of the card's `model-index`."""
    from huggingface_hub import EvalResult

    if evaluation is None:
        return []
    return [
        EvalResult(task, evaluation.hub_id or "local", evaluation.data, metric_type=name, metric_value=value)
        for name, value in evaluation.metrics.items()
    ]


def _distinct_names(base: Path, folder: Path) -> tuple[str, str]:
    """The shortest endings of two paths that differ."""
    ours, theirs = base.expanduser().resolve().parts, folder.resolve().parts
    count = next((n for n in range(1, len(ours) + 1) if ours[-n:] != theirs[-n:]), len(ours))
    return "/".join(ours[-count:]), "/".join(theirs[-count:])


def _loading_code(
    name: str, base: str | None, auto_class: str, base_options: Mapping[str, Any], ends: Sequence[int]
) -> str:
    """Python code that loads the model, or the adapter on its base."""
    options = "".join(f", {option}={value!r}" for option, value in base_options.items())
    load = f'{auto_class}.from_pretrained("{base or name}"{options})'
    lines = [f"from transformers import {auto_class}, AutoTokenizer\n", f"model = {load}"]
    if base is not None:
        lines = ["from peft import PeftModel", lines[0], f'model = PeftModel.from_pretrained({load}, "{name}")']
    if ends:
        lines.append(f"model.generation_config.eos_token_id = {list(ends)}  # answers end with {ends[-1]}")
    return "\n".join([*lines, f'tokenizer = AutoTokenizer.from_pretrained("{name}")', ""])


def _block(language: str, text: str) -> str:
    """A fenced code block; its fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"
