"""Streams: rows of data whose length is not known, tokenised and packed while they are trained on.

A stream is a sequence of windows. Each is the next samples of the datasets, enough to fill data.window_rows rows,
which are cut, packed and shuffled as `Rows` does with a whole dataset. It depends on nothing but its place, a few
integers: how much of each dataset was read before it. Every process makes all windows and reads its own rows of them,
and a run that goes on makes the window again in which it stopped.
"""

import dataclasses
import hashlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtune.columns import NEXT_TOKEN, Column
from jaxtune.config.schema import Config
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.documents import folder_name, shaping_of, unused_columns
from jaxtune.data.cache.tokenising import Items, Tokeniser, say_across
from jaxtune.data.formats.preferences import with_other_answers
from jaxtune.data.formats.units import Documents, Unit
from jaxtune.data.reading import sources
from jaxtune.data.rows.packed_rows import Row, Rows
from jaxtune.data.rows.splits import of_task, refuse_unknown_tokens
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("jaxtune")

_DRAWN_AT_ONCE = 64  # samples: enough to keep the tokenizer's threads busy

Place = dict[str, Any]
"""Where a window begins, as JSON: its number and first row; of each dataset the samples read in this pass (`read`) and
in all (`drawn`), and its passes; the dataset that is being read, where they follow each other."""


@dataclass(frozen=True)
class Window:
    """Some rows of a stream.

    Attributes:
        place: where it begins.
        after: where the next one begins.
        documents: the documents in it.
        rows: numbered from 0.
    """

    place: Place
    after: Place
    documents: Documents
    rows: Rows

    @property
    def stop(self) -> int:
        """The number of the first row after it, counted through the stream."""
        return self.after["row"]


class Stream:
    """The training data of a config as a stream without end: after the last sample of a dataset comes its first."""

    stop = None
    counts = None
    notes = ()

    def __init__(
        self,
        config: Config,
        tokenizer: "PreTrainedTokenizerFast",
        vocabulary: int | None = None,
        columns: tuple[Column, ...] = NEXT_TOKEN,
        rows_per_step: int = 1,
    ):
        """Finds the sources. `vocabulary`: as of `open_documents`; `columns`: of a row."""
        self._config, self._tokenizer, self._vocabulary, self._columns = config, tokenizer, vocabulary, columns
        self._rows_per_step = rows_per_step
        data, labels = config.data, config.model.id2label
        entries = of_task(config, data.datasets)
        self._sources = [sources.open_source(entry, len(tokenizer), streaming=True) for entry in entries]
        shaping = shaping_of(tokenizer, data.on_bad_row, labels, config.chat)
        names = [folder_name(source, entry, shaping) for source, entry in zip(self._sources, entries)]
        self.key = hashlib.sha256(" ".join(names).encode()).hexdigest()
        self._tokenisers = [Tokeniser(entry, tokenizer, labels, config.chat) for entry in entries]

    def has_key(self, key: str) -> bool:
        """Whether it is that of the same data."""
        return key == self.key

    def epoch(self, position: dict[str, Any]) -> float:
        """Whole passes over every dataset before the window of a position."""
        return float(min(position["stream"]["passes"])) if position else 0.0

    def since(self, position: dict[str, Any]) -> "OpenStream":
        """The rows from a position on."""
        ahead = self._config.data.prefetch + 2
        return OpenStream(self.windows(position.get("stream")), ahead * self._rows_per_step)

    def windows(self, place: Place | None = None) -> Iterator[Window]:
        """The windows from a place on, without end."""
        data, most = self._config.data, self._config.attention.most_documents
        count = len(data.datasets)
        place = place or dict(
            window=0, row=0, read=[0] * count, drawn=[0] * count, passes=[0] * count, dataset=0, skipped=0
        )
        reader = _Reader(self._sources, self._config, place)
        said: set[str] = set()
        name = ", ".join(source.name for source in self._sources)
        while True:
            units, skipped = self._next_units(reader, said)
            if self._tokenisers[0].entry.type == "unpaired_preference":
                units = list(with_other_answers(units, name))
            part = token_cache.gathered(units, name, self._tokenisers[0].columns)
            documents = Documents.joined([part])
            refuse_unknown_tokens(documents, self._tokenizer, self._vocabulary)
            # Each window has an order of its own.
            of_window = dataclasses.replace(data, seed=data.seed + place["window"])
            rows = Rows(documents, of_window, 1, self._columns, most)
            numbers = {"window": place["window"] + 1, "row": place["row"] + rows.total(1)}
            after = numbers | reader.state() | {"skipped": place["skipped"] + skipped}
            dropped = place.get("dropped", 0) + rows.counts.dropped_documents
            after["dropped"] = dropped
            if skipped:
                log.warning("data: %d bad samples skipped until row %d", after["skipped"], after["row"])
            if rows.losses and "losses" not in said:  # of the first window that has any
                said.add("losses")
                for line in rows.losses:
                    log.warning("data: of rows %d to %d: %s", place["row"], after["row"], line)
            elif rows.counts.dropped_documents:
                log.warning("data: %d documents longer than a row left out until row %d", dropped, after["row"])
            yield Window(place, after, documents, rows)
            place = after

    def _next_units(self, reader: "_Reader", said: set[str]) -> tuple[list[Unit], int]:
        """(enough documents for a window, samples left out)."""
        data = self._config.data
        units: list[Unit] = []
        tokens = skipped = 0
        passes = sum(reader.passes)
        while tokens < data.window_rows * data.seq_len:
            drawn = [reader.draw() for _ in range(_DRAWN_AT_ONCE)]
            found: list[tuple[int, Unit]] = []
            for dataset, tokeniser in enumerate(self._tokenisers):
                mine = [i for i, (of, _) in enumerate(drawn) if of == dataset]
                if not mine:
                    continue
                block = tokeniser([drawn[i][1] for i in mine])
                for line in (tokeniser.form, *block.said):
                    if line and (line := f"{self._sources[dataset].name}: {line}") not in said:
                        said.add(line)
                        log.info("data: %s", line)
                if new := [column for column in block.unused if (f"{dataset} {column}" not in said)]:
                    said.update(f"{dataset} {column}" for column in new)
                    log.warning("data: %s: %s", self._sources[dataset].name, unused_columns(new))
                if block.across and (once := f"across {dataset}") not in said:
                    said.add(once)
                    line = say_across(len(block.across), block.across[0])
                    log.warning("data: %s: of the first %d samples %s", self._sources[dataset].name, len(mine), line)
                if block.problems and data.on_bad_row != "skip":
                    raise UserError(f"{block.problems[0]}; data.on_bad_row='skip' leaves such samples out")
                skipped += len(block.problems)
                found += [(mine[place], unit) for place, unit in zip(block.places, block.units)]
            found.sort(key=lambda pair: pair[0])
            units += [unit for _, unit in found]
            tokens += sum(len(document.tokens) for _, unit in found for document in unit.documents)
            if not units and sum(reader.passes) > passes + len(self._sources):
                raise UserError("data: no sample of the stream can be trained on")
        return units, skipped


