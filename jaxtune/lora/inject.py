"""Put LoRA adapters into a ModelSpec: which linears, of which size and scale."""

import dataclasses

from jaxtune.config.schema import Lora
from jaxtune.errors import UserError
from jaxtune.models.families import linears
from jaxtune.models.selection import select
from jaxtune.models.spec import Adapter, ModelSpec


def adapter_scale(rank: int, alpha: float, use_rslora: bool) -> float:
    """alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)."""
    return alpha / (rank**0.5 if use_rslora else rank)


def inject(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """The spec with adapters on the selected linears. Raises UserError where a target cannot have one."""
    place = linears(spec)
    targets = lora.target_modules
    _refuse_head(spec, targets)
    chosen = frozenset(place) if targets == "all-linear" else select(targets, place, "lora.target_modules")
    sites: dict[int, set[str]] = {}
    for name in chosen:
        layer, site = place[name]
        sites.setdefault(layer, set()).add(site)
    layers = tuple(
        dataclasses.replace(layer, adapters=frozenset(sites.get(number, ())))
        for number, layer in enumerate(spec.layers)
    )
    adapter = Adapter(lora.rank, adapter_scale(lora.rank, lora.alpha, lora.use_rslora), lora.dropout)
    return dataclasses.replace(spec, layers=layers, adapter=adapter)


def _refuse_head(spec: ModelSpec, targets: str | tuple[str, ...]) -> None:
    for name in ("lm_head", "embed_tokens"):
        if any(name in target for target in ((targets,) if isinstance(targets, str) else targets)):
            tied = (
                "they are one tied tensor in this model, and an adapter would change both"
                if spec.tied
                else ("adapters go on the linears inside the layers")
            )
            raise UserError(
                f"lora.target_modules: {name} cannot have an adapter ({tied}). Remove it, or train it in full with "
                "lora.enabled=False and train.freeze for the rest"
            )
