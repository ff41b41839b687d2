"""Streams: rows of data of unknown length, tokenised and packed during training.

A stream is a sequence of windows. A window holds the next samples of the datasets, enough to fill data.window_rows
rows, which are cut, packed and shuffled as `Rows` does with a whole dataset. A window depends only on its place, a few
integers: the number of samples read from each dataset before it. Every process makes all windows and reads its own
rows, and a resumed run makes again the window in which it stopped.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxtune.columns import NEXT_TOKEN, Column
from jaxtune.config.schema import Config, Dataset
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.documents import folder_name, hash_shaping
from jaxtune.data.cache.parts import unused_columns
from jaxtune.data.cache.tokenising import Items, Tokeniser, say_across
from jaxtune.data.formats.preferences import add_mismatched_answers
from jaxtune.data.formats.units import Documents, Unit
from jaxtune.data.reading import sources
from jaxtune.data.rows.packed_rows import Row, Rows
from jaxtune.data.rows.splits import refuse_unknown_tokens, with_task_type
from jaxtune.errors import UserError
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")

_DRAWN_AT_ONCE = 64  # samples: enough to keep the tokenizer's threads busy

Place = dict[str, Any]
"""The beginning of a window, as JSON: the window's number and first row; for each dataset the samples read in this pass
(`read`) and in all passes (`drawn`), and the number of passes; the dataset that is being read, if datasets follow each
other (data.mixing='concat')."""


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a stream.

    Attributes:
        place: the beginning of the window.
        after: the beginning of the next window.
        documents: the documents in the window.
        rows: the rows, numbered from 0.
    """

    place: Place
    after: Place
    documents: Documents
    rows: Rows

    @property
    def stop(self) -> int:
        """The number of the first row after the window, counted through the stream."""
        return self.after["row"]


