"""Documents: every source rendered and tokenised once, into files that later runs map into memory at once.

The folder of a cache is named after its content: the identity of the samples, the options that shape a document, the
tokenizer. Processes that start together do the work once: the first holds a lock, and the finished folder appears by
one rename.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Bool, Float16, Int32, Int64
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxtune.config.schema import Dataset
from jaxtune.data import formats, sources
from jaxtune.data.encoding import Encoded, Encoder, Refused, Rendered
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Converted = tuple[str, Rendered | Encoded, bool]
"""Where it comes from, the document, and whether it is running text."""

_CACHE_FORMAT = 2
_BATCH_CHARS = 2**22
_BATCH_DOCUMENTS = 1024
# Samples that cannot be trained on are counted before they are reported, but hopeless data is not read to its end.
_MAX_REFUSED = 1000
_LISTED = 5  # of the samples that are skipped
_PROGRESS = (
    SpinnerColumn(),
    TextColumn("tokenising {task.description}: {task.fields[documents]:,} documents", markup=False),
    TextColumn("{task.completed:,.0f} characters"),
    TimeElapsedColumn(),
)


@dataclass(frozen=True)
class Documents:
    """Tokenised documents.

    Attributes:
        key: a hash of all tokens and weights: runs with the same key have the same data, wherever it came from.
        tokens: all documents, one after the other.
        loss_weights: weight of predicting each token.
        offsets: where each document starts, and the end.
        targets: trained tokens of each document (the first token of a document is never predicted).
        continuous: whether a document is running text, which may be cut anywhere, as opposed to an answer or dialogue.
        chosen: which of the documents these are; all, or one side of `hold_out`.
        skipped: samples left out under data.on_bad_row='skip'.
        notes: a line for each source: what was read, as what.
    """

    key: str
    tokens: Int32[np.ndarray, "tokens"]
    loss_weights: Float16[np.ndarray, "tokens"]
    offsets: Int64[np.ndarray, "documents+1"]
    targets: Int64[np.ndarray, "documents"]
    continuous: Bool[np.ndarray, "documents"]
    chosen: Int64[np.ndarray, "chosen"]
    skipped: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def lengths(self) -> Int64[np.ndarray, "chosen"]:
        """Tokens of each chosen document."""
        return self.offsets[self.chosen + 1] - self.offsets[self.chosen]

    def read(self, i: int, start: int, stop: int) -> tuple[Int32[np.ndarray, "n"], Float16[np.ndarray, "n"]]:
        """Tokens [start, stop) of the i-th chosen document, up to its end, and the weight of predicting each."""
        document = self.chosen[i]
        begin = self.offsets[document]
        part = slice(begin + start, min(begin + stop, self.offsets[document + 1]))
        return self.tokens[part], self.loss_weights[part]


def tokenize(
    entries: tuple[Dataset, ...],
    tokenizer: "PreTrainedTokenizerFast",
    cache_dir: Path,
    on_bad_row: Literal["error", "skip"] = "error",
) -> Documents:
    """Tokenises data.datasets (or data.eval_datasets), or loads them from the cache.

    Raises:
        UserError: a source is not there; a sample cannot be read or trained on and may not be skipped; nothing is left.
    """
    if not entries:
        raise UserError("data.datasets is empty; add an entry with jaxtune.config.dataset(path=...)")
    found = [sources.open_source(entry) for entry in entries]
    name = _folder_name(entries, found, tokenizer, on_bad_row)
    folder = cache_dir / name
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{name}.lock") as locked:
        if locked:
            for left_by_a_kill in cache_dir.glob(f"{name}.{socket.gethostname()}.*.tmp"):
                shutil.rmtree(left_by_a_kill, ignore_errors=True)
        if not folder.exists():
            _write(folder, list(zip(found, entries)), tokenizer, on_bad_row)
        return _load(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether the lock was to be had: a file system without locks only costs time, as the first rename counts."""
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


def _folder_name(
    entries: tuple[Dataset, ...], found: list[sources.Source], tokenizer: "PreTrainedTokenizerFast", on_bad_row: str
) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left behind by whoever used the tokenizer last; without effect on what is done here.
    del backend["truncation"], backend["padding"]
    parts = [
        _CACHE_FORMAT,
        on_bad_row,
        [(source.identity, dataclasses.asdict(entry)) for source, entry in zip(found, entries)],
        backend,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


class _Problems:
    """What is wrong with the samples so far."""

    def __init__(self, on_bad_row: str):
        self._skip = on_bad_row == "skip"
        self.count = 0
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
                f"{self.count} samples cannot be trained on; the first: {self.first[0]}. Mend them, or leave them out "
                "with data.on_bad_row='skip'"
            )


