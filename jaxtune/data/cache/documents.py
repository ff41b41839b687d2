"""The cache of tokenised documents: a source is rendered and tokenised once; later runs map the files into memory.

Each dataset entry has its own folder in the cache, named by a hash of everything that shapes its tokens: the identity
of its samples, its options, the tokenizer. The other entries, their order, and how documents are held out, shuffled
and packed may change without tokenising again. Processes that start together do the work once: the first holds a lock,
and the finished folder appears in one rename.

While the work is unfinished it is kept in parts, each in its own folder: a run that was killed continues after the last
finished part, and several machines can make different parts (`prepare_shard`). The samples of a part depend only on the
source, so parts made by different processes fit together.

    CACHE_DIR/HASH/          a finished entry
    CACHE_DIR/HASH.lock      held exclusively by the process that makes the entry, shared by `prepare_shard`
    CACHE_DIR/HASH.parts/N/  finished parts of an unfinished entry
    CACHE_DIR/HASH.HOST.PID.tmp, HASH.parts/N.HOST.PID.tmp  being written, renamed when complete
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
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
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxtune.checkpoint import manifest
from jaxtune.config.schema import ChatOptions, Dataset
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.tokenising import Items, TokenisedBlock, Tokeniser, say_across
from jaxtune.data.cache.workers import ordered_map
from jaxtune.data.chat.encoding import UntrainableSample
from jaxtune.data.formats.preferences import add_mismatched_answers
from jaxtune.data.formats.units import Documents, TokenisedDataset, Unit
from jaxtune.data.reading import sources
from jaxtune.data.reading.readers import size_of
from jaxtune.errors import UserError, hide_secrets
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")

# A block is one call of the tokenizer; a part is the most work that a killed run loses. Sizes are in characters. If
# they change, the name in `_parts_of` must change too, because parts of another size hold other samples.
_BLOCK_SIZE, _BLOCK_SAMPLES = 2**22, 1024
_PART_SIZE = 2**26
# Samples that cannot be trained on are counted before the error is raised, but reading stops after this many.
_MAX_REFUSED = 1000
_LISTED = 5  # skipped samples that are shown to the user
_PROGRESS = (
    SpinnerColumn(),
    TextColumn("tokenising {task.description}: {task.fields[documents]:,} documents", markup=False),
    TextColumn("{task.completed:,.0f} characters"),
    TimeElapsedColumn(),
)

Shard = tuple[int, int]
"""(number, count): the parts of an entry whose number is `number` modulo `count`."""


def tokenize(
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    cache_dir: Path,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: ChatOptions = ChatOptions(),
    num_proc: int = 1,
    cache_only: bool = False,
) -> Documents:
    """Tokenise data.datasets (or data.eval_datasets), or load them from the cache; each entry has its own folder.

    Args:
        entries: the entries.
        tokenizer: the tokenizer.
        cache_dir: the cache folder; created if it does not exist.
        on_bad_row: data.on_bad_row.
        labels: the names of a classifier's labels, by number.
        chat: the section chat, which selects the messages to train.
        num_proc: processes that tokenise; 1: only this process, whose tokenizer uses threads.
        cache_only: read no source; use the latest cache folder made from such an entry with such a tokenizer.

    Raises:
        UserError: a source does not exist; a sample cannot be read or trained on and may not be skipped; no sample is
            left; with `cache_only`, the cache has no such folder.
    """
    shaping = hash_shaping(tokenizer, on_bad_row, labels, chat)
    if cache_only:
        return Documents.concatenate([_last_made(entry, cache_dir, shaping) for entry in entries])
    loaded = []
    for source, entry, folder, source_notes in _find_sources(entries, tokenizer, cache_dir, shaping):
        if folder.exists() and not manifest.verify(folder):  # without the lock, so that processes verify concurrently
            part = token_cache.load(folder)
            note = f"{source.name}: from the cache of {_time_made(folder):%Y-%m-%d %H:%M}"
            loaded.append(dataclasses.replace(part, notes=(*part.notes, note)))
            continue
        with _hold_lock(cache_dir / f"{folder.name}.lock") as locked, explain_full_disk(cache_dir):
            _remove_damaged(folder, source.name)
            if locked:
                # Nobody but the holder of the lock writes such folders on this host, so their process was killed.
                for left_by_a_kill in cache_dir.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
                    shutil.rmtree(left_by_a_kill, ignore_errors=True)
            if not folder.exists():
                # Without locks another process may be writing parts at the same time, so this one writes its own,
                # unless `prepare_shard` has left parts to join.
                shared = locked or _parts_of(folder).exists()
                parts = _parts_of(folder) if shared else _temporary(folder, "parts")
                tokeniser = Tokeniser(entry, tokenizer, labels, chat)
                _write(folder, parts, source, tokeniser, on_bad_row, num_proc, _request(entry, shaping), source_notes)
            loaded.append(token_cache.load(folder))
    return Documents.concatenate(loaded)


def prepare_shard(
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    cache_dir: Path,
    shard: Shard,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: ChatOptions = ChatOptions(),
    num_proc: int = 1,
) -> list[str]:
    """Tokenise a shard of the parts that `tokenize` joins later, and return a line for the user about each entry.

    Arguments and errors as in `tokenize`, except that a shard may have no samples.
    """
    lines = []
    shaping = hash_shaping(tokenizer, on_bad_row, labels, chat)
    for source, entry, folder, _ in _find_sources(entries, tokenizer, cache_dir, shaping):
        # Shards run at the same time. The shared lock keeps `tokenize` from joining parts that they still write.
        with _hold_lock(cache_dir / f"{folder.name}.lock", shared=True), explain_full_disk(cache_dir):
            _remove_damaged(folder, source.name)
            if folder.exists():
                lines.append(f"{source.name}: it is whole in the cache already")
                continue
            tokeniser = Tokeniser(entry, tokenizer, labels, chat)
            count = _make_parts(_parts_of(folder), source, tokeniser, on_bad_row, num_proc, shard)
            shard_parts = range(shard[0], count, shard[1])
            documents = sum(_summary(_parts_of(folder) / str(part))["documents"] for part in shard_parts)
            existing = sum((_parts_of(folder) / str(part)).exists() for part in range(count))
            made = f"{documents:,} documents in the {len(shard_parts)} parts of shard {shard[0]}/{shard[1]}"
            lines.append(f"{source.name}: {made}; of all {count} parts {existing} are there")
    return lines


def _find_sources(
    entries: tuple[Dataset, ...], tokenizer: Tokenizer, cache_dir: Path, shaping: str
) -> list[tuple[sources.SampleSource, Dataset, Path, list[str]]]:
    """Return (source, entry, cache folder, notes) for each entry; reading the source fills its list of notes."""
    if not entries:
        raise UserError("data.datasets is empty; add an entry with jaxtune.config.dataset(path=...)")
    located = []
    for entry in entries:
        notes: list[str] = []
        source = sources.open_source(entry, len(tokenizer), say=notes.append)
        located.append((source, entry, cache_dir / folder_name(source, entry, shaping), notes))
    cache_dir.mkdir(parents=True, exist_ok=True)
    return located


def _last_made(entry: Dataset, cache_dir: Path, shaping: str) -> TokenisedDataset:
    """Load the documents that were last made from an entry, whatever the state of its source is now."""
    name = entry.path if isinstance(entry.path, str) else ", ".join(entry.path or ())
    times = {
        file.parent: file.stat().st_mtime
        for file in cache_dir.glob(f"*/{manifest.MANIFEST}")
        # A folder with a suffix is temporary, or holds parts.
        if not file.parent.suffix and token_cache.read_summary(file.parent).get("request") == _request(entry, shaping)
    }
    if not times:
        raise UserError(
            f"data.cache_only: {cache_dir} holds nothing made from {name} with these options and this tokenizer; run "
            "`python -m jaxtune.prepare` on a machine that has its source, with the same data.cache_dir"
        )
    folder = max(times, key=times.__getitem__)
    if problems := manifest.verify(folder):
        raise UserError(
            f"data.cache_only: {folder} is damaged ({problems[0]}); delete it, and run `python -m jaxtune.prepare` "
            f"on the machine that has the source {name}"
        )
    part = token_cache.load(folder)
    older = f"; {len(times) - 1} older ones are not used" if len(times) > 1 else ""
    note = f"{name}: from the cache of {_time_made(folder):%Y-%m-%d %H:%M}, its source was not read{older}"
    return dataclasses.replace(part, notes=(*part.notes, note))


def _time_made(folder: Path) -> datetime.datetime:
    """The time when the documents in a folder were finished."""
    return datetime.datetime.fromtimestamp((folder / manifest.MANIFEST).stat().st_mtime)


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / token_cache.SUMMARY).read_text())


def _remove_damaged(folder: Path, name: str) -> None:
    """Remove a folder of documents, whole or a part, if it does not agree with its manifest, and warn the user."""
    if problems := manifest.verify(folder) if folder.exists() else ():
        log.warning("data: %s is damaged (%s), so %s is tokenised again", folder, problems[0], name)
        # Renamed first, because removing takes time, and another process must not read half a folder.
        removed = _temporary(folder, "damaged")
        with contextlib.suppress(FileNotFoundError):  # another shard's process was faster
            folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk or quota into a UserError that names the folder and its option."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{folder}: {error.strerror}; make room there, or set data.cache_dir to a folder that has more. The same "
            "command continues after the finished parts"
        ) from error


@contextlib.contextmanager
def _hold_lock(path: Path, shared: bool = False) -> Iterator[bool]:
    """Hold a lock; yield False on a file system without locks. That only costs time, because the first rename wins."""
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            except OSError:
                yield False
                return
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                yield True
                return  # otherwise `jaxtune cache` removed the file during the wait: the lock is on a deleted file


def folder_name(source: sources.SampleSource, entry: Dataset, shaping: str) -> str:
    """Return a hash of everything that shapes an entry's documents; `shaping` is the result of `hash_shaping`."""
    parts = [source.identity, _changed_options(entry), shaping]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _request(entry: Dataset, shaping: str) -> str:
    """Return a hash like `folder_name`, without the identity of the source: it finds folders of earlier states."""
    return hashlib.sha256(json.dumps([_changed_options(entry), shaping], default=str).encode()).hexdigest()


