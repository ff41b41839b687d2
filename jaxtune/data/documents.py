"""Documents: every source is rendered and tokenised once, into files that later runs only map into memory.

Each dataset entry has its own folder in the cache, named by a hash of everything that shapes its tokens: the identity
of its samples, its options, the tokenizer. The other entries, their order, and how documents are held out, shuffled
and packed may change without tokenising again. Processes that start together do the work once: the first holds a lock,
and the finished folder appears in one rename.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxtune.config.schema import Chat, Dataset
from jaxtune.data import cache, formats, sources
from jaxtune.data.columns import LABEL
from jaxtune.data.encoding import Encoded, Encoder, Pair, Refused, Rendered
from jaxtune.data.preferences import shortened, with_other_answers
from jaxtune.data.units import Documents, Unit
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Converted = tuple[str, Rendered | Encoded | Pair, bool]
"""(where the sample comes from, the document, whether it is running text)."""

_BATCH_CHARS = 2**22
_BATCH_DOCUMENTS = 1024
# Samples that cannot be trained on are counted before the error is raised, but after this many the rest is not read.
_MAX_REFUSED = 1000
_LISTED = 5  # skipped samples that are listed
_PROGRESS = (
    SpinnerColumn(),
    TextColumn("tokenising {task.description}: {task.fields[documents]:,} documents", markup=False),
    TextColumn("{task.completed:,.0f} characters"),
    TimeElapsedColumn(),
)


def tokenize(
    entries: tuple[Dataset, ...],
    tokenizer: "PreTrainedTokenizerFast",
    cache_dir: Path,
    on_bad_row: Literal["error", "skip"] = "error",
    labels: tuple[str, ...] = (),
    chat: Chat = Chat(),
) -> Documents:
    """Tokenises data.datasets (or data.eval_datasets), or loads them from the cache, where each entry has a folder.

    `labels`: the names of a classifier's labels, by number; `chat`: what of conversations is trained.

    Raises:
        UserError: a source does not exist; a sample cannot be read or trained on and may not be skipped; no sample is
            left.
    """
    if not entries:
        raise UserError("data.datasets is empty; add an entry with jaxtune.config.dataset(path=...)")
    found = [sources.open_source(entry, len(tokenizer)) for entry in entries]
    shaping = _shaping(tokenizer, on_bad_row, labels, chat)
    cache_dir.mkdir(parents=True, exist_ok=True)
    parts = []
    for source, entry in zip(found, entries):
        folder = cache_dir / _folder_name(source, entry, shaping)
        with _locked(cache_dir / f"{folder.name}.lock") as locked:
            if locked:
                for left_by_a_kill in cache_dir.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
                    shutil.rmtree(left_by_a_kill, ignore_errors=True)
            if not folder.exists():
                _write(folder, source, entry, tokenizer, on_bad_row, labels, chat)
            parts.append(cache.load(folder))
    return Documents.joined(parts)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock; yields False on a file system without locks. That only costs time: the first rename wins."""
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                yield False
                return
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                yield True
                return  # else `jaxtune cache` has just removed the file that was waited for


