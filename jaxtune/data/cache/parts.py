"""The parts of an unfinished cache entry: made one after another or by several machines, then joined.

A run that was killed continues after the last finished part. The samples of a part depend only on the source, so parts
made by different processes fit together.
"""

import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxtune.checkpoint import manifest
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.tokenising import Items, TokenisedBlock, Tokeniser, say_across
from jaxtune.data.cache.workers import ordered_map
from jaxtune.data.chat.encoding import UntrainableSample
from jaxtune.data.formats.preferences import add_mismatched_answers
from jaxtune.data.formats.units import Unit
from jaxtune.data.reading import sources
from jaxtune.data.reading.readers import size_of
from jaxtune.data.reading.skipped_samples import LISTED, list_skipped
from jaxtune.errors import UserError, format_count

log = logging.getLogger("jaxtune")

# A block is one call of the tokenizer; a part is the most work that a killed run loses. Sizes are in characters. If
# they change, the name in `parts_of` must change too, because parts of another size hold other samples.
_BLOCK_SIZE, _BLOCK_SAMPLES = 2**22, 1024
_PART_SIZE = 2**26
# Samples that cannot be trained on are counted before the error is raised, but reading stops after this many.
_MAX_REFUSED = 1000
_PROGRESS = (
    SpinnerColumn(),
    TextColumn("tokenising {task.description}: {task.fields[documents]:,} documents", markup=False),
    TextColumn("{task.completed:,.0f} characters"),
    TimeElapsedColumn(),
)

Shard = tuple[int, int]
"""(number, count): the parts of an entry whose number is `number` modulo `count`."""


def parts_of(folder: Path) -> Path:
    """Return the folder that holds the finished parts of an entry, each in a folder named by its number."""
    return folder.with_name(f"{folder.name}.parts")


