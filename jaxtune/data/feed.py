"""The data of a run: rows in batches for a mesh, how many steps they make, and rows to evaluate on."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxtune.config.schema import Config
from jaxtune.data.loader import batches
from jaxtune.data.rows import Rows
from jaxtune.data.splits import open_documents
from jaxtune.parallel.layout import TOKENS, P
from jaxtune.parallel.mesh import data_shards

log = logging.getLogger("jaxtune")


@dataclass(frozen=True)
class Feed:
    """Rows of training data, and of validation data if there is any.

    Attributes:
        shape: (micro-batches, rows of a micro-batch over all devices, positions) of a step.
        key: a hash of all training documents.
        chat: whether all documents are of the chat template, so that a prompt is to be too.
    """

    rows: Rows
    eval_rows: Rows | None
    shape: tuple[int, int, int]
    sharding: jax.NamedSharding
    total_steps: int
    key: str
    chat: bool

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step."""
        return self.shape[0] * self.shape[1]

    def batches(self, start_row: int) -> Iterator[tuple[int, dict[str, jax.Array]]]:
        """(row after the batch, batch) from a row on, to the end of the run."""
        return batches(self.rows, self.shape, self.sharding, start_row, self.total_steps * self.rows_per_step)


def open_feed(config: Config, tokenizer, vocabulary: int, mesh: jax.sharding.Mesh) -> Feed:
    """Documents of the config, tokenised or from the cache, as rows for a mesh; logs what there is.

    Raises UserError as `open_documents`.
    """
    documents, eval_documents = open_documents(config, tokenizer, vocabulary)
    for note in documents.notes:
        log.info("data: %s", note)
    train, data = config.train, config.data
    rows = Rows(documents, data, epochs=None if train.max_steps else train.epochs)
    shape = (train.grad_accum_steps, train.micro_batch_size * data_shards(mesh), data.seq_len)
    rows_per_step = shape[0] * shape[1]
    total_steps = train.max_steps or -(-rows.total(train.epochs) // rows_per_step)
    log.info("data: %s", rows.counts)
    log.info("%d steps of %d rows of %d tokens", total_steps, rows_per_step, data.seq_len)
    eval_rows = None if eval_documents is None else Rows(eval_documents, data, epochs=1)
    chat = not documents.continuous.any() and all(entry.prompt_format is None for entry in data.datasets)
    sharding = jax.NamedSharding(mesh, P(None, *TOKENS))
    return Feed(rows, eval_rows, shape, sharding, total_steps, documents.key, chat)
