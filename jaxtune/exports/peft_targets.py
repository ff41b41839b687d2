"""The modules and parameters that peft adapts, and the ranks that differ between them."""

import logging
from collections.abc import Collection, Mapping

from jaxtune.lora.lora import LoRA
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.parameters import Parameter
from jaxtune.models.sites import loaded_names
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")

# Families whose experts, separate in the files, peft 0.21 does not convert; with it, `families.refuses_lora`.
_UNCONVERTED = ("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text")


def peft_targets(model: Model, lora: LoraOptions) -> tuple[list[str], list[str]]:
    """Return peft's target_modules and target_parameters, which match exactly the adapted modules and parameters.

    A target parameter is one tensor with all experts of a layer. transformers 5 stacks experts that are separate in the
    files into such a tensor, and peft then takes every target module with an expert's name for an expert, even if no
    expert has an adapter. Other modules with such a name are therefore listed as target parameters, by their weights.
    """
    loaded, short = loaded_names(model.base.spec), model.spec.untouched is None
    linears = {loaded[place.name]: p for p in model.parameters.values() if p.kind == "linear" for place in p.places}
    modules = {name.removesuffix(".weight"): p for name, p in linears.items() if name.endswith(".weight")}
    stacked = {name: p for name, p in linears.items() if not name.endswith(".weight")}
    experts = {name: p for name, p in modules.items() if is_of_experts(p)}
    converts = lora.kind == "lora" and model.spec.family not in _UNCONVERTED
    endings = {_ending(name) for name in experts if converts and not families.refuses_lora(model.spec, name)}
    if converts and model.spec.stacked_experts:  # peft goes by the family, not by the files
        endings = {"gate_proj", "up_proj", "down_proj"}
    alike = {name for name in modules.keys() - experts.keys() if _ending(name) in endings}
    adapted, adapted_alike = _adapted_names(experts), _adapted_names({name: modules[name] for name in alike})
    if adapted and model.spec.family in _UNCONVERTED:
        log.warning(
            "peft cannot load this adapter: it does not convert experts of %s, such as %s; export with --merge",
            *(model.spec.family, min(adapted)),
        )
    if bare := set(map(_module, experts.keys() - adapted)) & set(map(_module, adapted)):
        log.warning("peft cannot load this adapter: gate, up and down of an expert (%s) must all have one", min(bare))
    if adapted_alike and lora.use_dora:
        log.warning("peft cannot load this adapter: %s has DoRA and the name of an expert's layer", min(adapted_alike))
    named = {name: p for name, p in modules.items() if name not in alike}
    return _names(named, short, 1), [*_names(stacked, short, 2), *sorted(f"{name}.weight" for name in adapted_alike)]


def _adapted_names(linears: Mapping[str, Parameter]) -> set[str]:
    return {name for name, parameter in linears.items() if parameter.treatment.adapter}


def _names(linears: Mapping[str, Parameter], short: bool, parts: int) -> list[str]:
    """Return the last `parts` of the adapted names (q_proj) if all linears that end so are adapted, else whole names.

    Without `short`, always return whole names: inside a larger model, other parts may have a q_proj of their own.
    """
    adapted = _adapted_names(linears)
    endings = {_ending(name, parts) for name in adapted}
    whole_kinds = {name for name in linears if _ending(name, parts) in endings} == adapted
    return sorted(endings if whole_kinds and short else adapted)


def _ending(name: str, parts: int = 1) -> str:
    return ".".join(name.split(".")[-parts:])


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def is_of_experts(parameter: Parameter) -> bool:
    """Whether a parameter has an axis of experts."""
    return len(parameter.lead) > 1


def peft_patterns(model: Model, lora: LoraOptions, wrapped: Collection[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Return peft's rank_pattern and alpha_pattern: the modules whose rank or alpha differs from `lora`.

    A module that is a target parameter (`wrapped`) has its weight's name.
    """
    frozen = [p for p in model.frozen.values() if p.kind == "linear" and not is_of_experts(p)]
    linears = [p for p in frozen if isinstance(p.treatment.adapter, LoRA)]
    loaded = loaded_names(model.base.spec)
    names = {loaded[place.name]: p.treatment.adapter.exported_rank_alpha for p in linears for place in p.places}
    exported = {name if name in wrapped else name.removesuffix(".weight"): own for name, own in names.items()}
    ranks = {name: rank for name, (rank, _) in exported.items() if rank != lora.rank}
    return ranks, {name: alpha for name, (_, alpha) in exported.items() if alpha != lora.alpha}