class Stream:
    """The training data of a config as an endless stream: each dataset starts again after its last sample."""

    stop = None
    counts = None
    notes = ()

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        vocabulary: int | None = None,
        columns: tuple[Column, ...] = NEXT_TOKEN,
        rows_per_step: int = 1,
    ):
        """Find the sources.

        Args:
            config: the config.
            tokenizer: the model's tokenizer.
            vocabulary: as in `open_documents`.
            columns: the columns of a row.
            rows_per_step: rows of an optimizer step; windows are kept while the steps ahead may read them.
        """
        self._config, self._tokenizer, self._vocabulary, self._columns = config, tokenizer, vocabulary, columns
        self._rows_per_step = rows_per_step
        data, labels = config.data, config.model.id2label
        entries = with_task_type(config, data.datasets)
        self._sources = [sources.open_source(entry, len(tokenizer), streaming=True) for entry in entries]
        # The tokens are not known yet, so the key is made of everything that shapes them, as the name of a cache
        # folder.
        # data.on_bad_row is no part of the data: a run that a bad sample has ended continues without it.
        self._shaping, skipping = (hash_shaping(tokenizer, how, labels, config.chat) for how in ("error", "skip"))
        self._keys = [self._hash_names(entries, shaping) for shaping in (self._shaping, skipping)]
        self.key = self._keys[0]
        self._tokenisers = [Tokeniser(entry, tokenizer, labels, config.chat) for entry in entries]

    def has_key(self, key: str) -> bool:
        """Whether `key` is the key of the same data."""
        return key in self._keys  # the second one: of an older version, with data.on_bad_row='skip'

    def _hash_names(self, entries: Sequence[Dataset], shaping: str) -> str:
        names = [folder_name(source, entry, shaping) for source, entry in zip(self._sources, entries)]
        return hashlib.sha256(" ".join(names).encode()).hexdigest()

    @functools.cached_property
    def content_key(self) -> str:
        """A hash like `key`, which copies of the sources have too."""
        contents = [source.content() for source in self._sources]
        return hashlib.sha256(" ".join([*contents, self._shaping]).encode()).hexdigest()

    def epoch(self, position: dict[str, Any]) -> float:
        """Return the number of whole passes over every dataset before the window of a position."""
        return float(min(position["stream"]["passes"])) if position else 0.0

    def since(self, position: dict[str, Any]) -> "OpenStream":
        """Return the rows that begin at a position."""
        ahead = self._config.data.prefetch + 2
        return OpenStream(self.windows(position.get("stream")), ahead * self._rows_per_step)

    def windows(self, place: Place | None = None) -> Iterator[Window]:
        """Yield the windows that begin at a place, without end."""
        data, most = self._config.data, self._config.attention.max_documents_per_row
        count = len(data.datasets)
        place = place or dict(
            window=0, row=0, read=[0] * count, drawn=[0] * count, passes=[0] * count, dataset=0, skipped=0
        )
        reader = _Reader(self._sources, self._config, place)
        reported: set[str] = set()
        name = ", ".join(source.name for source in self._sources)
        # Everything below depends only on `place`, so that a resumed run makes the same windows.
        while True:
            units, skipped = self._next_units(reader, reported)
            if (entry := self._tokenisers[0].entry).type == "unpaired_preference":
                units = list(add_mismatched_answers(units, name, entry))
            part = token_cache.gather_units(units, name, self._tokenisers[0].columns)
            documents = Documents.concatenate([part])
            refuse_unknown_tokens(documents, self._tokenizer, self._vocabulary)
            # Each window has its own order. It is one epoch of `Rows`, so the seed distinguishes windows.
            window_data = dataclasses.replace(data, seed=data.seed + place["window"])
            rows = Rows(documents, window_data, 1, self._columns, most)
            numbers = {"window": place["window"] + 1, "row": place["row"] + rows.total(1)}
            after = numbers | reader.state() | {"skipped": place["skipped"] + skipped}
            dropped = place.get("dropped", 0) + rows.counts.dropped_documents
            after["dropped"] = dropped
            if skipped:
                log.warning("data: %d bad samples skipped until row %d", after["skipped"], after["row"])
            if rows.losses and "losses" not in reported:  # the first window that loses data
                reported.add("losses")
                for line in rows.losses:
                    log.warning("data: rows %d to %d: %s", place["row"], after["row"], line)
            elif rows.counts.dropped_documents:
                log.warning("data: %d documents longer than a row left out until row %d", dropped, after["row"])
            yield Window(place, after, documents, rows)
            place = after

    def _next_units(self, reader: "_Reader", reported: set[str]) -> tuple[list[Unit], int]:
        """Return (enough units for a window, number of samples left out)."""
        data = self._config.data
        units: list[Unit] = []
        tokens = skipped = 0
        passes = sum(reader.passes)
        while tokens < data.window_rows * data.seq_len:
            drawn = [reader.draw() for _ in range(_DRAWN_AT_ONCE)]
            numbered: list[tuple[int, Unit]] = []  # units with the index of their sample in `drawn`
            for dataset, tokeniser in enumerate(self._tokenisers):
                samples = [i for i, (drawn_from, _) in enumerate(drawn) if drawn_from == dataset]
                if not samples:
                    continue
                block = tokeniser([drawn[i][1] for i in samples])
                for line in (tokeniser.form, *block.said):
                    if line and (line := f"{self._sources[dataset].name}: {line}") not in reported:
                        reported.add(line)
                        log.info("data: %s", line)
                if new := [column for column in block.unused if (f"{dataset} {column}" not in reported)]:
                    reported.update(f"{dataset} {column}" for column in new)
                    log.warning("data: %s: %s", self._sources[dataset].name, unused_columns(new))
                if block.across and (once := f"across {dataset}") not in reported:
                    reported.add(once)
                    line = say_across(len(block.across), block.across[0])
                    log.warning("data: %s: of the first %d samples %s", self._sources[dataset].name, len(samples), line)
                if block.problems and data.on_bad_row != "skip":
                    raise UserError(f"{block.problems[0]}; data.on_bad_row='skip' leaves such samples out")
                skipped += len(block.problems)
                numbered += [(samples[place], unit) for place, unit in zip(block.places, block.units)]
            numbered.sort(key=lambda pair: pair[0])  # in the order in which the samples were drawn
            units += [unit for _, unit in numbered]
            tokens += sum(len(document.tokens) for _, unit in numbered for document in unit.documents)
            # All datasets have ended once more without a usable sample: the loop would never fill a window.
            if not units and sum(reader.passes) > passes + len(self._sources):
                raise UserError("data: no sample of the stream can be trained on")
        return units, skipped


