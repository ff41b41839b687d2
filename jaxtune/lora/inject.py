"""Put LoRA adapters into a ModelSpec: which linears, of which size and scale."""

import dataclasses

from jaxtune.config.schema import Lora
from jaxtune.errors import UserError
from jaxtune.models.families import linears
from jaxtune.models.selection import select
from jaxtune.models.spec import Adapter, ModelSpec


def inject(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """The spec with adapters on the selected linears. Raises UserError where a target cannot have one."""
    place = linears(spec)
    targets = lora.target_modules
    _refuse_head(spec, targets)
    chosen = frozenset(place) if targets == "all-linear" else select(targets, place, "lora.target_modules")
    # alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).
    scale = lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank)
    spec = spec.with_sites("adapters", (place[name] for name in chosen))
    return dataclasses.replace(spec, adapter=Adapter(lora.rank, scale, lora.dropout))


def _refuse_head(spec: ModelSpec, targets: str | tuple[str, ...]) -> None:
    tied = "they are one tied tensor in this model, and an adapter would change both"
    reason = tied if spec.tied else "adapters go on the linears inside the layers"
    for name in ("lm_head", "embed_tokens"):
        if any(name in target for target in ((targets,) if isinstance(targets, str) else targets)):
            raise UserError(
                f"lora.target_modules: {name} cannot have an adapter ({reason}). Remove it, or train it in full with "
                "lora.enabled=False and train.freeze for the rest"
            )
