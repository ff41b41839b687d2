"""Documents: every source is rendered and tokenised once, into files that later runs only map into memory.

Each dataset entry has its own folder in the cache, named by a hash of everything that shapes its tokens: the identity
of its samples, its options, the tokenizer. The other entries, their order, and how documents are held out, shuffled
and packed may change without tokenising again. Processes that start together do the work once: the first holds a lock,
and the finished folder appears in one rename.

Until then the work is in parts, each a folder that is kept: a run that is killed goes on after the last of them, and
several machines can make different parts (`prepare_shard`). Which samples are in a part depends on the samples alone.
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
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxtune.checkpoint import manifest
from jaxtune.config.schema import Chat, Dataset
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.tokenising import Items, Tokenised, Tokeniser, say_across
from jaxtune.data.cache.workers import mapped
from jaxtune.data.chat.encoding import Refused
from jaxtune.data.formats.preferences import with_other_answers
from jaxtune.data.formats.units import Documents, Part, Unit
from jaxtune.data.reading import sources
from jaxtune.data.reading.readers import size_of
from jaxtune.errors import UserError, hide_secrets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("jaxtune")

# A block is tokenised at once; a part is what a killed run loses at most. Where these change, the name in `_parts_of`
# must: parts of other sizes hold other samples.
_BLOCK_SIZE, _BLOCK_SAMPLES = 2**22, 1024
_PART_SIZE = 2**26
# Samples that cannot be trained on are counted before the error is raised, but after this many the rest is not read.
_MAX_REFUSED = 1000
_LISTED = 5  # skipped samples that are listed
_PROGRESS = (
    SpinnerColumn(),
    TextColumn("tokenising {task.description}: {task.fields[documents]:,} documents", markup=False),
    TextColumn("{task.completed:,.0f} characters"),
    TimeElapsedColumn(),
)

Shard = tuple[int, int]
"""(number, count): of all parts of an entry, those whose number is `number` modulo `count`."""


def tokenize(
    entries: tuple[Dataset, ...],
    tokenizer: "PreTrainedTokenizerFast",
    cache_dir: Path,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: Chat = Chat(),
    num_proc: int = 1,
    cache_only: bool = False,
) -> Documents:
    """Tokenises data.datasets (or data.eval_datasets), or loads them from the cache, where each entry has a folder.

    Args:
        entries: the entries.
        tokenizer: the tokenizer.
        cache_dir: made if it is not there.
        on_bad_row: data.on_bad_row.
        labels: the names of a classifier's labels, by number.
        chat: what of conversations is trained.
        num_proc: processes that tokenise; 1: this one, whose tokenizer has threads.
        cache_only: read no source: take what was last made of such an entry with such a tokenizer.

    Raises:
        UserError: a source does not exist; a sample cannot be read or trained on and may not be skipped; no sample is
            left; with `cache_only`, nothing was made.
    """
    shaping = shaping_of(tokenizer, on_bad_row, labels, chat)
    if cache_only:
        return Documents.joined([_last_made(entry, cache_dir, shaping) for entry in entries])
    found = []
    for source, entry, folder, said in _found(entries, tokenizer, cache_dir, shaping):
        if folder.exists() and not manifest.verify(folder):  # without the lock, so that processes verify side by side
            part = token_cache.load(folder)
            note = f"{source.name}: from the cache of {_made(folder):%Y-%m-%d %H:%M}"
            found.append(dataclasses.replace(part, notes=(*part.notes, note)))
            continue
        with _locked(cache_dir / f"{folder.name}.lock") as locked, full_disk_is_named(cache_dir):
            _remove_damaged(folder, source.name)
            if locked:
                for left_by_a_kill in cache_dir.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
                    shutil.rmtree(left_by_a_kill, ignore_errors=True)
            if not folder.exists():
                shared = locked or _parts_of(folder).exists()  # without locks, shards may have been made all the same
                parts = _parts_of(folder) if shared else _temporary(folder, "parts")
                tokeniser = Tokeniser(entry, tokenizer, labels, chat)
                _write(folder, parts, source, tokeniser, on_bad_row, num_proc, _request(entry, shaping), said)
            found.append(token_cache.load(folder))
    return Documents.joined(found)


def prepare_shard(
    entries: tuple[Dataset, ...],
    tokenizer: "PreTrainedTokenizerFast",
    cache_dir: Path,
    shard: Shard,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: Chat = Chat(),
    num_proc: int = 1,
) -> list[str]:
    """Makes some of the parts that `tokenize` joins later. Returns a line for the user about each entry.

    Args and errors as of `tokenize`, but that a shard may have no samples.
    """
    lines = []
    shaping = shaping_of(tokenizer, on_bad_row, labels, chat)
    for source, entry, folder, _ in _found(entries, tokenizer, cache_dir, shaping):
        with _locked(cache_dir / f"{folder.name}.lock", shared=True), full_disk_is_named(cache_dir):
            _remove_damaged(folder, source.name)
            if folder.exists():
                lines.append(f"{source.name}: it is whole in the cache already")
                continue
            tokeniser = Tokeniser(entry, tokenizer, labels, chat)
            count = _make_parts(_parts_of(folder), source, tokeniser, on_bad_row, num_proc, shard)
            mine = range(shard[0], count, shard[1])
            documents = sum(_summary(_parts_of(folder) / str(part))["documents"] for part in mine)
            there = sum((_parts_of(folder) / str(part)).exists() for part in range(count))
            made = f"{documents:,} documents in the {len(mine)} parts of shard {shard[0]}/{shard[1]}"
            lines.append(f"{source.name}: {made}; of all {count} parts {there} are there")
    return lines


def _found(
    entries: tuple[Dataset, ...], tokenizer: "PreTrainedTokenizerFast", cache_dir: Path, shaping: str
) -> list[tuple[sources.Source, Dataset, Path, list[str]]]:
    """Each entry with its source, its folder in the cache, and lines for the user, which are there once it was read."""
    if not entries:
        raise UserError("data.datasets is empty; add an entry with jaxtune.config.dataset(path=...)")
    found = []
    for entry in entries:
        said: list[str] = []
        source = sources.open_source(entry, len(tokenizer), say=said.append)
        found.append((source, entry, cache_dir / folder_name(source, entry, shaping), said))
    cache_dir.mkdir(parents=True, exist_ok=True)
    return found


def _last_made(entry: Dataset, cache_dir: Path, shaping: str) -> Part:
    """What was last made of an entry, whatever its source is now."""
    name = entry.path if isinstance(entry.path, str) else ", ".join(entry.path or ())
    made = {
        file.parent: file.stat().st_mtime
        for file in cache_dir.glob(f"*/{manifest.MANIFEST}")
        if not file.parent.suffix and token_cache.read_summary(file.parent).get("request") == _request(entry, shaping)
    }
    if not made:
        raise UserError(
            f"data.cache_only: {cache_dir} holds nothing made of {name} with these options and this tokenizer; run "
            "`python -m jaxtune.prepare` where its source is, with the same data.cache_dir"
        )
    folder = max(made, key=made.__getitem__)
    if problems := manifest.verify(folder):
        raise UserError(
            f"data.cache_only: {folder} is damaged ({problems[0]}); delete it, and run `python -m jaxtune.prepare` "
            f"where the source {name} is"
        )
    part = token_cache.load(folder)
    older = f"; {len(made) - 1} older ones are not used" if len(made) > 1 else ""
    note = f"{name}: from the cache of {_made(folder):%Y-%m-%d %H:%M}, its source was not looked at{older}"
    return dataclasses.replace(part, notes=(*part.notes, note))


def _made(folder: Path) -> datetime.datetime:
    """When the documents in a folder were made."""
    return datetime.datetime.fromtimestamp((folder / manifest.MANIFEST).stat().st_mtime)


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / token_cache.SUMMARY).read_text())


def _remove_damaged(folder: Path, name: str) -> None:
    """Removes a folder of documents, finished or a part, that does not agree with its manifest, and says so."""
    if problems := manifest.verify(folder) if folder.exists() else ():
        log.warning("data: %s is damaged (%s), so %s is tokenised again", folder, problems[0], name)
        removed = _temporary(folder, "damaged")
        with contextlib.suppress(FileNotFoundError):  # another shard's process was faster
            folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


@contextlib.contextmanager
def full_disk_is_named(folder: Path) -> Iterator[None]:
    """Raises UserError, which names the folder and its option, where it has no room for what is written into it."""
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
def _locked(path: Path, shared: bool = False) -> Iterator[bool]:
    """Holds a lock; yields False on a file system without locks. That only costs time: the first rename wins."""
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            except OSError:
                yield False
                return
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                yield True
                return  # else `jaxtune cache` has just removed the file that was waited for


def folder_name(source: sources.Source, entry: Dataset, shaping: str) -> str:
    """A hash of everything that shapes an entry's documents; `shaping`: what `shaping_of` returned."""
    parts = [source.identity, _given(entry), shaping]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _request(entry: Dataset, shaping: str) -> str:
    """What `folder_name` says of an entry, but which state of its source it is."""
    return hashlib.sha256(json.dumps([_given(entry), shaping], default=str).encode()).hexdigest()


