"""Put adapters into a ModelSpec: choose the linear layers, and the rank and scale of each adapter."""

import dataclasses
import importlib
from collections.abc import Mapping, Set
from typing import Any

from jaxtune.errors import UserError
from jaxtune.lora.dora import DoRA
from jaxtune.lora.lora import FROM_WEIGHT, LoRA
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.selection import select
from jaxtune.models.sites import loaded_names, sites, tensors_of
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.treatment import linears, treat, treat_linears, treat_sites


def inject(spec: ModelSpec, lora: LoraOptions, only_modules: bool = False) -> ModelSpec:
    """Return the spec with adapters on the selected linear layers and the other parameters frozen.

    Trained next to the adapters are the head of a classifier, lora.modules_to_save, and biases (lora.bias). Raises
    UserError if a target cannot have an adapter. only_modules: select only in multi-token-prediction modules.
    """
    known = linears(spec)
    file_names = {new.removesuffix(".weight"): name.removesuffix(".weight") for name, new in loaded_names(spec).items()}
    linear_names = {
        new: name
        for new, name in file_names.items()
        if name in known and (not only_modules or known[name][0].of_module(spec))
    }
    adapters = _adapters(spec, lora, linear_names)
    # Layers are named as in the checkpoint files from here on; `linear_names` has the names in a loaded model as keys.
    adapted = {name for names in adapters.values() for name in names}
    biases = _biases(spec, lora, adapted)
    trained = biases | _whole_modules(spec, lora.modules_to_save, adapted)
    # A classifier's head ("score") is always trained.
    frozen = [name for name, (site, *_) in sites(spec).items() if site.kind != "score" and name not in trained]
    spec = treat(spec, frozen, trained=False)
    for adapter, names in adapters.items():
        spec = treat_linears(spec, names, adapter=adapter)
        for first, *rest in {known[name] for name in names}:
            if rest:  # parts of one fused module, which has one adapter: the first part holds the shared parameters
                sharing = dataclasses.replace(adapter, owner=first.local.removesuffix(".weight"))
                spec = treat_sites(spec, rest, adapter=sharing)
    return spec


def _adapters(spec: ModelSpec, lora: LoraOptions, file_names: Mapping[str, str]) -> dict[Any, Set[str]]:
    """Return the layers of each adapter, by their names in the checkpoint files.

    `file_names`: name in the checkpoint files of each linear layer, by its name in a loaded model.
    """
    known, targets = linears(spec), lora.target_modules
    _refuse_head(spec, targets)
    if targets == "all-linear":  # of the decoder
        targeted = frozenset(name for name, of in file_names.items() if not known[of][0].of_vision(spec))
    else:
        targeted = select(targets, file_names, "lora.target_modules")
    first_sites = {name: known[of][0] for name, of in file_names.items()}
    # lora.layers_to_transform numbers the decoder's layers only.
    numbers = {name: None if site.of_vision(spec) else site.layer for name, site in first_sites.items()}
    targeted = _in_layers(spec, targeted, numbers, lora.layers_to_transform)
    if lora.kind != "lora":  # a file of this folder, named as the kind
        place = importlib.import_module(f"jaxtune.lora.{lora.kind}").place
        return place(spec, {file_names[name] for name in targeted}, targets)
    if refused := {name for name in targeted if families.refuses_lora(spec, name)}:
        if targets != "all-linear":
            raise UserError(
                f"lora.target_modules: peft cannot load LoRA of {min(refused)} in a {spec.family}; leave it out, as "
                "all-linear does, by a regex if other layers have the same name"
            )
        targeted -= refused
    experts = {name for name in targeted if known[file_names[name]][0].of_experts}
    for option, is_set in (("use_dora=True", lora.use_dora), (f"init={lora.init!r}", lora.init in FROM_WEIGHT)):
        if experts and is_set:
            raise UserError(
                f"lora.{option} does not support experts, such as {min(experts)}; leave them out of lora.target_modules"
            )
    ranks = _numbers(lora.rank_pattern, targeted, experts, "lora.rank_pattern")
    alphas = _numbers(lora.alpha_pattern, targeted, experts, "lora.alpha_pattern")
    # Layers with the same rank and alpha share one adapter record.
    kind, adapters = DoRA if lora.use_dora else LoRA, {}
    for name in sorted(targeted):
        rank = ranks.get(name, lora.rank)
        if rank < 1 or rank != int(rank):
            raise UserError(f"lora.rank_pattern: the rank of {name} would be {rank:g}; it must be 1 or more")
        alpha = alphas.get(name, lora.alpha)
        adapter = kind(int(rank), alpha, lora.use_rslora, lora.dropout, lora.init, lora.freeze_a)
        adapters.setdefault(adapter, set()).add(file_names[name])
    return adapters


