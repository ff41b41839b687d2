"""The labels of a classifier, determined before its model is declared and recorded in the config of its run."""

import dataclasses

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.data.formats.labels import read_label_names


def resolve_labels(config: Config) -> Config:
    """Return the config with model.num_labels and model.id2label set if its model is a classifier.

    The labels come from the config, else from the classifier that it starts from, else from the training data.

    Raises UserError as `read_label_names`.
    """
    model = config.model
    if model.head != "classification":
        return config
    names = _names(config)
    return dataclasses.replace(config, model=dataclasses.replace(model, num_labels=len(names), id2label=names))


def _names(config: Config) -> tuple[str, ...]:
    model = config.model
    if model.id2label:
        return model.id2label
    saved = hf.label_names(hf.read_described_config(model))
    if saved is not None and model.num_labels in (None, len(saved)):
        return saved
    # One label is regression; transformers calls it LABEL_0 by default.
    if model.num_labels == 1:
        return ("LABEL_0",)
    return read_label_names(config.data.datasets, model.num_labels, config.data.on_bad_row)
