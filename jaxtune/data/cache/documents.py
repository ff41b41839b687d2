"""The cache of tokenised documents: a source is rendered and tokenised once; later runs map the files into memory.

Each dataset entry has its own folder in the cache, named by a hash of everything that shapes its tokens: the identity
of its samples, its options, the tokenizer. The other entries, their order, and how documents are held out, shuffled
and packed may change without tokenising again. Processes that start together do the work once: the first holds a lock,
and the finished folder appears in one rename.

While the work is unfinished it is kept in parts (`parts.py`), which several machines can make (`prepare_shard`).

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
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jaxtune.checkpoint import manifest
from jaxtune.config.schema import ChatOptions, Dataset
from jaxtune.data.cache import token_cache
from jaxtune.data.cache.parts import (
    Shard,
    make_parts,
    parts_of,
    read_summary,
    remove_damaged,
    temporary_folder,
    write_entry,
)
from jaxtune.data.cache.tokenising import Tokeniser
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.reading import sources
from jaxtune.errors import UserError, format_count, hide_secrets
from jaxtune.tokenizer_type import Tokenizer

log = logging.getLogger("jaxtune")


def tokenize(
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    cache_dir: Path,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: ChatOptions = ChatOptions(),
    num_proc: int = 1,
    cache_only: bool = False,
    images: ImageReader | None = None,
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
        images: finds images; None: samples with images are refused.

    Raises:
        UserError: a source does not exist; a sample cannot be read or trained on and may not be skipped; no sample is
            left; with `cache_only`, the cache has no such folder.
    """
    shaping = hash_shaping(tokenizer, on_bad_row, labels, chat, images)
    if cache_only:
        return Documents.concatenate([_last_made(entry, cache_dir, shaping) for entry in entries], images)
    loaded = []
    for source, entry, folder, source_notes in _find_sources(entries, tokenizer, cache_dir, shaping):
        if folder.exists() and not manifest.verify(folder):  # without the lock, so that processes verify concurrently
            part = token_cache.load(folder)
            note = f"{source.name}: from the cache of {_time_made(folder):%Y-%m-%d %H:%M}"
            loaded.append(dataclasses.replace(part, notes=(*part.notes, note)))
            continue
        with _hold_lock(cache_dir / f"{folder.name}.lock") as locked, explain_full_disk(cache_dir):
            remove_damaged(folder, source.name)
            if locked:
                # Nobody but the holder of the lock writes such folders on this host, so their process was killed.
                for left_by_a_kill in cache_dir.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
                    shutil.rmtree(left_by_a_kill, ignore_errors=True)
            if not folder.exists():
                # Without locks another process may be writing parts at the same time, so this one writes its own,
                # unless `prepare_shard` has left parts to join.
                shared = locked or parts_of(folder).exists()
                parts = parts_of(folder) if shared else temporary_folder(folder, "parts")
                tokeniser = Tokeniser(entry, tokenizer, labels, chat, images)
                request = _request(entry, shaping)
                write_entry(folder, parts, source, tokeniser, on_bad_row, num_proc, request, source_notes)
            loaded.append(token_cache.load(folder))
    return Documents.concatenate(loaded, images)


def prepare_shard(
    entries: tuple[Dataset, ...],
    tokenizer: Tokenizer,
    cache_dir: Path,
    shard: Shard,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: ChatOptions = ChatOptions(),
    num_proc: int = 1,
    images: ImageReader | None = None,
) -> list[str]:
    """Tokenise a shard of the parts that `tokenize` joins later, and return a line for the user about each entry.

    Arguments and errors as in `tokenize`, except that a shard may have no samples.
    """
    lines = []
    shaping = hash_shaping(tokenizer, on_bad_row, labels, chat, images)
    for source, entry, folder, _ in _find_sources(entries, tokenizer, cache_dir, shaping):
        # Shards run at the same time. The shared lock keeps `tokenize` from joining parts that they still write.
        with _hold_lock(cache_dir / f"{folder.name}.lock", shared=True), explain_full_disk(cache_dir):
            remove_damaged(folder, source.name)
            if folder.exists():
                lines.append(f"{source.name}: it is whole in the cache already")
                continue
            tokeniser = Tokeniser(entry, tokenizer, labels, chat, images)
            count = make_parts(parts_of(folder), source, tokeniser, on_bad_row, num_proc, shard)
            shard_parts = range(shard[0], count, shard[1])
            documents = sum(read_summary(parts_of(folder) / str(part))["documents"] for part in shard_parts)
            existing = sum((parts_of(folder) / str(part)).exists() for part in range(count))
            made = (
                f"{format_count(documents, 'document')} in the {len(shard_parts)} parts of shard {shard[0]}/{shard[1]}"
            )
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
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]  # 128 bits


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


def hash_shaping(
    tokenizer: Tokenizer,
    on_bad_row: str,
    labels: tuple[str, ...],
    chat: ChatOptions,
    images: ImageReader | None = None,
) -> str:
    """Return a hash of the settings that shape the tokens, labels and images of every entry."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())  # the content of tokenizer.json
    # State left by the last call of the tokenizer; `Encoder` does not use it.
    del backend["truncation"], backend["padding"]
    parts = [token_cache.FORMAT, on_bad_row, backend, tokenizer.chat_template, tokenizer.special_tokens_map]
    parts += labels
    # The tokenizer already has chat.template; chat.response_prefix is only used to generate.
    chat = dataclasses.replace(chat, template=None, response_prefix=None)
    parts += (
        [dataclasses.asdict(chat)] if chat != ChatOptions() else []
    )  # older folders, without the section, keep their name
    parts += [] if images is None else [images.identity]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
