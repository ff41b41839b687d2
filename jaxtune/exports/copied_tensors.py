"""Tensors of a base that are no part of the model that is trained: copied to an export of it, or lost and named."""

import logging
import re

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.models import families
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")


def copied_layers(model: Model, config: Config) -> list[str]:
    """The tensors of layers that predict more tokens which an export of the whole model copies from the base."""
    return [] if _why_lost(model) else _layers(model, config)


def name_lost(model: Model, config: Config) -> None:
    """Warn of the tensors of the base that an export of the whole model does not hold."""
    why, names = _why_lost(model), _layers(model, config)
    if why and names:
        kinds = dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in names)
        log.warning(
            "%d tensors of the base predict more than the next token, and no whole model of this run will hold them, "
            "because %s: %s",
            *(len(names), why, ", ".join(kinds)),
        )


def _layers(model: Model, config: Config) -> list[str]:
    if config.model.from_scratch:
        return []
    return [name for name in hf.open_weights(model.folder) if families.predicts_more_tokens(model.spec, name)]


def _why_lost(model: Model) -> str | None:
    """Why tensors of such layers cannot be copied as they are; None: they can."""
    if model.base.scheme is not None:
        return "they are quantized in its files and exported weights are not"
    if model.spec.vocabulary != model.base.saved_vocabulary:
        return "its vocabulary grows (data.special_tokens)"
    return "a classifier predicts no tokens" if model.spec.labels else None
