"""The model card, README.md of an exported model or adapter."""

from pathlib import Path

from huggingface_hub import ModelCardData

from jaxtune.hf.folder import is_hub_id


def write_card(
    folder: Path, *, title: str, base_model: str | None, adapter: bool, recipe: str, steps: int, tokens: int
) -> None:
    """Write README.md.

    Args:
        folder: the exported folder, which must exist.
        title: name of the model.
        base_model: hub id or path of what was fine-tuned; None: trained from random weights. Of a local path only the
            last part is told.
        adapter: whether the folder holds a PEFT adapter instead of a whole model.
        recipe: name of the recipe.
        steps: optimizer steps taken.
        tokens: tokens seen.
    """
    local = base_model is not None and (Path(base_model).expanduser().exists() or not is_hub_id(base_model))
    base = Path(base_model).name if base_model and local else base_model
    data = ModelCardData(
        base_model=None if local else base_model,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["jaxtune", *(["lora"] if adapter else [])],
    )
    kind = "LoRA adapter" if adapter else "language model"
    origin = f"fine-tuned from {base}" if base else "trained from random weights"
    (folder / "README.md").write_text(
        f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nA {kind}, {origin} with jaxtune.\n\n"
        "| | |\n|---|---|\n"
        f"| recipe | `{Path(recipe).name}` |\n| steps | {steps:,} |\n| tokens | {tokens:,} |\n",
        encoding="utf-8",
    )