def _changed_options(entry: Dataset) -> dict[str, Any]:
    """Return the options of an entry that are not at their defaults and shape its documents."""
    # Every option of an entry selects samples or renders them, except its weight, which only repeats them. Options at
    # their defaults are left out, so that the name of a folder stays the same if jaxtune gets new options.
    options = dataclasses.asdict(dataclasses.replace(entry, weight=None)).items()
    changed = {option: value for option, value in options if value != getattr(Dataset(), option)}
    return json.loads(hide_secrets(json.dumps(changed, default=str)))  # another access token reads the same data


def hash_shaping(tokenizer: Tokenizer, on_bad_row: str, labels: tuple[str, ...], chat: ChatOptions) -> str:
    """Return a hash of the settings that shape the tokens and labels of every entry."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # State left by the last call of the tokenizer; `Encoder` does not use it.
    del backend["truncation"], backend["padding"]
    parts = [token_cache.FORMAT, on_bad_row, backend, tokenizer.chat_template, tokenizer.special_tokens_map]
    parts += labels
    # The tokenizer already has chat.template; chat.response_prefix is only used to generate.
    chat = dataclasses.replace(chat, template=None, response_prefix=None)
    parts += (
        [dataclasses.asdict(chat)] if chat != ChatOptions() else []
    )  # older folders, without the section, keep their name
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


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
                f"{self.count} samples cannot be trained on; the first: {self.first}. Fix them, or leave them out "
                "with data.on_bad_row='skip'"
            )


def _parts_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.parts")


def _temporary(folder: Path, *more: str) -> Path:
    return folder.with_name(".".join([folder.name, socket.gethostname(), str(os.getpid()), *more, "tmp"]))


def _write(
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
        count = _make_parts(parts, source, tokeniser, on_bad_row, num_proc)
        _join([parts / str(part) for part in range(count)], folder, source.name, tokeniser, request, source_notes)
        shutil.rmtree(parts)
    finally:
        with contextlib.suppress(OSError):  # fails if there are finished parts, which the next run uses
            parts.rmdir()
        if parts.suffix == ".tmp":  # private to this process (no locks)
            shutil.rmtree(parts, ignore_errors=True)


def _make_parts(
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
            _remove_damaged(path, source.name)
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
            first.extend(map(str, block.problems[: _LISTED - len(first)]))
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
    temporary = _temporary(folder)
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
    summaries = [_summary(part) for part in parts]
    longer = sum(summary["longer"] for summary in summaries)
    skipped = sum(summary["skipped"] for summary in summaries)
    first = list(itertools.chain.from_iterable(summary["first"] for summary in summaries))[:_LISTED]
    left_out = f"{longer:,} documents of more than {tokeniser.entry.max_tokens} tokens left out"
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
            summary = token_cache.write(
                temporary, add_mismatched_answers(units, name) if paired else units, tokeniser.columns
            )
        template_notes = dict.fromkeys(line for each in summaries for line in each["said"])
        counts = f"{summary['documents']:,} documents of {summary['tokens']:,} tokens"
        notes = [f"{name}: {tokeniser.form}, {counts}", *source_notes, *(f"{name}: {line}" for line in template_notes)]
        losses = []
        if across := sum(summary["across"] for summary in summaries):
            example = next(line for summary in summaries for line in summary["first_across"])
            notes.append(f"{name}: {say_across(across, example)}")
        if skipped:
            more = ["..."] if skipped > _LISTED else []
            losses.append("\n  ".join([f"{skipped:,} samples skipped:", *first, *more]))
        if longer:
            losses.append(f"{name}: {left_out}")
        if unused := dict.fromkeys(column for each in summaries for column in each["unused"]):
            losses.append(f"{name}: {unused_columns(unused)}")
        token_cache.finish(temporary, summary | {"request": request}, name, skipped, notes, losses)


def unused_columns(columns: Collection[str]) -> str:
    """Return a line for the user about columns that are not used, listed as in `TokenisedBlock.unused`."""
    are = "column is" if len(columns) == 1 else "columns are"
    return f"{len(columns)} {are} not used: {', '.join(columns)}"
