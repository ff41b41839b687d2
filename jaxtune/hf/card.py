"""The model card, README.md of an exported model or adapter."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCardData

from jaxtune.hf.folder import is_hub_id


def write_card(
    folder: Path,
    *,
    title: str,
    base_model: str | None,
    adapter: bool,
    classifier: bool = False,
    rows: Mapping[str, str],
    curve: Path,
) -> None:
    """Write README.md, and copy the loss curve beside it if there is one.

    Args:
        folder: the exported folder, which must exist.
        title: name of the model.
        base_model: hub id or path of the model that was fine-tuned; None: trained from random weights. Of a local path
            only the last part is written.
        adapter: whether the folder holds a PEFT adapter instead of a whole model.
        classifier: whether it has labels instead of a vocabulary to speak in.
        rows: the rows of the card's table, label and value.
        curve: a picture of the losses; skipped if the file does not exist.
    """
    local = base_model is not None and (Path(base_model).expanduser().exists() or not is_hub_id(base_model))
    base = Path(base_model).name if base_model and local else base_model
    data = ModelCardData(
        base_model=None if local else base_model,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if classifier else "text-generation",
        tags=["jaxtune", *(["lora"] if adapter else [])],
    )
    kind = "LoRA adapter" if adapter else "text classifier" if classifier else "language model"
    origin = f"fine-tuned from {base}" if base else "trained from random weights"
    table = "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows.items())
    text = f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nA {kind}, {origin} with jaxtune.\n\n| | |\n|---|---|\n{table}"
    if curve.is_file():
        shutil.copyfile(curve, folder / curve.name)
        text += f"\n![Losses and learning rate over the steps]({curve.name})\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
