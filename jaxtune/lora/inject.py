"""Put LoRA adapters into a ModelSpec: which linear layers, of which size and scale."""

import dataclasses
from collections.abc import Mapping, Set

from jaxtune.config.schema import Lora
from jaxtune.errors import UserError
from jaxtune.lora.ia3 import IA3
from jaxtune.lora.lora import LoRA
from jaxtune.models.parameters import Site, loaded_names, sites
from jaxtune.models.selection import select
from jaxtune.models.spec import ModelSpec
from jaxtune.models.treat import linears, treat, treat_linears, treat_sites


def inject(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """The spec with adapters on the selected linear layers and all else frozen, but for the head of a classifier.

    Raises UserError where a target cannot have one.
    """
    known, targets = linears(spec), lora.target_modules
    _refuse_head(spec, targets)
    named = {new.removesuffix(".weight"): name.removesuffix(".weight") for name, new in loaded_names(spec).items()}
    named = {new: name for new, name in named.items() if name in known}
    found = named if targets == "all-linear" else select(targets, named, "lora.target_modules")
    chosen = frozenset(named[name] for name in found)
    if lora.kind == "ia3":
        chosen = _factors(spec, chosen, targets)
    biases = _biases(spec, lora, {new for new, name in named.items() if name in chosen})
    frozen = [name for name, (site, *_) in sites(spec).items() if site.kind != "score" and name not in biases]
    spec = treat(spec, frozen, trained=False)
    for adapter, names in _adapters(lora, chosen, known).items():
        spec = treat_linears(spec, names, adapter=adapter)
        for first, *others in {known[name] for name in names}:
            if others:  # parts of one fused module, which has one adapter: the first part holds what they share
                owned = dataclasses.replace(adapter, owner=first.local.removesuffix(".weight"))
                spec = treat_sites(spec, others, adapter=owned)
    return spec


def _adapters(lora: Lora, chosen: Set[str], known: Mapping[str, tuple[Site, ...]]) -> dict[LoRA | IA3, Set[str]]:
    """The layers that each adapter is beside."""
    if lora.kind == "ia3":
        inner = {name for name in chosen if _is_down(known[name])}
        return {adapter: names for adapter, names in ((IA3(True), inner), (IA3(False), chosen - inner)) if names}
    # alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023).
    return {LoRA(lora.rank, lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank), lora.dropout): chosen}


def _factors(spec: ModelSpec, chosen: Set[str], targets: str | tuple[str, ...]) -> Set[str]:
    """Those of the layers that have factors. Raises UserError for experts, and where keys are part of a fused layer."""
    known = linears(spec)
    if targets == "all-linear":
        keys = ("attention.k.weight", "attention.v.weight")
        chosen = {name for name in chosen if _is_down(known[name]) or all(s.local in keys for s in known[name])}
        if all(_is_down(known[name]) for name in chosen):
            raise UserError(
                f"lora.kind='ia3': keys and values of this {spec.family} are no layers of their own; name layers in "
                "lora.target_modules, whose whole output gets factors"
            )
    if experts := sorted(name for name in chosen if known[name][0].local.startswith("mlp.experts.")):
        raise UserError(
            f"lora.kind='ia3': experts, such as {experts[0]}, have no factors; leave them out of lora.target_modules"
        )
    return chosen


def _is_down(parts: tuple[Site, ...]) -> bool:
    return parts[0].local.endswith(".down.weight")


def _biases(spec: ModelSpec, lora: Lora, adapted: set[str]) -> set[str]:
    """Names of the biases that are trained beside the adapters of these modules. Raises UserError if there are none."""
    if lora.bias == "none":
        return set()
    if spec.has_experts:
        raise UserError(
            f"lora.bias={lora.bias!r}: not of a mixture of experts, whose biases have other names in peft; leave it out"
        )
    found = {name for name in sites(spec) if name.endswith(".bias")}
    chosen = {name for name in found if lora.bias == "all" or name.removesuffix(".bias") in adapted}
    if not chosen:
        others = f"no layer of lora.target_modules has one, but {min(found)} is there" if found else "leave it out"
        raise UserError(f"lora.bias={lora.bias!r}: this {spec.family} has no bias to train; {others}")
    return chosen


def _refuse_head(spec: ModelSpec, targets: str | tuple[str, ...]) -> None:
    tied = "they are one tied tensor in this model, and an adapter would change both"
    reason = tied if spec.tied else "adapters go on the linear layers inside the layers"
    for name in ("lm_head", "embed_tokens"):
        if any(name in target for target in ((targets,) if isinstance(targets, str) else targets)):
            raise UserError(
                f"lora.target_modules: {name} cannot have an adapter ({reason}). Remove it, or train it in full with "
                "lora.enabled=False and train.freeze for the rest"
            )