class OpenStream:
    """The rows of a stream from one of them on, to be read nearly in order, by any number of threads."""

    stop = None

    def __init__(self, windows: Iterator[Window], kept: int):
        """`kept`: how far a row may be before the last one that was asked for."""
        self._windows, self._behind = windows, kept
        self._kept: deque[Window] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self._ahead: Future[Window] = self._thread.submit(next, windows)

    def __getitem__(self, index: int) -> Row:
        with self._lock:
            while not self._kept or self._kept[-1].stop <= index:
                self._kept.append(self._ahead.result())
                self._ahead = self._thread.submit(next, self._windows)
            while self._kept[0].stop <= index - self._behind:
                self._kept.popleft()
            window = next(window for window in self._kept if index < window.stop)
        assert index >= window.place["row"], "rows are read in order"
        return window.rows[index - window.place["row"]]

    def position(self, row: int) -> dict[str, Any]:
        """The position from which this row is the next, after the rows before it were read."""
        with self._lock:
            place = next((window.place for window in self._kept if row < window.stop), self._kept[-1].after)
        return {"row": row, "stream": place}


class _Reader:
    """Draws samples from the datasets, one after the other or in their shares."""

    def __init__(self, found: list[sources.Source], config: Config, place: Place):
        self._sources, self._mixing = found, config.data.mixing
        self._weights = [entry.weight or 1.0 for entry in config.data.datasets]
        self._dataset: int = place["dataset"]
        self._read, self._drawn = list(place["read"]), list(place["drawn"])
        self.passes = list(place["passes"])
        self._open = [self._opened(dataset) for dataset in range(len(found))]

    def state(self) -> Place:
        """Its part of a place."""
        lists = {"read": self._read, "drawn": self._drawn, "passes": self.passes}
        return {name: values.copy() for name, values in lists.items()} | {"dataset": self._dataset}

    def draw(self) -> tuple[int, Any]:
        """(number of the dataset, sample or why it could not be read)."""
        while True:
            dataset = self._dataset
            if self._mixing != "concat":
                due = [(drawn + 0.5) / weight for drawn, weight in zip(self._drawn, self._weights)]
                dataset = due.index(min(due))
            for item in self._open[dataset]:
                self._read[dataset] += 1
                self._drawn[dataset] += 1
                return dataset, item
            self._end(dataset)

    def _end(self, dataset: int) -> None:
        """A dataset has been read to its end: it begins again, and with it, by 'interleave_under', all others."""
        if not self._read[dataset]:
            raise UserError(f"data: {self._sources[dataset].name} has no sample")
        for ended in range(len(self._read)) if self._mixing == "interleave_under" else [dataset]:
            self.passes[ended] += 1
            self._read[ended] = 0
            self._open[ended] = self._opened(ended)
        if self._mixing == "concat":
            self._dataset = (dataset + 1) % len(self._read)

    def _opened(self, dataset: int) -> Iterator[Any]:
        return itertools.islice(_items(self._sources[dataset]), self._read[dataset], None)


def _items(source: sources.Source) -> Iterator[Any]:
    """The samples, each with where it comes from, and why others could not be read, in their order."""
    errors: Items = []
    for item in source.read(errors.append):
        yield from errors
        errors.clear()
        yield item
    yield from errors
