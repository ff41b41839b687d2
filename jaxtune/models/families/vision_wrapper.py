"""A text decoder inside a vision-language model: what such families share."""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.places import Tensor
from jaxtune.models.spec import ModelSpec


def names(decoder: Mapping[str, str | Tensor]) -> dict[str, str | Tensor]:
    """The decoder's table of names, which are inside `model.language_model` here; its head is not."""

    def inside(found: str | Tensor) -> str | Tensor:
        if isinstance(found, Tensor):
            return dataclasses.replace(found, name=inside(found.name))
        return f"model.language_model.{found.removeprefix('model.')}" if found.startswith("model.") else found

    return {parameter: inside(found) for parameter, found in decoder.items()}


def read_spec(
    family: str, config: dict[str, Any], decoders: Mapping[str, ModuleType], *, untouched: str, tied: bool
) -> ModelSpec:
    """ModelSpec of the decoder in `text_config`.

    decoders: the families that it may be of, by their `model_type`, the first if it says none. untouched: that of
    ModelSpec. tied: where config.json does not say it; what `text_config` says of it means nothing.
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
    spec = decoders[kind].read_spec(text | {"tie_word_embeddings": config.get("tie_word_embeddings", tied)})
    return dataclasses.replace(spec, family=family, untouched=untouched)