def _given(entry: Dataset) -> dict[str, Any]:
    # All options of an entry say what is read and how it is rendered, but its weight, which says how often. Only those
    # that are set are in the name, so that it stays when options are added.
    options = dataclasses.asdict(dataclasses.replace(entry, weight=None)).items()
    given = {option: value for option, value in options if value != getattr(Dataset(), option)}
    return json.loads(hide_secrets(json.dumps(given, default=str)))  # with another token it is the same data


def shaping_of(tokenizer: "PreTrainedTokenizerFast", on_bad_row: str, labels: tuple[str, ...], chat: Chat) -> str:
    """A hash of what shapes the tokens and labels of every entry."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Set by whoever used the tokenizer last; the encoder here does not use them.
    del backend["truncation"], backend["padding"]
    parts = [token_cache.FORMAT, on_bad_row, backend, tokenizer.chat_template, tokenizer.special_tokens_map]
    parts += labels
    # The template is the tokenizer's by now, and the other is of generation.
    chat = dataclasses.replace(chat, template=None, response_prefix=None)
    parts += [dataclasses.asdict(chat)] if chat != Chat() else []  # so that documents made before have their name
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class _Problems:
    """What is wrong with the samples so far."""

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.count = 0
        self.first: UserError | None = None

    def report(self, error: UserError):
        if self.skip:
            return
        if not isinstance(error, Refused):
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
    source: sources.Source,
    tokeniser: Tokeniser,
    on_bad_row: str,
    num_proc: int,
    request: str,
    said: Sequence[str],
) -> None:
    """Makes the parts that are missing, and joins all parts. `said`: lines about the source, once it was read."""
    try:
        count = _make_parts(parts, source, tokeniser, on_bad_row, num_proc)
        _join([parts / str(part) for part in range(count)], folder, source.name, tokeniser, request, said)
        shutil.rmtree(parts)
    finally:
        with contextlib.suppress(OSError):  # finished parts are kept for the next run
            parts.rmdir()
        if parts.suffix == ".tmp":
            shutil.rmtree(parts, ignore_errors=True)


def _make_parts(
    parts: Path,
    source: sources.Source,
    tokeniser: Tokeniser,
    on_bad_row: str,
    num_proc: int,
    shard: Shard = (0, 1),
) -> int:
    """Makes those of the shard that are not there; returns how many parts there are."""
    number, shards = shard
    for path in parts.glob("*"):
        if path.name.isdigit() and int(path.name) % shards == number:
            _remove_damaged(path, source.name)
    there = {int(path.name) for path in parts.glob("*") if path.name.isdigit()}
    if left_by_a_kill := there & set(range(number, max(there, default=0) + 1, shards)):
        log.info("data: %s: goes on with %d parts that are in the cache", source.name, len(left_by_a_kill))
    parts.mkdir(exist_ok=True)
    problems, count = _Problems(on_bad_row), 0

    def blocks() -> Iterator[tuple[int, Items]]:
        nonlocal count
        for part, items in _blocks(source):
            count = part + 1
            if part % shards == number and part not in there:
                yield part, items
            elif tokeniser.form is None:
                tokeniser.settle(items)

    with Progress(*_PROGRESS, console=Console(stderr=True, force_jupyter=False), transient=True) as progress:
        line = progress.add_task(source.name, total=None, documents=0)

        def found() -> Iterator[tuple[int, Tokenised]]:
            documents = 0
            for part, block in _tokenised(tokeniser, blocks(), num_proc):
                for problem in block.problems:
                    problems.report(problem)
                documents += len(block.units)
                progress.update(line, advance=block.characters, documents=documents)
                yield part, block

        for part, of_part in itertools.groupby(found(), itemgetter(0)):
            _write_part(parts / str(part), (block for _, block in of_part), source.name, tokeniser, problems)
    problems.raise_refused()
    return count


def _blocks(source: sources.Source) -> Iterator[tuple[int, Items]]:
    """The samples in blocks, each with the number of the part that it belongs to; at least one block."""
    items: Items = []
    size = part_size = part = 0
    failed = None
    try:
        for where, sample in source.read(items.append):
            items.append((where, sample))
            size += size_of(sample)
            if size >= _BLOCK_SIZE or len(items) >= _BLOCK_SAMPLES:
                yield part, items.copy()
                items.clear()
                part_size += max(size, _BLOCK_SIZE // 8)
                size = 0
                if part_size >= _PART_SIZE:
                    part, part_size = part + 1, 0
    except UserError as error:  # what is before it comes first, as without blocks
        failed = error
    if items or not (part or part_size):
        yield part, items
    if failed is not None:
        raise failed


def _tokenised(
    tokeniser: Tokeniser, blocks: Iterator[tuple[int, Items]], num_proc: int
) -> Iterator[tuple[int, Tokenised]]:
    """The blocks tokenised; by other processes as soon as the type is decided and if there is more than one block."""
    part = partial(_block_of, tokeniser)
    for block in blocks:
        yield part(block)
        if num_proc > 1 and tokeniser.form and (more := next(blocks, None)) is not None:
            yield from mapped(part, itertools.chain([more], blocks), num_proc)


def _block_of(tokeniser: Tokeniser, block: tuple[int, Items]) -> tuple[int, Tokenised]:
    return block[0], tokeniser(block[1])


def _write_part(
    folder: Path, blocks: Iterator[Tokenised], name: str, tokeniser: Tokeniser, problems: _Problems
) -> None:
    """Writes into a temporary folder beside `folder`, then renames it."""
    said: dict[str, None] = {}
    unused: dict[str, None] = {}
    first: list[str] = []
    first_across: list[str] = []
    longer = skipped = across = 0

    def units() -> Iterator[Unit]:
        nonlocal longer, skipped, across
        for block in blocks:
            said.update(dict.fromkeys(block.said))
            unused.update(dict.fromkeys(block.unused))
            first.extend(map(str, block.problems[: _LISTED - len(first)]))
            skipped += len(block.problems)
            longer += block.longer
            first_across.extend(block.across[: 1 - len(first_across)])
            across += len(block.across)
            yield from block.units

    with _appearing(folder) as temporary:
        summary = token_cache.write(temporary, units(), tokeniser.columns)
        if problems.count:  # an error is to come
            return
        more = {"said": list(said), "unused": list(unused), "first": first, "longer": longer}
        more |= {"across": across, "first_across": first_across}
        token_cache.finish(temporary, summary | more, name, skipped)


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes that name if it is finished by then."""
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


def _join(parts: list[Path], folder: Path, name: str, tokeniser: Tokeniser, request: str, said: Sequence[str]) -> None:
    """Makes one folder of the parts, which are as if they had been written at once."""
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
    with _appearing(folder) as temporary:
        paired = tokeniser.entry.type == "unpaired_preference"
        if len(parts) == 1 and not paired:
            temporary.rmdir()
            parts[0].rename(temporary)
            summary = {name: summaries[0][name] for name in token_cache.CONTENT}
        else:
            units = itertools.chain.from_iterable(token_cache.units_of(token_cache.load(part)) for part in parts)
            summary = token_cache.write(
                temporary, with_other_answers(units, name) if paired else units, tokeniser.columns
            )
        others = dict.fromkeys(line for each in summaries for line in each["said"])
        counts = f"{summary['documents']:,} documents of {summary['tokens']:,} tokens"
        notes = [f"{name}: {tokeniser.form}, {counts}", *said, *(f"{name}: {line}" for line in others)]
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
    """The line about columns that are not used, as `Tokenised.unused` has them."""
    are = "column is" if len(columns) == 1 else "columns are"
    return f"{len(columns)} {are} not used: {', '.join(columns)}"