def _in_layers(
    spec: ModelSpec, names: frozenset[str], layer_of: Mapping[str, int | None], numbers: tuple[int, ...]
) -> frozenset[str]:
    """Return the names that are in layers with these numbers; () means all. Raises UserError if a layer has none."""
    if not numbers:
        return names
    if missing := sorted(set(numbers) - {layer_of[name] for name in names}):
        raise UserError(
            f"lora.layers_to_transform={numbers}: layer {missing[0]} has none of lora.target_modules; the model has "
            f"{len(spec.layers)} layers, from 0"
        )
    return frozenset(name for name in names if layer_of[name] in numbers)


def _numbers(entries: tuple[str, ...], names: Set[str], experts: Set[str], option: str) -> dict[str, float]:
    """Return the number for each name that an entry, 'REGEX=NUMBER', matches; the last matching entry wins.

    Raises UserError if an entry matches experts, because in peft all adapters of experts have the same rank.
    """
    numbers = {}
    for entry in entries:
        pattern, _, number = entry.rpartition("=")
        matches = select(pattern, sorted(names), option)
        if matched_experts := matches & experts:
            raise UserError(
                f"{option}={entry!r} matches experts, such as {min(matched_experts)}, which always have lora.rank and "
                "lora.alpha; make the regex narrower"
            )
        numbers |= dict.fromkeys(matches, float(number))
    return numbers


def _whole_modules(spec: ModelSpec, modules: tuple[str, ...], adapted: Set[str]) -> set[str]:
    """Return names of the tensors of lora.modules_to_save. Raises UserError for one that peft cannot represent."""
    if not modules:
        return set()
    option = "lora.modules_to_save"
    if spec.tied and (tied := [name for name in ("embed_tokens", "lm_head") if any(name in one for one in modules)]):
        raise UserError(
            f"{option}: {tied[0]} is tied in this model (tie_word_embeddings) and peft would untie it; leave it out or "
            "train the whole model (lora.enabled=False)"
        )
    known, loaded = sites(spec), loaded_names(spec)
    # peft saves whole modules, so a weight and its bias are trained together.
    of_module = {name: loaded[name].rpartition(".")[0] for name in known if name.endswith((".weight", ".bias"))}
    selected = select(modules, sorted(set(of_module.values())), option)
    tensors = {name: known[name] for name, module in of_module.items() if module in selected}
    if experts := sorted(name for name, parts in tensors.items() if parts[0].of_experts):
        raise UserError(f"{option}: experts, such as {experts[0]}, are not supported; leave them out")
    entries = tensors_of(spec)
    if turned := sorted(name for name in tensors if entries[name].transposed):
        raise UserError(
            f"{option}: {turned[0]} is another module with another shape in a loaded {spec.family}, so peft would not "
            "find it; leave it out"
        )
    if both := sorted(of_module[name] for name in tensors if name.removesuffix(".weight") in adapted):
        raise UserError(f"{option}: {both[0]} has an adapter too; remove it from {option} or from lora.target_modules")
    treatments = {
        name: [(spec if s.layer is None else spec.every_layer[s.layer]).treatment(s.local) for s in parts]
        for name, parts in tensors.items()
    }
    if stored := sorted(name for name, of_parts in treatments.items() if any(t.stored is not None for t in of_parts)):
        raise UserError(
            f"{option}: {stored[0]} is quantized, so it cannot be trained; remove it from {option}, or exclude it from "
            "quantization (quant.exclude)"
        )
    return set(tensors)


def _biases(spec: ModelSpec, lora: LoraOptions, adapted: set[str]) -> set[str]:
    """Return names of the biases to train next to the adapters of these modules. Raises UserError if there are none."""
    if lora.bias == "none":
        return set()
    if spec.has_experts:
        raise UserError(
            f"lora.bias={lora.bias!r}: a mixture of experts is not supported, because its biases have other names in "
            "peft; leave it out"
        )
    known = sites(spec)
    # Without adapters in the vision tower its biases stay as they are, also with "all".
    sees = any(known[f"{name}.weight"][0].of_vision(spec) for name in adapted if f"{name}.weight" in known)
    biases = {
        name for name, (site, *_) in known.items() if name.endswith(".bias") and (sees or not site.of_vision(spec))
    }
    chosen = {name for name in biases if lora.bias == "all" or name.removesuffix(".bias") in adapted}
    if not chosen:
        remedy = f"the layers of lora.target_modules have none, but {min(biases)} exists" if biases else "leave it out"
        raise UserError(f"lora.bias={lora.bias!r}: this {spec.family} has no bias to train; {remedy}")
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