def temporary_folder(folder: Path, *more: str) -> Path:
    """Return a folder next to `folder` that only this process writes to."""
    return folder.with_name(".".join([folder.name, socket.gethostname(), str(os.getpid()), *more, "tmp"]))


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished part."""
    return json.loads((folder / token_cache.SUMMARY).read_text())


def remove_damaged(folder: Path, name: str) -> None:
    """Remove a folder of documents, whole or a part, if it does not agree with its manifest, and warn the user."""
    if problems := manifest.verify(folder) if folder.exists() else ():
        log.warning("data: %s is damaged (%s), so %s is tokenised again", folder, problems[0], name)
        # Renamed first, because removing takes time, and another process must not read half a folder.
        removed = temporary_folder(folder, "damaged")
        with contextlib.suppress(FileNotFoundError):  # another shard's process was faster
            folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def write_entry(
    folder: Path,
    parts: Path,
    source: sources.SampleSource,
    tokeniser: Tokeniser,
    on_bad_row: str,
    num_proc: int,
    request: str,
    source_notes: Sequence[str],
) -> None:
    """Make the missing parts, and join all parts into `folder`.

    `source_notes`: lines for the user about the source, filled while it is read.
    """
    try:
        count = make_parts(parts, source, tokeniser, on_bad_row, num_proc)
        _join([parts / str(part) for part in range(count)], folder, source.name, tokeniser, request, source_notes)
        shutil.rmtree(parts)
    finally:
        with contextlib.suppress(OSError):  # fails if there are finished parts, which the next run uses
            parts.rmdir()
        if parts.suffix == ".tmp":  # private to this process (no locks)
            shutil.rmtree(parts, ignore_errors=True)


def make_parts(
    parts: Path,
    source: sources.SampleSource,
    tokeniser: Tokeniser,
    on_bad_row: str,
    num_proc: int,
    shard: Shard = (0, 1),
) -> int:
    """Make the missing parts of a shard, and return the number of all parts of the source."""
    number, shards = shard
    for path in parts.glob("*"):
        if path.name.isdigit() and int(path.name) % shards == number:
            remove_damaged(path, source.name)
    finished = {int(path.name) for path in parts.glob("*") if path.name.isdigit()}
    if left_by_a_kill := finished & set(range(number, max(finished, default=0) + 1, shards)):
        log.info("data: %s: continuing with %d parts from the cache", source.name, len(left_by_a_kill))
    parts.mkdir(exist_ok=True)
    problems, count = _Problems(on_bad_row), 0

    def missing_blocks() -> Iterator[tuple[int, Items]]:
        nonlocal count
        # Finished parts are read again, though not tokenised: the samples before a part determine its beginning.
        for part, items in _blocks(source):
            count = part + 1
            if part % shards == number and part not in finished:
                yield part, items
            elif tokeniser.form is None:
                tokeniser.settle(items)  # the first sample decides the type, also if another process tokenises it

    with Progress(*_PROGRESS, console=Console(stderr=True, force_jupyter=False), transient=True) as progress:
        line = progress.add_task(source.name, total=None, documents=0)

        def tokenised_blocks() -> Iterator[tuple[int, TokenisedBlock]]:
            documents = 0
            for part, block in _tokenise_blocks(tokeniser, missing_blocks(), num_proc):
                for problem in block.problems:
                    problems.report(problem)
                documents += len(block.units)
                progress.update(line, advance=block.characters, documents=documents)
                yield part, block

        # Blocks arrive in the order of parts, so each part is complete before the next one begins.
        for part, blocks in itertools.groupby(tokenised_blocks(), itemgetter(0)):
            _write_part(parts / str(part), (block for _, block in blocks), source.name, tokeniser, problems)
    problems.raise_refused()
    return count


def _blocks(source: sources.SampleSource) -> Iterator[tuple[int, Items]]:
    """Yield the samples in blocks, each with the number of its part; there is at least one block."""
    items: Items = []
    size = part_size = part = 0
    failed = None
    try:
        for where, sample in source.read(items.append):
            items.append((where, sample))
            size += size_of(sample)
            if size >= _BLOCK_SIZE or len(items) >= _BLOCK_SAMPLES:
                # A copy, because the source appends the errors of unreadable samples to this list.
                yield part, items.copy()
                items.clear()
                part_size += max(size, _BLOCK_SIZE // 8)  # a block of many tiny samples counts too
                size = 0
                if part_size >= _PART_SIZE:
                    part, part_size = part + 1, 0
    except UserError as error:  # raised after the samples before it, so that problems come in the order of the file
        failed = error
    if items or not (part or part_size):
        yield part, items
    if failed is not None:
        raise failed


def _tokenise_blocks(
    tokeniser: Tokeniser, blocks: Iterator[tuple[int, Items]], num_proc: int
) -> Iterator[tuple[int, TokenisedBlock]]:
    """Tokenise blocks, in other processes once the type is decided and if more than one block is left."""
    tokenise = partial(_tokenise_block, tokeniser)
    for block in blocks:
        yield tokenise(block)
        if num_proc > 1 and tokeniser.form and (more := next(blocks, None)) is not None:
            yield from ordered_map(tokenise, itertools.chain([more], blocks), num_proc)


def _tokenise_block(tokeniser: Tokeniser, block: tuple[int, Items]) -> tuple[int, TokenisedBlock]:
    return block[0], tokeniser(block[1])


class _Problems:
    """Counts samples that cannot be trained on, and raises the error; with on_bad_row='skip' it does neither.

    A sample that cannot be read raises immediately. A sample that is `UntrainableSample` is counted, so that the user
    learns how many there are.
    """

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.count = 0
        self.first: UserError | None = None

    def report(self, error: UserError):
        if self.skip:
            return
        if not isinstance(error, UntrainableSample):
            raise error
        self.count += 1
        self.first = self.first or error
        if self.count == _MAX_REFUSED:
            self.raise_refused()

    def raise_refused(self):
        if self.count:
            raise UserError(
                f"{format_count(self.count, 'sample')} cannot be trained on; the first: {self.first}. Fix them, or "
                "leave them out with data.on_bad_row='skip'"
            )


def _write_part(
    folder: Path, blocks: Iterator[TokenisedBlock], name: str, tokeniser: Tokeniser, problems: _Problems
) -> None:
    """Write blocks into a temporary folder next to `folder`, then rename it."""
    notes: dict[str, None] = {}  # a dict as an ordered set
    unused: dict[str, None] = {}
    first: list[str] = []
    first_across: list[str] = []
    longer = skipped = across = 0

    def units() -> Iterator[Unit]:
        nonlocal longer, skipped, across
        for block in blocks:
            notes.update(dict.fromkeys(block.said))
            unused.update(dict.fromkeys(block.unused))
            first.extend(map(str, block.problems[: LISTED - len(first)]))
            skipped += len(block.problems)
            longer += block.longer
            first_across.extend(block.across[: 1 - len(first_across)])
            across += len(block.across)
            yield from block.units

    with _renamed_when_finished(folder) as temporary:
        summary = token_cache.write(temporary, units(), tokeniser.columns)
        if problems.count:  # the run will end in an error, so the part is not kept
            return
        counts = {"said": list(notes), "unused": list(unused), "first": first, "longer": longer}
        counts |= {"across": across, "first_across": first_across}
        token_cache.finish(temporary, summary | counts, name, skipped)


@contextlib.contextmanager
def _renamed_when_finished(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, which is renamed to `folder` at the end if it has a summary."""
    temporary = temporary_folder(folder)
    temporary.mkdir()
    try:
        yield temporary
        if (temporary / token_cache.SUMMARY).exists():
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():  # otherwise another process was faster, with the same content
                    raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _join(
    parts: list[Path], folder: Path, name: str, tokeniser: Tokeniser, request: str, source_notes: Sequence[str]
) -> None:
    """Join parts into one folder, with the same content as if all blocks had been written in one go."""
    summaries = [read_summary(part) for part in parts]
    longer = sum(summary["longer"] for summary in summaries)
    skipped = sum(summary["skipped"] for summary in summaries)
    first = list(itertools.chain.from_iterable(summary["first"] for summary in summaries))[:LISTED]
    left_out = f"{format_count(longer, 'document')} of more than {tokeniser.entry.max_tokens} tokens left out"
    if not any(summary["documents"] for summary in summaries):
        shutil.rmtree(parts[0].parent)
        why = f"; {left_out}" if longer else ""
        why += f"; the first problem: {first[0]}" if first else ""
        raise UserError(f"data: {name} has no sample that can be trained on{why}")
    with _renamed_when_finished(folder) as temporary:
        paired = tokeniser.entry.type == "unpaired_preference"  # pairs neighbours, across parts too
        if len(parts) == 1 and not paired:  # no copy of the data: the part becomes the folder
            temporary.rmdir()
            parts[0].rename(temporary)
            # The other fields of a part's summary count its problems; their sums over all parts are made below.
            summary = {name: summaries[0][name] for name in token_cache.CONTENT}
        else:
            units = itertools.chain.from_iterable(token_cache.units_of(token_cache.load(part)) for part in parts)
            units = add_mismatched_answers(units, name, tokeniser.entry) if paired else units
            summary = token_cache.write(temporary, units, tokeniser.columns)
        template_notes = dict.fromkeys(line for each in summaries for line in each["said"])
        counts = f"{format_count(summary['documents'], 'document')} of {summary['tokens']:,} tokens"
        notes = [f"{name}: {tokeniser.form}, {counts}", *source_notes, *(f"{name}: {line}" for line in template_notes)]
        losses = []
        if across := sum(summary["across"] for summary in summaries):
            example = next(line for summary in summaries for line in summary["first_across"])
            notes.append(f"{name}: {say_across(across, example)}")
        if skipped:
            losses.append(list_skipped(first, skipped))
        if longer:
            losses.append(f"{name}: {left_out}")
        if unused := dict.fromkeys(column for each in summaries for column in each["unused"]):
            losses.append(f"{name}: {unused_columns(unused)}")
        token_cache.finish(temporary, summary | {"request": request}, name, skipped, notes, losses)


def unused_columns(columns: Collection[str]) -> str:
    """Return a line for the user about columns that are not used, listed as in `TokenisedBlock.unused`."""
    are = "column is" if len(columns) == 1 else "columns are"
    return f"{len(columns)} {are} not used: {', '.join(columns)}"
