"""The labels of a classifier or a decision model, determined before its model is declared, in the config of its run."""

import dataclasses

from jaxtune import hf
from jaxtune.columns import HEAD_ROWS
from jaxtune.config.schema import Config
from jaxtune.data.formats.labels import read_label_names
from jaxtune.data.formats.questions import HEAD_LABELS, OPTION_LABELS
from jaxtune.errors import UserError


def resolve_labels(config: Config) -> Config:
    """Return the config with model.num_labels and model.id2label set if its model has a head of labels.

    The labels come from the config, else from the classifier that it starts from, else from the training data. Those of
    a decision model are fixed; with the head of a language model, decision.label_tokens is set to their tokens.

    Raises UserError as `read_label_names`, or if the tokenizer lacks the label of an option.
    """
    model = config.model
    if config.decision.loss is not None:
        names = tuple(f"{kind} {label}" for kind, labels in OPTION_LABELS.items() for label in labels)
        if model.head == "lm":
            tokens = config.decision.label_tokens or _label_tokens(config)
            return dataclasses.replace(config, decision=dataclasses.replace(config.decision, label_tokens=tokens))
        return dataclasses.replace(config, model=dataclasses.replace(model, num_labels=len(names), id2label=names))
    if model.head != "classification":
        return config
    names = _names(config)
    return dataclasses.replace(config, model=dataclasses.replace(model, num_labels=len(names), id2label=names))


def with_sizes(config: Config) -> Config:
    """Return the config with the head of a decision model, without reading a tokenizer: its tokens are placeholders."""
    if config.decision.loss is None:
        return config
    if config.model.head == "lm" and not config.decision.label_tokens:
        decision = dataclasses.replace(config.decision, label_tokens=tuple(range(HEAD_ROWS)))
        config = dataclasses.replace(config, decision=decision)
    return resolve_labels(config)


def _label_tokens(config: Config) -> tuple[int, ...]:
    folder = hf.find_folders(config.model, weights=False).tokenizer
    tokenizer = hf.load_tokenizer(folder, config.chat.template, config.data.special_tokens)
    encoded = [tokenizer.encode(label, add_special_tokens=False) for label in HEAD_LABELS]
    if missing := [label for label, tokens in zip(HEAD_LABELS, encoded) if len(tokens) != 1]:
        raise UserError(
            f"decision.loss: the tokenizer has no single token for {', '.join(dict.fromkeys(missing))}, the labels of "
            "options; use model.head='classification', a linear head, which needs no tokens"
        )
    return tuple(tokens[0] for tokens in encoded)


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
