"""LoRA adapters as the `peft` library stores them: adapter_model.safetensors and adapter_config.json."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtune.errors import UserError
from jaxtune.hf.model_folder import staging_folder
from jaxtune.hf.tensors.tensor_sources import DTYPES, TensorSource, current_name, open_sources
from jaxtune.hf.tensors.tensor_writing import OutputTensor, write
from jaxtune.json_file import read_json
from jaxtune.lora.options import LoraOptions
from jaxtune.parallel import multihost

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "score.weight"  # the head of a classifier, which is trained in full together with the adapters
_CLASSIFIER = ("classifier", "score")  # peft's modules_to_save of every classifier; a decoder's head is called score
_PREFIX = "base_model.model."
# Tensors of an adapter, by its kind, which is peft's peft_type in lower case.
_TENSORS = {"lora": r"lora_(?P<half>[AB])\.weight|lora_magnitude_vector", "ia3": "ia3_l"}
_ADAPTER_ENDING = re.compile(rf"\.({'|'.join(_TENSORS.values())})$")

# Fields of adapter_config.json that are read here, or that do not change what the adapter computes. Any other field
# must be empty or false, because it enables something that is not supported (trained tokens, biases of adapters, ...).
_UNDERSTOOD = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "init_lora_weights", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config",
    "modules_to_save", "target_parameters", "feedforward_modules", "init_ia3_weights", "use_dora", "rank_pattern",
    "alpha_pattern",
}  # fmt: skip
# Initialisations that leave the base model as it is; the others (PiSSA, OLoRA, ...) subtract the adapter from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter: LoRA, where W becomes W + scale * B @ A, or (IA)^3, which multiplies activations by factors.

    The scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA. (IA)^3 does not use rank, alpha, dropout and
    use_rslora.

    Attributes:
        rank: rank of every module that `ranks` does not name.
        alpha: numerator of the scale of every module that `alphas` does not name.
        dropout: dropout rate of the adapter's input during training.
        use_rslora: whether the scale is alpha / sqrt(rank).
        base_model: name or path of the model it was trained on; None: not recorded.
        revision: branch, tag or commit of the base model on the hub; None: its main branch, or a local folder.
        tensors: the adapter's tensors by name ("model.layers.0.self_attn.q_proj.lora_A.weight").
            LoRA: A (rank, in) and B (out, rank); for experts in one tensor, A (experts * rank, in) and
            B (out, rank * experts). DoRA adds magnitudes (out,). (IA)^3: factors (out, 1), or (1, in) if they scale the
            input. A classifier adds its head, score.weight (labels, in). Modules that were trained whole have their
            tensors under their own names.
        parameters: names or name endings of the tensors that hold experts, in the model's own module.
        bias: which biases of the model are among the tensors, under their own names: none, all, or lora_only (the
            biases of modules that have an adapter).
        kind: lora or ia3.
        use_dora: whether the adapter has DoRA magnitudes.
        ranks: ranks that differ from `rank`, by module name.
        alphas: alphas that differ from `alpha`, by module name.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    base_model: str | None
    revision: str | None
    tensors: Mapping[str, TensorSource]
    parameters: tuple[str, ...] = ()
    bias: str = "none"
    kind: str = "lora"
    use_dora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `LoraOptions` that a run with this adapter must have.

        `chosen` has the options that select modules, which can be written in several equivalent ways.
        """
        if self.kind != "lora":
            return {"kind": self.kind, "bias": self.bias}
        return {name: getattr(self, name) for name in ("kind", "rank", "alpha", "use_rslora", "bias", "use_dora")}

    @property
    def module_options(self) -> dict[str, Any]:
        """The `LoraOptions` that select the adapter's modules, and the modules with another rank or alpha."""
        whole = {name.removesuffix(".weight") for name in self.tensors if _is_of_model(name) and name != HEAD}

        def pattern(numbers: Mapping[str, float]) -> tuple[str, ...]:
            return tuple(rf"^{re.escape(name)}$={number!r}" for name, number in numbers.items())

        return {
            "target_modules": self.targets,
            "modules_to_save": tuple(sorted(name for name in whole if not name.endswith(".bias"))),
            "rank_pattern": pattern(self.ranks),
            "alpha_pattern": pattern(self.alphas),
        }

    def of_module(self, name: str) -> tuple[int, float]:
        """Return rank and alpha of a module's adapter."""
        return self.ranks.get(name, self.rank), self.alphas.get(name, self.alpha)

    @property
    def modules(self) -> frozenset[str]:
        """Hugging Face names of the modules with an adapter; for experts in one tensor, the name of peft's wrapper."""
        return adapted_modules(self.tensors)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names or name endings of the modules and the expert tensors that have an adapter."""
        if self.kind != "lora" or not self.parameters:
            return tuple(sorted(self.modules))
        ranks = {module: self.tensors[f"{module}.lora_A.weight"].shape[0] for module in self.modules}
        modules = {module for module, rank in ranks.items() if rank == self.of_module(module)[0]}
        experts = {name for name in self.parameters if not name.endswith(".weight")}  # others are weights of modules
        return tuple(sorted(modules if modules == self.modules else modules | experts))

    @property
    def labels(self) -> int:
        """Number of labels of a classifier; 0: the adapter of a language model."""
        return self.tensors[HEAD].shape[0] if HEAD in self.tensors else 0


def _is_of_model(name: str) -> bool:
    """Whether a tensor belongs to the model itself, trained together with the adapters."""
    return _ADAPTER_ENDING.search(name) is None


def adapted_modules(names: Iterable[str]) -> frozenset[str]:
    """Return the modules to whose adapters these tensors belong; the model's own tensors are ignored."""
    return frozenset(_ADAPTER_ENDING.sub("", name) for name in names if not _is_of_model(name))