def _write(
    folder: Path, found: list[tuple[sources.Source, Dataset]], tokenizer: "PreTrainedTokenizerFast", on_bad_row: str
):
    """Tokenises into a temporary folder beside `folder`, then renames it."""
    problems = _Problems(on_bad_row)
    notes: list[str] = []
    content = hashlib.sha256()
    lengths, targets, continuous = [], [], []
    temporary = folder.with_name(f"{folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        with (
            (temporary / "tokens.bin").open("wb") as tokens,
            (temporary / "loss_weights.bin").open("wb") as loss_weights,
            Progress(*_PROGRESS, console=Console(stderr=True), transient=True) as progress,
        ):
            for source, entry in found:
                before, said = len(lengths), {}
                line = progress.add_task(source.name, total=None, documents=0)
                encode = Encoder(tokenizer, partial(progress.advance, line))
                converted = _converted(source, entry, tokenizer, problems, said.setdefault)
                for document, is_text in _encoded(converted, encode, problems):
                    for array, file in ((document.tokens, tokens), (document.loss_weights, loss_weights)):
                        file.write(array.data)  # whose error, unlike that of tofile, says that the disk is full
                        content.update(array.data)
                    lengths.append(len(document.tokens))
                    targets.append(np.count_nonzero(document.loss_weights[1:]))
                    continuous.append(is_text)
                    progress.update(line, documents=len(lengths) - before)
                if len(lengths) == before:
                    problems.raise_refused()
                    first = f"; the first problem: {problems.first[0]}" if problems.first else ""
                    raise UserError(f"data: {source.name} has no sample that can be trained on{first}")
                progress.remove_task(line)
                form, *others = said
                notes.append(
                    f"{source.name}: {form}, {len(lengths) - before:,} documents of {sum(lengths[before:]):,} tokens"
                )
                notes += [f"{source.name}: {line}" for line in others]
        problems.raise_refused()
        if problems.count:
            more = ["..."] if problems.count > _LISTED else []
            notes.append("\n  ".join([f"{problems.count:,} samples skipped:", *map(str, problems.first), *more]))
        np.save(temporary / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
        np.save(temporary / "targets.npy", np.array(targets, np.int64))
        np.save(temporary / "continuous.npy", np.array(continuous, bool))
        content.update(np.array(lengths, np.int64).tobytes())
        summary = {"key": content.hexdigest(), "skipped": problems.count, "notes": notes}
        (temporary / "summary.json").write_text(json.dumps(summary))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encoded(converted: Iterable[_Converted], encode: Encoder, problems: _Problems) -> Iterator[tuple[Encoded, bool]]:
    """The documents of a source, and whether each is running text."""
    pending, chars = [], 0
    for item in converted:
        pending.append(item)
        chars += len(item[1].text) if isinstance(item[1], Rendered) else 0
        if len(pending) == _BATCH_DOCUMENTS or chars >= _BATCH_CHARS:
            yield from _finished(pending, encode, problems)
            pending, chars = [], 0
    yield from _finished(pending, encode, problems)


def _converted(
    source: sources.Source, entry: Dataset, tokenizer: "PreTrainedTokenizerFast", problems: _Problems, say: formats.Say
) -> Iterator[_Converted]:
    """The samples of a source as documents. The first one decides the type, which is said; so is what is not used."""
    convert, continuous, columns_seen = None, False, set()
    for where, sample in source.read(problems.report):
        if convert is None:
            try:
                settled, columns = formats.detect(entry, list(sample))
            except UserError as error:
                problems.report(UserError(f"{where}: {error}"))
                continue
            convert, continuous = formats.make_format(settled, tokenizer, say), settled.type in ("text", "tokenized")
            say(f"{settled.type} from {columns}")
        if not sample.keys() <= columns_seen:
            for line in formats.unused(settled, sample):
                say(line)
            columns_seen |= sample.keys()
        try:
            document = convert(sample)
            if isinstance(document, Rendered):
                document.text.encode()
        except UnicodeEncodeError:
            problems.report(UserError(f"{where}: its text holds half a character (a lone surrogate)"))
        except UserError as error:
            problems.report(type(error)(f"{where}: {error}"))
        else:
            yield where, document, continuous


def _finished(pending: list[_Converted], encode: Encoder, problems: _Problems) -> Iterator[tuple[Encoded, bool]]:
    """Tokens of what is only rendered, without the documents that hold no target."""
    texts = iter(encode([document for _, document, _ in pending if isinstance(document, Rendered)]))
    for where, document, continuous in pending:
        encoded = next(texts) if isinstance(document, Rendered) else document
        if encoded.loss_weights[1:].any():
            yield encoded, continuous
        else:
            problems.report(Refused(f"{where}: no token of it is a target"))


def _load(folder: Path) -> Documents:
    summary = json.loads((folder / "summary.json").read_text())
    with contextlib.suppress(OSError):  # of a cache that others own
        os.utime(folder / "summary.json")  # when it was last used, for jaxtune.cache
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("offsets", "targets", "continuous")}
    count = arrays["offsets"][-1]
    for name, dtype in (("tokens", np.int32), ("loss_weights", np.float16)):
        arrays[name] = np.memmap(folder / f"{name}.bin", dtype, mode="r")
        if len(arrays[name]) != count:
            raise UserError(f"{folder} is damaged: {name}.bin does not hold {count} tokens; delete the folder")
    chosen = np.arange(len(arrays["targets"]))
    return Documents(summary["key"], **arrays, chosen=chosen, skipped=summary["skipped"], notes=tuple(summary["notes"]))
