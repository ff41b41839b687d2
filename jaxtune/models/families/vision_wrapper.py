"""A text decoder inside a vision-language model: functions that such families share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.places import Tensor
from jaxtune.models.structure.model_spec import ModelSpec

ReadSpec = Callable[[dict[str, Any]], ModelSpec]


def names(decoder: Mapping[str, str | Tensor]) -> dict[str, str | Tensor]:
    """Return the decoder's table of names, moved inside `model.language_model`; only the head stays outside."""

    def inside(entry: str | Tensor) -> str | Tensor:
        if isinstance(entry, Tensor):
            return dataclasses.replace(entry, name=inside(entry.name))
        return f"model.language_model.{entry.removeprefix('model.')}" if entry.startswith("model.") else entry

    return {parameter: inside(entry) for parameter, entry in decoder.items()}


def read_spec(
    family: str, config: dict[str, Any], decoders: Mapping[str, ReadSpec], *, untouched: str, tied: bool
) -> ModelSpec:
    """Return the ModelSpec of the decoder in `text_config`.

    decoders: `read_spec` of possible decoders by `model_type`; without a `model_type` it is the first. untouched: as in
    ModelSpec. tied: the default of tie_word_embeddings in config.json; the entry in `text_config` is ignored.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config={text!r}; a {family} model has the config of its decoder there")
    kind = text.get("model_type", next(iter(decoders)))
    if kind not in decoders:
        raise UserError(
            f"config.json: text_config: model_type={kind!r} is not supported inside {family}; "
            f"supported: {', '.join(decoders)}"
        )
    spec = decoders[kind](text | {"tie_word_embeddings": config.get("tie_word_embeddings", tied)})
    return dataclasses.replace(spec, family=family, untouched=untouched)
