"""Tensors of layers that predict more than the next token, which this run does not train.

An export copies them from the base, or warns that it lacks them.
"""

import logging
import re

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.models import families
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")


def copied_layers(model: Model, config: Config) -> list[str]:
    """Return the multi-token-prediction tensors that an export of the whole model copies from the base."""
    return [] if _why_lost(model) else _layers(model, config)


def warn_lost_layers(model: Model, config: Config) -> None:
    """Warn about the base's tensors that an export of the whole model lacks."""
    why, names = _why_lost(model), _layers(model, config)
    if why and names:
        # Replace layer numbers by *, so that the warning names each kind of tensor once.
        kinds = dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in names)
        log.warning(
            "an export of the whole model will lack %d tensors of the base that predict more than the next token, "
            "because %s: %s",
            *(len(names), why, ", ".join(kinds)),
        )


def _layers(model: Model, config: Config) -> list[str]:
    if config.model.from_scratch:
        return []
    return [name for name in hf.open_weights(model.folder) if families.predicts_more_tokens(model.spec, name)]


def _why_lost(model: Model) -> str | None:
    """Return why these tensors cannot be copied unchanged; None if they can."""
    if model.base.scheme is not None:
        return "they are quantized in the base's files and exported weights are not"
    if model.spec.vocabulary != model.base.saved_vocabulary:
        return "the vocabulary grows (data.special_tokens)"
    return "a classifier predicts no tokens" if model.spec.labels else None