def write_adapter(
    folder: Path,
    tensors: Iterable[OutputTensor],
    lora: LoraOptions,
    base_model: str | None,
    revision: str | None,
    target_modules: Sequence[str],
    target_parameters: Sequence[str] = (),
    ranks: Mapping[str, int] = {},
    alphas: Mapping[str, float] = {},
) -> None:
    """Write an adapter that `peft` can load. Every process of a run calls this, on one shared folder.

    Args:
        folder: created if it does not exist.
        tensors: named as in SavedAdapter.tensors.
        lora: supplies kind, rank, alpha, dropout, use_rslora, use_dora and bias.
        base_model, revision: the model it was trained on.
        target_modules: names or name endings of modules; peft puts adapters into all modules that match.
        target_parameters: names or name endings of the tensors that hold experts; peft supports no dropout there.
        ranks, alphas: ranks and alphas that differ from those in `lora`, by module name.

    Raises:
        UserError: the folder cannot be written to; all processes raise it.
    """
    tensors = list(tensors)
    adapted = adapted_modules(tensor.name for tensor in tensors)
    classifier = any(tensor.name == HEAD for tensor in tensors)
    # Factors that scale the input of a module are (1, in); peft lists such modules as feedforward_modules.
    of_input = tuple(tensor.name.removesuffix(".ia3_l") for tensor in tensors if tensor.shape[0] == 1)
    whole = [tensor.name.removesuffix(".weight") for tensor in tensors if _is_of_model(tensor.name)]
    whole = sorted(name for name in whole if not name.endswith(".bias"))
    tensors = [tensor._replace(name=_PREFIX + _peft_name(tensor.name, adapted)) for tensor in tensors]
    wrapped = (target.rpartition(".")[0] for target in target_parameters)
    ends = tuple(f".{target}" for target in (*target_modules, *wrapped))
    # peft wraps a module once for each of its target parameters; an inner wrapper is called base_layer.
    strays = [name for name in adapted if not f".{name}".removesuffix(".base_layer").endswith(ends)]
    if strays:
        raise ValueError(f"{list(target_modules)} and {list(target_parameters)} do not match {strays}")
    config = {
        "task_type": "SEQ_CLS" if classifier else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "target_modules": sorted(target_modules),
        "inference_mode": True,
        "modules_to_save": whole or None,
        **dict.fromkeys(("exclude_modules", "auto_mapping")),
        "fan_in_fan_out": False,
    }
    if lora.kind == "ia3":
        inner = [end for end in target_modules if any(f".{name}".endswith(f".{end}") for name in of_input)]
        config |= {"peft_type": "IA3", "feedforward_modules": sorted(inner), "init_ia3_weights": True}
    else:
        config |= {
            "peft_type": "LORA",
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "use_rslora": lora.use_rslora,
            "target_parameters": sorted(target_parameters) or None,
            "bias": lora.bias,
            "init_lora_weights": True,
            "layers_to_transform": None,
            "use_dora": lora.use_dora,
            # peft reads their keys as regular expressions.
            "rank_pattern": {re.escape(name): number for name, number in ranks.items()},
            "alpha_pattern": {re.escape(name): number for name, number in alphas.items()},
        }
    write(folder, tensors, max_shard_bytes=None, stem="adapter_model")
    with multihost.write_together(folder):
        if multihost.is_main():
            with staging_folder(folder, replaces=re.compile(CONFIG)) as stage:
                (stage / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _peft_name(name: str, adapted: Collection[str]) -> str:
    """peft's name for a tensor: peft wraps a module with an adapter, so its bias belongs to the base_layer inside."""
    module = name.removesuffix(".bias")
    return f"{module}.base_layer.bias" if name.endswith(".bias") and module in adapted else name


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter's config and the headers of its tensors; the tensors themselves are read later.

    Raises:
        UserError: a file is missing or damaged; the adapter is of another kind, or uses a feature that is not
            supported; a tensor has an unknown name, has no partner, or has the wrong shape.
    """
    config = read_json(folder / CONFIG)
    _check_config(folder / CONFIG, config)
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; an adapter in another format must be saved as safetensors")
    tensors, ranks, alphas = _read_tensors(file, config)
    _check_pairs(file, config, tensors)
    return SavedAdapter(
        rank=_default_rank(config),
        alpha=float(config.get("lora_alpha", LoraOptions.alpha)),
        dropout=float(config.get("lora_dropout") or 0.0),
        use_rslora=config.get("use_rslora") or False,
        base_model=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        tensors=tensors,
        parameters=tuple(config.get("target_parameters") or ()),
        bias=config.get("bias") or "none",
        kind=config["peft_type"].lower(),
        use_dora=config.get("use_dora") or False,
        ranks=ranks,
        alphas=alphas,
    )


def _default_rank(config: Mapping[str, Any]) -> int:
    return config["r"] if config["peft_type"] == "LORA" else LoraOptions.rank


def _read_tensors(
    file: Path, config: Mapping[str, Any]
) -> tuple[dict[str, TensorSource], dict[str, int], dict[str, float]]:
    """Return the tensors by name, and the ranks and alphas of modules that differ from the adapter's own."""
    kind, default = config["peft_type"].lower(), _default_rank(config)
    stacked = bool(config.get("target_parameters"))
    tensors, ranks, alphas = {}, {}, {}
    for key, source in open_sources([file]).items():
        # Modules that were trained whole, and trained biases, keep the model's own names.
        name = key.removeprefix(_PREFIX).rpartition(".")[0]
        if any(name.endswith(module) for module in config.get("modules_to_save") or ()) and key.startswith(_PREFIX):
            tensors[current_name(key.removeprefix(_PREFIX))] = source
            continue
        if key.endswith(".bias") and key.startswith(_PREFIX) and config.get("bias") in ("all", "lora_only"):
            tensors[current_name(key.removeprefix(_PREFIX).replace(".base_layer.bias", ".bias"))] = source
            continue
        match = re.fullmatch(rf"base_model\.model\.(?P<module>.+)\.({_TENSORS[kind]})", key)
        if match is None:
            end = "lora_A|B.weight" if kind == "lora" else _TENSORS[kind]
            raise UserError(f"{file}: {key} is not understood; tensors are named base_model.model.<module>.{end}")
        if (half := match.groupdict().get("half")) is None:  # a vector; its shape is checked when it is read
            tensors[current_name(key.removeprefix(_PREFIX))] = source
            continue
        module = current_name(match["module"])
        rank = _match_pattern(match["module"], config.get("rank_pattern"), default)
        alpha = _match_pattern(match["module"], config.get("alpha_pattern"), None)
        ranks |= {module: rank} if rank != default else {}
        alphas |= {module: float(alpha)} if alpha is not None else {}
        shape, axis = source.shape, "AB".index(half)
        # With target_parameters, the experts of a tensor are stacked along the rank.
        fits = len(shape) == 2 and (shape[axis] == rank or (stacked and shape[axis] and shape[axis] % rank == 0))
        if not fits or source.dtype not in DTYPES:
            raise UserError(
                f"{file}: {key} is {source.dtype} {shape}; it must be {'(out, r)' if axis else '(r, in)'} "
                f"with r = {rank}{', or r times the experts' if stacked else ''}, of {', '.join(DTYPES)}"
            )
        tensors[current_name(key.removeprefix(_PREFIX))] = source
    return tensors, ranks, alphas


def _check_pairs(file: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> None:
    """Raise UserError if a tensor lacks its partner, or if config names one that is missing."""
    pairs = adapted_modules(tensors) if config["peft_type"] == "LORA" else frozenset()
    lone = [module for module in pairs if not {f"{module}.lora_{half}.weight" for half in "AB"} <= tensors.keys()]
    # peft lists both names of _CLASSIFIER for every classifier, so these may lack a tensor.
    bare = [
        name
        for name in config.get("modules_to_save") or ()
        if not any(one.rpartition(".")[0].endswith(name) for one in tensors if _is_of_model(one))
        and name not in _CLASSIFIER
    ]
    if bare:
        raise UserError(f"{file}: there is no tensor of {bare[0]}, which modules_to_save in {CONFIG} names")
    with_magnitude = {name.rpartition(".")[0] for name in tensors if name.endswith(".lora_magnitude_vector")}
    if with_magnitude != (pairs if config.get("use_dora") else set()):
        one = min(with_magnitude ^ pairs) if config.get("use_dora") else min(with_magnitude)
        raise UserError(
            f"{file}: {one} has {'a' if one in with_magnitude else 'no'} lora_magnitude_vector, but use_dora "
            f"in {CONFIG} is {bool(config.get('use_dora'))}"
        )
    if lone or not adapted_modules(tensors):
        raise UserError(f"{file}: " + (f"lora_A or lora_B is missing for {lone[0]}" if lone else "it holds no tensors"))
    for module in pairs:
        of_a, of_b = (tensors[f"{module}.lora_{half}.weight"].shape[axis] for axis, half in enumerate("AB"))
        if of_a != of_b:
            raise UserError(f"{file}: the rank of {module} is {of_a} in lora_A and {of_b} in lora_B")


def _match_pattern(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """The value of the first pattern that matches the name or its ending, as in peft's `get_pattern_key`.

    The name is a module's, or its weight's if the module is a target parameter.
    """
    names = (module, f"{module}.weight")
    matches = (
        value
        for pattern, value in (patterns or {}).items()
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
    )
    return next(matches, default)


def _check_config(path: Path, config: dict[str, Any]) -> None:
    def number(key: str) -> bool:
        value = config.get(key)
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    parameters, vectors = config.get("target_parameters") or [], config.get("peft_type") != "LORA"
    types = tuple(kind.upper() for kind in _TENSORS)
    wrong = {
        "peft_type": (config.get("peft_type") in types, " or ".join(map(repr, types))),
        "r": (vectors or (isinstance(config.get("r"), int) and number("r") and config["r"] > 0), "a rank, 1 or more"),
        "lora_alpha": (vectors or number("lora_alpha"), "a number"),
        "lora_dropout": (config.get("lora_dropout") is None or number("lora_dropout"), "a number"),
        "use_rslora": (config.get("use_rslora") in (True, False, None), "true or false"),
        "base_model_name_or_path": (isinstance(config.get("base_model_name_or_path"), str | None), "a name"),
        "revision": (isinstance(config.get("revision"), str | None), "a name"),
        "bias": (config.get("bias") in ("none", "all", "lora_only", None), "'none', 'all' or 'lora_only'"),
        "modules_to_save": (_are_names(config.get("modules_to_save") or []), "names of modules"),
        "use_dora": (config.get("use_dora") in (True, False, None), "true or false"),
        "rank_pattern": (_is_pattern(config.get("rank_pattern"), 1, parameters), "ranks by name of module"),
        "alpha_pattern": (_is_pattern(config.get("alpha_pattern"), 0, parameters), "numbers by name of module"),
        "target_parameters": (_are_names(parameters), "names of parameters"),
        "init_lora_weights": (config.get("init_lora_weights") in _PLAIN_STARTS, "true (convert it with peft)"),
    }
    for key, (right, must) in wrong.items():
        if not right:
            raise UserError(f"{path}: {key} is {config.get(key)!r}; it must be {must}")
    for key, value in config.items():
        if key not in _UNDERSTOOD and value:
            raise UserError(f"{path}: {key} is {value!r}, which is not supported; it must be empty or false")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_pattern(value: Any, least: int, parameters: Any) -> bool:
    """Whether a value maps patterns to numbers of at least `least` (integers if `least` is 1).

    Patterns are not supported for experts. With target parameters, a pattern must therefore be the name of a module, or
    of the weight of one, and not that of experts.
    """
    if not value:
        return True
    if not isinstance(value, dict):
        return False
    kinds = (int,) if least else (int, float)
    experts = [name for name in parameters if not str(name).endswith(".weight")] if _are_names(parameters) else []
    try:
        numbers = all(re.compile(name) and type(number) in kinds and number >= least for name, number in value.items())
    except re.error:
        return False
    return numbers and not (parameters and any(_may_match(pattern, experts) for pattern in value))


def _may_match(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern is more than an escaped name, or could match one of the names or name endings."""
    name = re.sub(r"\\(.)", r"\1", pattern)
    one_ends_so = any(f".{one}".endswith(f".{name}") or f".{name}".endswith(f".{one}") for one in names)
    return re.escape(name) != pattern or one_ends_so