class OpenStream:
    """The rows of a stream from a position, to be read nearly in order by any number of threads.

    The next window is made in a thread of its own while the rows of the current one are read.
    """

    stop = None

    def __init__(self, windows: Iterator[Window], kept: int):
        """`kept`: the number of rows before the last row read that can still be read."""
        self._windows, self._behind = windows, kept
        self._kept: deque[Window] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future[Window] = self._thread.submit(next, windows)

    def __getitem__(self, index: int) -> Row:
        with self._lock:
            while not self._kept or self._kept[-1].stop <= index:
                # The next window is requested only when this one is taken: one window is made ahead.
                self._kept.append(self._ahead.result())
                self._ahead = self._thread.submit(next, self._windows)
            # Threads of the loader may still read rows of earlier steps, so a window stays until no thread needs it.
            while self._kept[0].stop <= index - self._behind:
                self._kept.popleft()
            window = next(window for window in self._kept if index < window.stop)
        assert index >= window.place["row"], "rows are read in order"
        return window.rows[index - window.place["row"]]

    def position(self, row: int) -> dict[str, Any]:
        """Return the position at which `row` is the next row; the rows before it have been read."""
        with self._lock:
            place = next((window.place for window in self._kept if row < window.stop), self._kept[-1].after)
        return {"row": row, "stream": place}


class _Reader:
    """Draws samples from the datasets, one after the other or in their shares."""

    def __init__(self, opened: list[sources.SampleSource], config: Config, place: Place):
        self._sources, self._mixing = opened, config.data.mixing
        self._weights = [entry.weight or 1.0 for entry in config.data.datasets]
        self._dataset: int = place["dataset"]
        self._read, self._drawn = list(place["read"]), list(place["drawn"])
        self.passes = list(place["passes"])
        self._open = [self._iterate(dataset) for dataset in range(len(opened))]

    def state(self) -> Place:
        """Return the entries of a place that the reader keeps."""
        lists = {"read": self._read, "drawn": self._drawn, "passes": self.passes}
        return {name: values.copy() for name, values in lists.items()} | {"dataset": self._dataset}

    def draw(self) -> tuple[int, Any]:
        """Return (number of the dataset, the next sample or the error that it could not be read)."""
        while True:
            dataset = self._dataset
            if self._mixing != "concat":
                # The dataset that is furthest behind its share: no random numbers, so that a place is enough to resume.
                due = [(drawn + 0.5) / weight for drawn, weight in zip(self._drawn, self._weights)]
                dataset = due.index(min(due))
            # At most one iteration; the loop falls through if the dataset has ended.
            for item in self._open[dataset]:
                self._read[dataset] += 1
                self._drawn[dataset] += 1
                return dataset, item
            self._end(dataset)

    def _end(self, dataset: int) -> None:
        """Start a dataset again that has been read to its end; with 'interleave_under', start all datasets again."""
        if not self._read[dataset]:
            raise UserError(f"data: {self._sources[dataset].name} has no sample")
        for ended in range(len(self._read)) if self._mixing == "interleave_under" else [dataset]:
            self.passes[ended] += 1
            self._read[ended] = 0
            self._open[ended] = self._iterate(ended)
        if self._mixing == "concat":
            self._dataset = (dataset + 1) % len(self._read)

    def _iterate(self, dataset: int) -> Iterator[Any]:
        """Return the samples of a dataset that have not been read in this pass."""
        # A resumed run reads past the samples before its place; sources need no random access.
        return itertools.islice(_items(self._sources[dataset]), self._read[dataset], None)


def _items(source: sources.SampleSource) -> Iterator[Any]:
    """Yield samples with their places, and the errors of samples that could not be read, in order."""
    errors: Items = []
    for item in source.read(errors.append):
        yield from errors
        errors.clear()
        yield item
    yield from errors
