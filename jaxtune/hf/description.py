"""The config.json of a model as a recipe has it: of a folder of its own, with other entries, with rope stretched."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxtune.config.schema import Model
from jaxtune.errors import UserError
from jaxtune.hf.model_folder import read_config, resolve
from jaxtune.models.families.llama import ROPE_ENTRIES

# What `model` says of one model, which no other one that is read beside it has.
OF_ONE_MODEL: dict[str, Any] = {
    "config": None,
    "tokenizer": None,
    "overrides": (),
    "max_positions": None,
    "rope_scaling": None,
}
# Entries of config.json that follow from an option or from the weights.
_TAKEN = {
    "dtype": "model.dtype says it",
    "torch_dtype": "model.dtype says it",
    "quantization_config": "the files are quantized as they are, and quant.format says it of others",
    "id2label": "model.id2label says it",
    "label2id": "model.id2label says it",
    "num_labels": "model.num_labels says it",
}
_NAMED = ("linear", "dynamic", "yarn")  # scalings of a rope that need nothing but a factor
_OF_ALL_KINDS = ("rope_theta", "partial_rotary_factor")  # entries of a rope that do not stretch it
_ENTRIES = ROPE_ENTRIES - {"type"}


class Folders(NamedTuple):
    """Where the parts of a model are."""

    weights: Path  # from scratch there may be none
    config: Path
    tokenizer: Path  # and generation_config.json


def folders(model: Model, weights: bool = True) -> Folders:
    """The folders of a model, downloaded from the hub; without `weights` these are not. Raises UserError."""
    if model.config is None:
        home = config = resolve(model.path or "", model.revision, weights=weights and not model.from_scratch)
    else:
        config = resolve(model.config, weights=False)
        home = config if model.from_scratch else resolve(model.path or "", model.revision, weights=weights, holds=None)
    own = model.tokenizer
    return Folders(home, config, config if own is None else resolve(own, weights=False, holds=None))


def describe(model: Model) -> dict[str, Any]:
    """config.json with what the options change in it; no weights are downloaded. Raises UserError as `changed`."""
    return changed(read_config(folders(model, weights=False).config), model)


def changed(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """A config.json with model.overrides, and with rope stretched by model.max_positions and model.rope_scaling.

    Raises UserError for an entry that an option says, and where rope cannot be stretched so.
    """
    found = dict(config)
    for names, value in overrides(model):
        if taken := [name for name in names if name in _TAKEN]:
            raise UserError(f"model.overrides: {'.'.join(names)}: {_TAKEN[taken[0]]}")
        found = _with(found, _as_it_is_called(found, names), value)
    scaling = _scaling(model.rope_scaling)
    if not scaling and model.max_positions is None:
        return found
    if isinstance(text := found.get("text_config"), dict):
        return found | {"text_config": _stretched(text, model.max_positions, scaling)}
    return _stretched(found, model.max_positions, scaling)


def overrides(model: Model) -> list[tuple[list[str], Any]]:
    """The names that lead to each entry of model.overrides, and its value."""
    parts = [entry.partition("=") for entry in model.overrides]
    return [(key.strip().split("."), json.loads(text)) for key, _, text in parts]


def _with(config: dict[str, Any], names: list[str], value: Any) -> dict[str, Any]:
    first, *rest = names
    if not rest:
        return config | {first: value}
    inner = config.get(first)
    if not isinstance(inner, dict | None):
        raise UserError(f"model.overrides: {'.'.join(names)}: {first} is {inner!r} in config.json, not an object")
    return config | {first: _with(inner or {}, rest, value)}


def _as_it_is_called(config: Mapping[str, Any], names: list[str]) -> list[str]:
    """The names of an entry of a rope in a config.json of transformers 5, which has all of them in one object."""
    rope = config.get("rope_parameters") or {}
    if names == ["rope_theta"] and isinstance(rope, dict) and "rope_theta" in rope:
        return ["rope_parameters", "rope_theta"]
    if names[0] == "rope_scaling" and rope:
        reason = "config.json has rope_parameters in its place"
        raise UserError(f"model.overrides: {'.'.join(names)}: {reason}; set that, or model.rope_scaling")
    return names


def _scaling(text: str | None) -> dict[str, Any]:
    """model.rope_scaling as entries of a rope. Raises UserError."""
    if text is None:
        return {}
    try:
        found = {"rope_type": text} if text in _NAMED else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise UserError(f"model.rope_scaling={text!r}: neither of {', '.join(_NAMED)}, nor an object in JSON")
    old = {"rope_type": found["type"]} if "type" in found else {}
    found = old | {name: value for name, value in found.items() if name != "type"}
    if unknown := sorted(found.keys() - _ENTRIES):
        near = difflib.get_close_matches(unknown[0], sorted(_ENTRIES), n=1, cutoff=0)[0]
        raise UserError(f"model.rope_scaling={text!r}: a rope has no {unknown[0]}; nearest: {near}")
    return found


def _stretched(config: dict[str, Any], positions: int | None, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """With a rope that is stretched; of ropes by kinds of layers, that of full attention."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    ropes = config.get(key) or {}
    if not isinstance(ropes, dict) or not isinstance(ropes.get("full_attention", ropes), dict):
        raise UserError(f"config.json: {key} is {ropes!r:.60}; it must be an object")
    rope, by_kind = ropes.get("full_attention", ropes), "full_attention" in ropes
    now = rope.get("rope_type", rope.get("type", "default"))
    kind = scaling.get("rope_type") or (None if now == "default" else now)
    told = f"model.max_positions={positions}, model.rope_scaling={dict(scaling) or None}"
    if kind is None:
        raise UserError(f"{told}: say how rope is stretched with model.rope_scaling")
    # What config.json calls max_position_embeddings is the length before a dynamic scaling, and after any other.
    unstretched = config.get("max_position_embeddings") if now in ("default", "dynamic") else None
    before = scaling.get("original_max_position_embeddings") or unstretched
    before = before or rope.get("original_max_position_embeddings")
    if before is None:
        raise UserError(
            f"{told}: config.json does not say from how many positions its rope, which is {now!r}, is stretched; say "
            "it with original_max_position_embeddings, in JSON"
        )
    factor = scaling.get("factor") or (positions and positions / before)
    if not isinstance(before, int) or not isinstance(factor, int | float | None):
        raise UserError(f"{told}: a factor and original_max_position_embeddings are numbers")
    if factor is None:
        raise UserError(f"{told}: say how far, with model.max_positions or a factor")
    if factor <= 1 or (positions or 0) > before * factor:
        raise UserError(f"{told}: rope reaches {before} positions as it is, and {int(before * factor)} with that")
    kept = rope if kind == now else {name: rope[name] for name in _OF_ALL_KINDS if name in rope}
    kept = {name: value for name, value in kept.items() if name != "type"}
    before_and_after = {"rope_type": kind, "factor": float(factor), "original_max_position_embeddings": before}
    new = {**kept, **scaling, **before_and_after}
    after = {key: ropes | {"full_attention": new} if by_kind else new}
    reach = before if kind == "dynamic" else positions or int(before * factor)
    return {**config, **after, "max_position_embeddings": reach}
