"""The data of a run: batches for a mesh, the number of steps, and rows to evaluate on."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxtune.columns import NEXT_TOKEN, Column
from jaxtune.config.schema import Config, DataOptions
from jaxtune.data.chat.template_line import say_template
from jaxtune.data.formats.units import Documents
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.rows.loader import batches
from jaxtune.data.rows.packed_rows import Counts, Rows
from jaxtune.data.rows.splits import open_documents, open_validation
from jaxtune.data.rows.streams import Stream
from jaxtune.errors import UserError, format_count
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import data_shards

log = logging.getLogger("jaxtune")


@dataclass(frozen=True)
class Feed:
    """Rows of training data, and of validation data if the config has any.

    A position in the training data is JSON: {"row": the next global row}, for a stream with its place; {} is the
    beginning.

    Attributes:
        documents: the training documents, or the stream.
        rows: the training rows, or the stream.
        eval_rows: rows to evaluate on, by the name of their datasets ("" for no name).
        shape: (micro-batches, rows of a micro-batch over all devices, positions) of a step.
        sharding: sharding of an array of this shape.
        total_steps: the step at which the run ends.
        chat: whether the chat template rendered the documents, so that it should render prompts too.
        data: the section data; the loader reads num_workers and prefetch.
    """

    documents: Documents | Stream
    rows: Rows | Stream
    eval_rows: dict[str, Rows]
    shape: tuple[int, int, int]
    sharding: jax.NamedSharding
    total_steps: int
    chat: bool
    data: DataOptions = DataOptions()

    @property
    def counts(self) -> Counts | None:
        """The counts of documents and tokens in the rows; None for a stream."""
        return self.rows.counts

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step."""
        return self.shape[0] * self.shape[1]

    @property
    def eval_keys(self) -> dict[str, str]:
        """The keys of the validation data, by the name of its datasets."""
        return {name: rows.documents.key for name, rows in self.eval_rows.items()}

    @property
    def content_key(self) -> str:
        """A hash of the training data, the same on hosts with the same data, at whatever path and time."""
        return self.documents.content_key if isinstance(self.documents, Stream) else self.documents.key

    def with_rows(self, change: Callable[[Rows], Rows]) -> "Feed":
        """Return the feed with `change` applied to the training rows (not to a stream) and to the validation rows."""
        rows = self.rows if isinstance(self.rows, Stream) else change(self.rows)
        eval_rows = {name: change(named_rows) for name, named_rows in self.eval_rows.items()}
        return dataclasses.replace(self, rows=rows, eval_rows=eval_rows)

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of passes over the data up to a position."""
        return self.rows.epoch(position)

    def batches(
        self, position: dict[str, Any], steps: int | None = None
    ) -> Iterator[tuple[dict[str, Any], dict[str, jax.Array]]]:
        """Yield (position after the batch, batch) from a position on.

        Args:
            position: the position of the first row.
            steps: number of batches. None: up to the end of the rows, the last batch filled up with padding, or without
                end if the rows never end.
        """
        rows, first = self.rows.since(position), position.get("row", 0)
        stop = rows.stop if steps is None else first + steps * self.rows_per_step
        for row, batch in batches(rows, self.shape, self.sharding, first, stop, self.data):
            yield rows.position(row), batch


def open_feed(
    config: Config,
    tokenizer,
    vocabulary: int,
    mesh: jax.sharding.Mesh,
    columns: tuple[Column, ...] = NEXT_TOKEN,
    images: ImageReader | None = None,
) -> Feed:
    """Open the documents of a config, tokenised or from the cache, as rows of `columns` for a mesh; log their counts.

    `images`: finds and reads images; None: samples with images are refused.

    Raises UserError as `open_documents` and `Rows`, and if data.drop_last leaves no step.
    """
    train, data = config.train, config.data
    most = config.attention.max_documents_per_row
    shape = (train.grad_accum_steps, train.micro_batch_size * data_shards(mesh), data.seq_len)  # (A, B, S)
    rows_per_step = shape[0] * shape[1]
    if data.streaming:
        eval_documents = open_validation(config, tokenizer, vocabulary)
        documents = rows = Stream(config, tokenizer, vocabulary, columns, rows_per_step)
        # A stream has no end; the checks of the config require train.max_steps.
        assert train.max_steps is not None
        total_steps = train.max_steps
    else:
        documents, eval_documents = open_documents(config, tokenizer, vocabulary, images)
        rows = Rows(documents, data, None if train.max_steps else train.epochs, columns, most, rows_per_step)
        for loss in rows.losses:
            log.warning("data: %s", loss)
        for note in documents.notes:
            log.info("data: %s", note)
        log.info("data: %s", rows.counts)
        total_steps = train.max_steps or count_steps(rows.total(train.epochs), rows_per_step, data.drop_last)
    log.info(
        "%s of %s of %s",
        format_count(total_steps, "step"),
        format_count(rows_per_step, "row"),
        format_count(data.seq_len, "token"),
    )
    eval_rows = rows_to_evaluate(eval_documents, config, columns)
    # With data.validation_split both come from the same sources, and their losses are logged once.
    logged = () if isinstance(rows, Stream) else rows.losses
    for name, named_rows in eval_rows.items():
        for loss in named_rows.losses:
            if loss not in logged:
                log.warning("validation%s: %s", f" {name}" if name else "", loss)
        log.info("validation%s: %s", f" {name}" if name else "", named_rows.counts)
    chat = is_chat(config, documents)
    for line in say_template(tokenizer, config.chat) if chat else ():
        log.info("data: %s", line)
    # Micro-batches follow each other on all devices, so the first axis is not sharded.
    sharding = jax.NamedSharding(mesh, P(None, *by_token()))
    return Feed(documents, rows, eval_rows, shape, sharding, total_steps, chat, data)


def is_chat(config: Config, documents: Documents | Stream) -> bool:
    """Whether the chat template rendered the documents, if the tokenizer has one."""
    entries, of_labels = config.data.datasets, config.sample_type in ("classification", "decision")
    if of_labels or any(entry.prompt_format is not None for entry in entries):
        return False
    if isinstance(documents, Stream):
        return any(entry.type in ("conversation", "instruction") for entry in entries)
    return not documents.continuous.all()  # running text has no messages to render


def rows_to_evaluate(
    documents: Mapping[str, Documents], config: Config, columns: tuple[Column, ...]
) -> dict[str, Rows]:
    """Return the rows of one pass over validation documents, by the name of their datasets, packed as in eval.packing.

    Raises UserError as `Rows`.
    """
    packing = config.data.packing if config.eval.packing is None else config.eval.packing
    data = dataclasses.replace(config.data, packing=packing)
    most = config.attention.max_documents_per_row
    return {
        name: Rows(part, data, 1, columns, most, name=f"validation {name}".rstrip()) for name, part in documents.items()
    }


def count_steps(rows: int, rows_per_step: int, drop_last: bool) -> int:
    """Return the number of steps of these rows; with data.drop_last, the number of full steps."""
    if not drop_last:
        return -(-rows // rows_per_step)
    steps, left_out = divmod(rows, rows_per_step)
    if not steps:
        raise UserError(f"data.drop_last: a step is {rows_per_step} rows, and there are only {rows}")
    log.info("data.drop_last leaves out %s of the last epoch", format_count(left_out, "row"))
    return steps