def _folder_name(source: sources.Source, entry: Dataset, shaping: str) -> str:
    # All options of an entry say what is read and how it is rendered, but its weight, which says how often. Only those
    # that are set are in the name, so that it stays when options are added.
    options = dataclasses.asdict(dataclasses.replace(entry, weight=None)).items()
    given = {option: value for option, value in options if value != getattr(Dataset(), option)}
    parts = [source.identity, given, shaping]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def _shaping(tokenizer: "PreTrainedTokenizerFast", on_bad_row: str, labels: tuple[str, ...], chat: Chat) -> str:
    """A hash of what shapes the tokens and labels of every entry."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Set by whoever used the tokenizer last; the encoder here does not use them.
    del backend["truncation"], backend["padding"]
    parts = [cache.FORMAT, on_bad_row, backend, tokenizer.chat_template, tokenizer.special_tokens_map]
    parts += labels
    # The template is the tokenizer's by now, and the other is of generation.
    chat = dataclasses.replace(chat, template=None, response_prefix=None)
    parts += [dataclasses.asdict(chat)] if chat != Chat() else []  # so that documents made before have their name
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class _Problems:
    """What is wrong with the samples so far, and how many documents are longer than they may be."""

    def __init__(self, on_bad_row: str):
        self._skip = on_bad_row == "skip"
        self.count = self.longer = 0
        self.first: list[UserError] = []

    def report(self, error: UserError):
        if not self._skip and not isinstance(error, Refused):
            raise error
        self.count += 1
        if len(self.first) < _LISTED:
            self.first.append(error)
        if not self._skip and self.count == _MAX_REFUSED:
            self.raise_refused()

    def raise_refused(self):
        if self.count and not self._skip:
            raise UserError(
                f"{self.count} samples cannot be trained on; the first: {self.first[0]}. Fix them, or leave them out "
                "with data.on_bad_row='skip'"
            )


def _write(
    folder: Path,
    source: sources.Source,
    entry: Dataset,
    tokenizer: "PreTrainedTokenizerFast",
    on_bad_row: str,
    labels: tuple[str, ...],
    chat: Chat,
):
    """Tokenises into a temporary folder beside `folder`, then renames it."""
    problems, said = _Problems(on_bad_row), {}
    temporary = folder.with_name(f"{folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        with Progress(*_PROGRESS, console=Console(stderr=True), transient=True) as progress:
            line = progress.add_task(source.name, total=None, documents=0)
            encode = Encoder(tokenizer, partial(progress.advance, line))
            converted = _converted(source, entry, tokenizer, problems, said.setdefault, labels, chat)

            def units() -> Iterator[Unit]:
                kept = _kept(_encoded(converted, encode, problems), entry, problems)
                for count, unit in enumerate(kept, start=1):
                    progress.update(line, documents=count)
                    yield unit

            together = with_other_answers(units()) if entry.type == "unpaired_preference" else units()
            summary = cache.write(temporary, together, formats.COLUMNS.get(entry.type, ()))
        problems.raise_refused()
        longer = f"{problems.longer:,} documents of more than {entry.max_tokens} tokens left out"
        if not summary["documents"]:
            why = f"; {longer}" if problems.longer else ""
            why += f"; the first problem: {problems.first[0]}" if problems.first else ""
            raise UserError(f"data: {source.name} has no sample that can be trained on{why}")
        form, *others = said
        counts = f"{summary['documents']:,} documents of {summary['tokens']:,} tokens"
        notes = [f"{source.name}: {form}, {counts}", *(f"{source.name}: {line}" for line in others)]
        notes += [f"{source.name}: {longer}"] if problems.longer else []
        if problems.count:
            more = ["..."] if problems.count > _LISTED else []
            notes.append("\n  ".join([f"{problems.count:,} samples skipped:", *map(str, problems.first), *more]))
        cache.finish(temporary, summary, source.name, problems.count, notes)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _kept(units: Iterable[Unit], entry: Dataset, problems: _Problems) -> Iterator[Unit]:
    """The units, prompts not longer than they may be, of at most so many tokens; counts the others."""
    most = entry.max_tokens
    for unit in units:
        if entry.max_prompt_tokens is not None:
            cut = tuple(shortened(document, entry.max_prompt_tokens) for document in unit.documents)
            unit = dataclasses.replace(unit, documents=cut)
        if most is not None and sum(len(document.tokens) for document in unit.documents) > most:
            problems.longer += 1
        else:
            yield unit


def _encoded(converted: Iterable[_Converted], encode: Encoder, problems: _Problems) -> Iterator[Unit]:
    """The documents of a source, each a unit."""
    pending, chars = [], 0
    for item in converted:
        pending.append(item)
        chars += sum(len(one.text) for one in _texts(item[1]))
        if len(pending) == _BATCH_DOCUMENTS or chars >= _BATCH_CHARS:
            yield from _finished(pending, encode, problems)
            pending, chars = [], 0
    yield from _finished(pending, encode, problems)


def _converted(
    source: sources.Source,
    entry: Dataset,
    tokenizer: "PreTrainedTokenizerFast",
    problems: _Problems,
    say: formats.Say,
    labels: tuple[str, ...],
    chat: Chat,
) -> Iterator[_Converted]:
    """The samples of a source as documents. The first decides the type; the type and unused columns are reported."""
    convert, continuous, columns_seen = None, False, set()
    for where, sample in source.read(problems.report):
        try:
            formats.refuse_images(sample)
            if convert is None:
                settled, columns = formats.detect(entry, sample)
        except UserError as error:
            problems.report(UserError(f"{where}: {error}"))
            continue
        if convert is None:
            convert = formats.make_format(settled, columns, tokenizer, say, labels, chat)
            continuous = settled.type in ("text", "tokenized")
            say(f"{settled.type} from {', '.join(columns)}")
        if not sample.keys() <= columns_seen:
            for line in formats.unused(settled, columns, sample):
                say(line)
            columns_seen |= sample.keys()
        try:
            document = convert(sample)
            for text in _texts(document):
                text.text.encode()
        except UnicodeEncodeError:
            problems.report(UserError(f"{where}: its text holds half a character (a lone surrogate)"))
        except UserError as error:
            problems.report(type(error)(f"{where}: {error}"))
        else:
            yield where, document, continuous


def _texts(document: Rendered | Encoded | Pair) -> tuple[Rendered, ...]:
    """What of a sample is to be tokenised."""
    match document:
        case Rendered():
            return (document,)
        case Pair():
            return document.documents
        case Encoded():
            return ()


def _finished(pending: list[_Converted], encode: Encoder, problems: _Problems) -> Iterator[Unit]:
    """Tokenises the rendered documents; leaves out, and reports, documents without a target or label."""
    texts = iter(encode([text for _, document, _ in pending for text in _texts(document)]))
    for where, document, continuous in pending:
        if isinstance(document, Pair):
            answers = tuple(next(texts) for _ in document.documents)
            if all(answer.loss_weights[1:].any() for answer in answers):
                yield Unit(answers, values=document.values)
            else:
                problems.report(Refused(f"{where}: no token of an answer is a target"))
            continue
        encoded = next(texts) if isinstance(document, Rendered) else document
        label = document.label if isinstance(document, Rendered) else None
        if label is not None and len(encoded.tokens):
            yield Unit((encoded,), values={LABEL.name: label})
        elif encoded.loss_weights[1:].any():
            yield Unit((encoded,), continuous)
        else:
            problems.report(Refused(f"{where}: no token of it is a target"))
