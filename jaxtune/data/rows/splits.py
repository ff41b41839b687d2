"""The training and validation documents of a run."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxtune.columns import DESIRABLE
from jaxtune.config.schema import Config, DataOptions, Dataset
from jaxtune.data.cache.documents import prepare_shard, tokenize
from jaxtune.data.cache.parts import Shard
from jaxtune.data.formats.preferences import one_kind_note
from jaxtune.data.formats.units import Documents
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.rows.mixing import mix
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer


def open_documents(
    config: Config, tokenizer: Tokenizer, vocabulary: int | None = None, images: ImageReader | None = None
) -> tuple[Documents, dict[str, Documents]]:
    """Return training documents, and validation documents as `open_validation` does, tokenised or from the cache.

    Args:
        config: reads its sections data and chat, model.id2label, and train.output_dir for the cache.
        tokenizer: the model's tokenizer.
        vocabulary: number of tokens for which the model has embeddings; None: unknown, not checked.
        images: finds images; None: samples with images are refused.

    Raises:
        UserError: as `tokenize` and `hold_out`; a token has no embedding.
    """
    data = config.data
    # Validation datasets come first: they are short, so that their errors are reported soon.
    validation = open_validation(config, tokenizer, vocabulary, images) if data.eval_datasets else {}
    train = _documents(config, data.datasets, tokenizer, vocabulary, images)
    if config.preference.loss == "kto":
        wanted = np.concatenate([part.values[DESIRABLE.name] for part in train.parts])
        train = _with_note(train, one_kind_note(wanted))
    if data.validation_split and not data.eval_datasets:  # before mixing, which may repeat documents
        train, held_out = hold_out(train, data.validation_split, validation_seed(data))
        validation = {"": held_out}
    return mix(train, data.datasets, data), validation


def open_validation(
    config: Config, tokenizer: Tokenizer, vocabulary: int | None = None, images: ImageReader | None = None
) -> dict[str, Documents]:
    """Return validation documents by the name of their datasets ("" for no name); {} if the config has no validation.

    Arguments and errors as in `open_documents`.
    """
    data = config.data
    if data.eval_datasets:
        # data.samples_per_epoch and data.mixing are of training; validation uses every document, unless its own entries
        # have weights.
        shares = dataclasses.replace(data, samples_per_epoch=None)
        whole, documents = dataclasses.replace(shares, mixing="concat"), {}
        for name in dict.fromkeys(entry.name or "" for entry in data.eval_datasets):
            entries = tuple(entry for entry in data.eval_datasets if (entry.name or "") == name)
            together = _documents(config, entries, tokenizer, vocabulary, images)
            documents[name] = mix(together, entries, whole if entries[0].weight is None else shares)
        return documents
    if data.validation_split:
        everything = _documents(config, data.datasets, tokenizer, vocabulary, images)
        return {"": hold_out(everything, data.validation_split, validation_seed(data))[1]}
    return {}


def _with_note(documents: Documents, line: str | None) -> Documents:
    """Return the documents with a line for the user added; unchanged if the line is None."""
    if line is None:
        return documents
    first, *others = documents.parts
    noted = dataclasses.replace(first, notes=(*first.notes, line))
    return dataclasses.replace(documents, parts=(noted, *others))


def validation_seed(data: DataOptions) -> int:
    """Return the seed that chooses the documents to hold out."""
    return data.seed if data.validation_seed is None else data.validation_seed


def _documents(
    config: Config,
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    vocabulary: int | None,
    images: ImageReader | None,
) -> Documents:
    data = config.data
    options = data.on_bad_row, config.model.id2label, config.chat, data.num_proc, data.cache_only
    documents = tokenize(with_task_type(config, entries), tokenizer, cache_folder(config), *options, images)
    refuse_unknown_tokens(documents, tokenizer, vocabulary)
    return documents


def refuse_unknown_tokens(documents: Documents, tokenizer: Tokenizer, vocabulary: int | None) -> None:
    """Raise UserError if a document has a token without an embedding; `vocabulary` as in `open_documents`."""
    if vocabulary is None or len(tokenizer) <= vocabulary:
        return
    if (most := max(int(part.values["tokens"].max()) for part in documents.parts)) >= vocabulary:
        raise UserError(
            f"the data has token {most}, {tokenizer.convert_ids_to_tokens(most)!r}, and the model has embeddings "
            f"for {vocabulary} tokens; list the tokens added to the tokenizer in data.special_tokens, so that the "
            "embeddings grow"
        )


def prepare_documents(
    config: Config, tokenizer: Tokenizer, shard: Shard, images: ImageReader | None = None
) -> list[str]:
    """Tokenise a shard of training and validation data, which `open_documents` joins; return a line about each entry.

    `images`: as in `open_documents`. Raises UserError as `tokenize`, and for a stream.
    """
    data = config.data
    if data.streaming:
        raise UserError("data.streaming=True tokenises during training, so there are no shards to prepare")
    options = data.on_bad_row, config.model.id2label, config.chat, data.num_proc
    entries = with_task_type(config, data.datasets + data.eval_datasets)
    return prepare_shard(entries, tokenizer, cache_folder(config), shard, *options, images)


def with_task_type(config: Config, entries: tuple[Dataset, ...]) -> tuple[Dataset, ...]:
    """Return the entries with the type that the task requires, if it requires one."""
    if config.sample_type is None:
        return entries
    return tuple(dataclasses.replace(entry, type=config.sample_type) for entry in entries)


def cache_folder(config: Config) -> Path:
    """Return the cache folder of tokenised documents."""
    return Path(config.data.cache_dir or Path(config.train.output_dir) / "cache")


def hold_out(documents: Documents, held_out: float, seed: int) -> tuple[Documents, Documents]:
    """Split units into training and validation, at least one each; the same seed always holds out the same units.

    Args:
        documents: the documents to split.
        held_out: the units for validation: a fraction below 1, or their number.
        seed: seed of the choice.

    Raises:
        UserError: there is only one unit, or `held_out` leaves none for training.
    """
    count = len(documents.chosen)
    if count < 2:
        raise UserError(
            "data.validation_split: there is only one document, or one unit of several; give data.eval_datasets instead"
        )
    if held_out >= count:
        raise UserError(f"data.validation_split = {held_out:g}, but there are only {count} documents")
    held = int(held_out) if held_out >= 1 else min(max(round(held_out * count), 1), count - 1)
    # numpy guarantees that the raw stream of a bit generator never changes between versions; it does not for the
    # distributions derived from the stream.
    order = np.argsort(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(1,))).random_raw(count), kind="stable")
    # Sorted, because `mix` expects ascending units, and without data.shuffle they are trained in this order.
    train, validation = (documents.chosen[np.sort(part)] for part in (order[held:], order[:held]))
    return dataclasses.replace(documents, chosen=train), dataclasses.replace(documents, chosen=validation)
