"""The multi-token-prediction modules in a base's files: a check that they are there, and copies of shared tensors."""

from pathlib import Path

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models import families
from jaxtune.models.places import Tensor
from jaxtune.models.structure.model_spec import ModelSpec


def check_modules(spec: ModelSpec, folder: Path, scheme: hf.Scheme | None) -> None:
    """Raise UserError unless the folder has the spec's modules, unquantized, with the body's embedding and head.

    A folder without any weights is not checked: `plan` needs none.
    """
    if scheme is not None:
        raise UserError(
            f"mtp.weight: the weights in {folder} are quantized, and modules of such files are not trained yet; take "
            "the checkpoint that is not quantized (quant.format quantizes it while it is read)"
        )
    if not any(folder.glob("*.safetensors")):
        return
    sources = hf.open_weights(folder)
    projection = _name(families.modules_of(spec).names["projection.weight"])
    for number in range(len(spec.layers), spec.tower_start):  # numbered after the body's layers
        if (name := projection.format(layer=number)) not in sources:
            raise UserError(
                f"mtp.weight: {folder} has no multi-token-prediction module: {name} is missing. transformers leaves "
                "modules out when it saves a model; take the publisher's files, or leave mtp.weight out"
            )
    for copy, original in _originals(spec).items():
        if copy in sources and not sources[copy].equals(sources[original]):
            raise UserError(
                f"mtp.weight: {copy} in {folder} differs from {original}; only modules that share them with the body "
                "are trained"
            )


def copied_by_modules(spec: ModelSpec, config: Config, folder: Path) -> dict[str, str]:
    """Return the body's tensor of each tensor of a module that is a copy of it; of a base's files, only those there."""
    if not spec.mtp:
        return {}
    originals = _originals(spec)
    if config.model.from_scratch:
        return originals
    sources = hf.open_weights(folder)
    return {copy: original for copy, original in originals.items() if copy in sources}


def _originals(spec: ModelSpec) -> dict[str, str]:
    names = families.names_of(spec)
    # The files of a tied model have no head, so its modules have copies of the embedding.
    tied = {"head.weight": "embed.weight"} if spec.tied else {}
    return {copy: _name(names[tied.get(of, of)]) for copy, of in families.copies_of(spec).items()}


def _name(entry: str | Tensor) -> str:
    return entry if isinstance(entry, str) else entry.name
