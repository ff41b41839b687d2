"""The config.json of a model after the recipe's changes: another config folder, overridden entries, scaled RoPE."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtune.config.schema import ModelOptions
from jaxtune.errors import UserError
from jaxtune.hf.model_folder import read_config, resolve
from jaxtune.models.families.llama import ROPE_ENTRIES

# Options of `model` that describe one model only, with their defaults. Other models that a run reads (a teacher, a
# reference) take the defaults.
SINGLE_MODEL_DEFAULTS: dict[str, Any] = {
    "config": None,
    "tokenizer": None,
    "overrides": (),
    "max_positions": None,
    "rope_scaling": None,
}
# Entries of config.json that follow from an option or from the weights.
_SET_ELSEWHERE = {
    "dtype": "set model.dtype instead",
    "torch_dtype": "set model.dtype instead",
    "quantization_config": "the files are quantized as they are; to quantize other files, set quant.format",
    "id2label": "set model.id2label instead",
    "label2id": "set model.id2label instead",
    "num_labels": "set model.num_labels instead",
}
_FACTOR_ONLY = ("linear", "dynamic", "yarn")  # RoPE scalings that need only a factor
_UNSCALED_ENTRIES = ("rope_theta", "partial_rotary_factor")  # entries of a RoPE that do not scale it
_ENTRIES = ROPE_ENTRIES - {"type"}


class Folders(NamedTuple):
    """The folders that hold the parts of a model.

    Attributes:
        weights: safetensors files; may lack them if the model is trained from scratch.
        config: config.json.
        tokenizer: tokenizer files and generation_config.json.
    """

    weights: Path
    config: Path
    tokenizer: Path


def find_folders(model: ModelOptions, weights: bool = True) -> Folders:
    """Return the folders of a model, downloaded from the hub if necessary. Raises UserError.

    `weights`: whether to download the weights too.
    """
    if model.config is None:
        home = config = resolve(model.path or "", model.revision, weights=weights and not model.from_scratch)
    else:
        config = resolve(model.config, weights=False)
        home = config if model.from_scratch else resolve(model.path or "", model.revision, weights=weights, holds=None)
    tokenizer = model.tokenizer
    return Folders(home, config, config if tokenizer is None else resolve(tokenizer, weights=False, holds=None))


def read_described_config(model: ModelOptions) -> dict[str, Any]:
    """Return config.json with the options applied, without its weights. Raises UserError like `apply_options`."""
    return apply_options(read_config(find_folders(model, weights=False).config), model)


def apply_options(config: Mapping[str, Any], model: ModelOptions) -> dict[str, Any]:
    """Apply model.overrides to a config.json, and scale its RoPE by model.max_positions and model.rope_scaling.

    Raises UserError for an entry that another option sets, and for a RoPE that cannot be scaled in this way.
    """
    result = dict(config)
    for names, value in parse_overrides(model):
        if refused := [name for name in names if name in _SET_ELSEWHERE]:
            raise UserError(f"model.overrides: {'.'.join(names)}: {_SET_ELSEWHERE[refused[0]]}")
        result = _set_entry(result, _names_in_config(result, names), value)
    scaling = _parse_scaling(model.rope_scaling)
    if not scaling and model.max_positions is None:
        return result
    if isinstance(text := result.get("text_config"), dict):
        return result | {"text_config": _scale_rope(text, model.max_positions, scaling)}
    return _scale_rope(result, model.max_positions, scaling)


def parse_overrides(model: ModelOptions) -> list[tuple[list[str], Any]]:
    """Return the entries of model.overrides: the names on the path to each, and its value."""
    parts = [entry.partition("=") for entry in model.overrides]
    return [(key.strip().split("."), json.loads(text)) for key, _, text in parts]


def _set_entry(config: dict[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    first, *rest = names
    if not rest:
        return config | {first: value}
    inner = config.get(first)
    if not isinstance(inner, dict | None):
        raise UserError(f"model.overrides: {'.'.join(names)}: {first} is {inner!r} in config.json, not an object")
    return config | {first: _set_entry(inner or {}, rest, value)}


def _names_in_config(config: Mapping[str, Any], names: list[str]) -> list[str]:
    """The path of an entry in this config.json: transformers 5 puts all RoPE entries into `rope_parameters`."""
    rope = config.get("rope_parameters") or {}
    if names == ["rope_theta"] and isinstance(rope, dict) and "rope_theta" in rope:
        return ["rope_parameters", "rope_theta"]
    if names[0] == "rope_scaling" and rope:
        reason = "config.json has rope_parameters in its place"
        raise UserError(f"model.overrides: {'.'.join(names)}: {reason}; set that, or model.rope_scaling")
    return names


def _parse_scaling(text: str | None) -> dict[str, Any]:
    """Return model.rope_scaling as entries of a RoPE. Raises UserError."""
    if text is None:
        return {}
    try:
        entries = {"rope_type": text} if text in _FACTOR_ONLY else json.loads(text)
    except ValueError:
        entries = None
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"model.rope_scaling={text!r}: neither of {', '.join(_FACTOR_ONLY)}, nor an object in JSON")
    old = {"rope_type": entries["type"]} if "type" in entries else {}  # older files call it type
    entries = old | {name: value for name, value in entries.items() if name != "type"}
    if unknown := sorted(entries.keys() - _ENTRIES):
        near = difflib.get_close_matches(unknown[0], sorted(_ENTRIES), n=1, cutoff=0)[0]
        raise UserError(f"model.rope_scaling={text!r}: a rope has no {unknown[0]}; nearest: {near}")
    return entries


def _scale_rope(config: dict[str, Any], positions: int | None, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its RoPE scaled; if kinds of layers have their own RoPE, only that for full attention."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    ropes = config.get(key) or {}
    if not isinstance(ropes, dict) or not isinstance(ropes.get("full_attention", ropes), dict):
        raise UserError(f"config.json: {key} is {ropes!r:.60}; it must be an object")
    rope, by_kind = ropes.get("full_attention", ropes), "full_attention" in ropes
    now = rope.get("rope_type", rope.get("type", "default"))
    kind = scaling.get("rope_type") or (None if now == "default" else now)
    options = f"model.max_positions={positions}, model.rope_scaling={dict(scaling) or None}"
    if kind is None:
        raise UserError(f"{options}: choose how to scale RoPE with model.rope_scaling")
    # In config.json, max_position_embeddings is the length before dynamic scaling, and after any other scaling.
    unstretched = config.get("max_position_embeddings") if now in ("default", "dynamic") else None
    before = scaling.get("original_max_position_embeddings") or unstretched
    before = before or rope.get("original_max_position_embeddings")
    if before is None:
        raise UserError(
            f"{options}: config.json does not record the length before its {now!r} RoPE scaling; add "
            "original_max_position_embeddings to model.rope_scaling, in JSON"
        )
    factor = scaling.get("factor") or (positions and positions / before)
    if not isinstance(before, int) or not isinstance(factor, int | float | None):
        raise UserError(f"{options}: factor and original_max_position_embeddings must be numbers")
    if factor is None:
        raise UserError(f"{options}: set the length with model.max_positions, or a factor")
    if factor <= 1 or (positions or 0) > before * factor:
        raise UserError(f"{options}: RoPE reaches {before} positions unscaled, and {int(before * factor)} with this")
    kept = rope if kind == now else {name: rope[name] for name in _UNSCALED_ENTRIES if name in rope}
    kept = {name: value for name, value in kept.items() if name != "type"}
    before_and_after = {"rope_type": kind, "factor": float(factor), "original_max_position_embeddings": before}
    new = {**kept, **scaling, **before_and_after}
    after = {key: ropes | {"full_attention": new} if by_kind else new}
    reach = before if kind == "dynamic" else positions or int(before * factor)
    return {**config, **after, "max_position_embeddings": reach}
