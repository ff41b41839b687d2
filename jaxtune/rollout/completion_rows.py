"""The batch of a step that samples: prompts with their answers, packed into rows."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtune import data
from jaxtune.columns import ADDED, LOSS_WEIGHT, TOKENS, Column
from jaxtune.config.schema import Config
from jaxtune.data.cache.token_cache import store_images
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.inference.prompt_images import PromptImages
from jaxtune.models.head.score import Batch


def batch_of_documents(
    config: Config,
    columns: tuple[Column, ...],
    tokens: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    values: Mapping[Column, np.ndarray],
    like: jax.ShapeDtypeStruct,
    packing: bool = True,
    images: PromptImages | None = None,
) -> Batch:
    """Return a batch of documents; the rows after the last one are padding, which the step does not compute.

    Args:
        config: the run's config.
        columns: columns of the batch.
        tokens: of each document.
        weights: the loss weight of each token; the ones with a weight are trained.
        values: the other columns, by token or by document, of all documents one after another.
        like: an array (micro-batches, rows, positions) with the sharding of the batch.
        packing: whether a row may have several documents. It has one if the attention kernel bounds their number.
        images: the images of the prompts in the documents; None: the model sees none.

    Raises:
        UserError: an image cannot be read.
    """
    added = {column: of_column for column, of_column in values.items() if column.name in ADDED}
    values = {TOKENS: np.concatenate(tokens), LOSS_WEIGHT: np.concatenate(weights), **values}
    values = {column: of_column for column, of_column in values.items() if column not in added}
    part = TokenisedDataset(
        name="completions",
        key="",
        columns={column.name: column for column in values},
        values={column.name: of_column.astype(column.dtype) for column, of_column in values.items()},
        offsets=np.cumsum([0, *map(len, tokens)]),
        units=np.arange(len(tokens) + 1),
        targets=np.array(list(map(sum, weights))),
        continuous=np.zeros(len(tokens), bool),
        skipped=0,
        notes=(),
        images=None if images is None else store_images(images.of_prompts),
    )
    packing = packing and config.attention.max_documents_per_row is None
    options = dataclasses.replace(config.data, packing=packing, shuffle=False, num_workers=0, prefetch=0)
    rows = data.Rows(Documents.concatenate([part], images and images.reader), options, 1, columns)
    for column, of_column in added.items():
        rows = rows.with_column(column, of_column)
    (_, batch), *_ = data.batches(rows, like.shape, like.sharding, 0, like.shape[0] * like.shape[1], options)
    return batch
