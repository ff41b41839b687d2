"""Tokenise samples to units, one block of samples at a time, in this process or in others."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxtune.columns import LABEL, Column
from jaxtune.config.schema import ChatOptions, Dataset
from jaxtune.data.chat.encoding import Encoded, Encoder, Rendered, RenderedUnit, UntrainableSample
from jaxtune.data.formats import sample_formats
from jaxtune.data.formats.image_messages import TYPES as IMAGE_TYPES
from jaxtune.data.formats.image_messages import ImageMessages
from jaxtune.data.formats.preferences import cut_document, cut_prompt
from jaxtune.data.formats.units import Unit
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.data.reading.readers import Sample, folder_of
from jaxtune.errors import UserError, format_count
from jaxtune.tokenizer_type import Tokenizer

Items = list[tuple[str, Sample] | UserError]
"""Samples, each with the place that it comes from; or the error of a sample that could not be read."""

_Converted = tuple[str, Rendered | Encoded | RenderedUnit]
"""The place that a sample comes from, and its document."""

_BATCH_CHARS = 2**22  # of one call of the tokenizer


@dataclass(frozen=True)
class TokenisedBlock:
    """The units of a block of samples, and the problems of the samples that gave none.

    Attributes:
        units: the units, in the order of their samples.
        places: index in the block of each unit's sample.
        longer: number of units left out because they are longer than the entry allows.
        problems: the errors of the other samples, in order.
        said: lines for the user; other blocks may have the same lines.
        unused: columns that are not used; other blocks may have the same columns.
        characters: number of characters of the texts.
        across: a line for each sample whose prompt ends inside a token: its place and the token.
    """

    units: list[Unit]
    places: list[int]
    longer: int
    problems: list[UserError]
    said: list[str]
    unused: list[str]
    characters: int
    across: list[str]


class Tokeniser:
    """Makes documents from the samples of one entry. The first sample decides the type.

    A pickled copy does the same in another process: it has the entry and the type, and starts with empty notes.
    """

    def __init__(
        self,
        entry: Dataset,
        tokenizer: Tokenizer,
        labels: tuple[str, ...] = (),
        chat: ChatOptions = ChatOptions(),
        images: ImageReader | None = None,
    ):
        """Set up the encoder; the chat template is compiled for the first sample.

        Args:
            entry: the entry of data.datasets.
            tokenizer: the tokenizer.
            labels: names of classes, by number.
            chat: the section chat, which selects the messages to train.
            images: finds images; None: samples with images are refused.
        """
        self._of = (entry, tokenizer, labels, chat, images)
        self._settled: tuple[Dataset, tuple[str, ...]] | None = None
        self._start()

    def _start(self) -> None:
        self._said: dict[str, None] = {}
        self._unused: list[str] = []
        self._across: list[str] = []
        self._characters = 0
        self._seen: set[str] = set()
        self._convert: sample_formats.Format | None = None
        _, tokenizer, _, _, reader = self._of
        self._encode = Encoder(tokenizer, self._count)
        self._images = None if reader is None else ImageMessages(reader, tokenizer)

    def __getstate__(self) -> tuple:
        return self._of, self._settled

    def __setstate__(self, state: tuple) -> None:
        self._of, self._settled = state
        self._start()

    @property
    def entry(self) -> Dataset:
        """The entry that the tokeniser was made for."""
        return self._of[0]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the units in addition to tokens and weights."""
        return sample_formats.COLUMNS.get(self.entry.type, ())

    @property
    def form(self) -> str | None:
        """The type and the columns that decided it; None until it is decided."""
        return None if self._settled is None else f"{self._settled[0].type} from {', '.join(self._settled[1])}"

    def settle(self, items: Items) -> None:
        """Decide the type from the first usable sample, if there is one."""
        for item in items:
            if self._settled is None and not isinstance(item, UserError):
                try:
                    self._detect(item[1])
                except UserError:
                    continue  # reported by the process that tokenises it

    def __call__(self, items: Items) -> TokenisedBlock:
        """Tokenise a block. Raises UserError if the tokenizer or the entry's options do not allow the type."""
        self._said, self._unused, self._characters, self._across = {}, [], 0, []
        units, places, problems = [], [], []
        longer, most = 0, self.entry.max_tokens
        pending: list[_Converted | UserError] = []
        chars = 0
        for number, item in enumerate(items, start=1):
            pending.append(self._document(item))
            chars += sum(len(text.text) for text in _texts(pending[-1]))
            if chars >= _BATCH_CHARS or number == len(items):
                for place, unit in enumerate(self._encode_units(pending), start=number - len(pending)):
                    if isinstance(unit, UserError):
                        problems.append(unit)
                        continue
                    # The prompt is cut first: max_tokens applies to the documents that are trained.
                    if self.entry.max_prompt_tokens is not None:
                        cut = tuple(cut_prompt(document, self.entry.max_prompt_tokens) for document in unit.documents)
                        shorter = any(len(new.tokens) < len(old.tokens) for new, old in zip(cut, unit.documents))
                        if _has_images(unit) and shorter:
                            reason = (
                                f"its prompt has more than {self.entry.max_prompt_tokens} tokens (max_prompt_tokens)"
                            )
                            problems.append(UntrainableSample(f"{unit.where}: {reason}, and an image is never cut"))
                            continue
                        unit = dataclasses.replace(unit, documents=cut)
                    kept = [unit]
                    if most is not None and max(len(document.tokens) for document in unit.documents) > most:
                        kept = _cut(unit, most, self.entry.longer)
                        longer += not kept
                    units += kept
                    places += [place] * len(kept)
                pending, chars = [], 0
        said, across = list(self._said), self._across
        return TokenisedBlock(units, places, longer, problems, said, self._unused, self._characters, across)

    def _detect(self, sample: Sample) -> None:
        if self._images is None:
            sample_formats.refuse_images(sample)
        self._settled = sample_formats.detect(self.entry, sample)

    def _document(self, item: tuple[str, Sample] | UserError) -> _Converted | UserError:
        """Return (the place of the sample, its document), or the error that there is none."""
        if isinstance(item, UserError):
            return item
        where, sample = item
        try:
            if self._settled is None:
                self._detect(sample)
            assert self._settled is not None
            settled, columns = self._settled
            if self._images is None:
                sample_formats.refuse_images(sample)
            elif settled.type not in IMAGE_TYPES or settled.prompt_format is not None:
                types = ", ".join(IMAGE_TYPES)
                reason = f"only types {types} with a chat template have images, and it has type {settled.type}"
                sample_formats.refuse_images(sample, reason)
        except UserError as error:
            return UserError(f"{where}: {error}")
        if self._convert is None:
            _, tokenizer, labels, chat, _ = self._of
            more = labels, chat, self._images
            self._convert = sample_formats.make_format(settled, columns, tokenizer, self._say, *more)
        if self._images is not None:
            self._images.folder = folder_of(where)
        if not sample.keys() <= self._seen:  # a sample may have columns that no sample before it had
            new = [column for column in sample if column not in self._seen]
            self._unused += sample_formats.find_unused(settled, columns, new, self._images is not None)
            self._seen |= sample.keys()
        try:
            document = self._convert(sample)
            for text in _texts((where, document)):
                text.text.encode()  # fails on a lone surrogate, which the tokenizer would not report by sample
        except UnicodeEncodeError:
            return UserError(f"{where}: its text holds half a character (a lone surrogate)")
        except UserError as error:
            # The type decides what follows: an UntrainableSample is counted, any other error ends the run.
            return type(error)(f"{where}: {error}")
        return where, document

    def _encode_units(self, pending: list[_Converted | UserError]) -> list[Unit | UserError]:
        """Return a unit for each sample, or its error; a document without a target and a label is an error."""
        results = []
        texts = iter(self._encode([text for item in pending for text in _texts(item)]))
        for item in pending:
            if isinstance(item, UserError):
                results.append(item)
                continue
            where, document = item
            if isinstance(document, RenderedUnit):
                documents = tuple(next(texts) for _ in document.documents)
                if error := self._image_error(where, documents):
                    results.append(error)
                    continue
                self._note_across(where, zip(document.documents, documents))
                trained = not document.answered or all(answer.loss_weights[1:].any() for answer in documents)
                refused = UntrainableSample(f"{where}: no token of an answer is a target")
                results.append(Unit(documents, values=document.values, where=where) if trained else refused)
                continue
            encoded = next(texts) if isinstance(document, Rendered) else document
            if error := self._image_error(where, (encoded,)):
                results.append(error)
                continue
            if isinstance(document, Rendered):
                self._note_across(where, [(document, encoded)])
            label = document.label if isinstance(document, Rendered) else None
            if label is not None and len(encoded.tokens):
                results.append(Unit((encoded,), values={LABEL.name: label}, where=where))
            elif encoded.loss_weights[1:].any():
                # Only running text may be split between rows: the parts of other documents mean nothing by themselves.
                continuous = self._settled is not None and self._settled[0].type in ("text", "tokenized")
                results.append(Unit((encoded,), continuous, where=where))
            else:
                results.append(UntrainableSample(f"{where}: no token of it is a target"))
        return results

    def _image_error(self, where: str, documents: Iterable[Encoded]) -> UserError | None:
        """Return an error if a document has an image token without an image."""
        if (reader := self._of[4]) is None:
            return None
        layout = reader.layout
        for document in documents:
            tokens = int(np.count_nonzero(document.tokens == layout.token))
            if tokens != (wanted := sum(image.patches for image in document.images) // layout.merge**2):
                return UserError(
                    f"{where}: {format_count(tokens, 'image token')}, and {wanted} for its images: a text may not hold "
                    "image tokens of its own"
                )
        return None

    def _note_across(self, where: str, documents: Iterable[tuple[Rendered, Encoded]]) -> None:
        """Note a sample if a trained part of one of its documents begins inside a token."""
        for document, encoded in documents:
            if encoded.across is not None:
                start, end, edge = encoded.across
                prompt, answer = document.text[max(0, edge - 20) : edge], document.text[edge : max(edge + 20, end)]
                token = document.text[start:end]
                self._across.append(f"{where}: in {prompt!r} + {answer!r} the token {token!r} belongs to both")
                return

    def _say(self, line: str) -> None:
        self._said[line] = None

    def _count(self, characters: int) -> None:
        self._characters += characters


def _cut(unit: Unit, most: int, way: Literal["delete", "left", "right", "split"]) -> list[Unit]:
    """Return the parts of a unit with a long document that are kept: those with a target in every document.

    The answers of a pair are cut each by itself, as TRL's DPOTrainer cuts them, and are never split (trl 1.16).
    """
    if way == "delete" or _has_images(unit) or (way == "split" and len(unit.documents) > 1):  # an image is never cut
        return []
    if way == "split":
        cut = [
            (Encoded(document.tokens[start : start + most], document.loss_weights[start : start + most]),)
            for document in unit.documents
            for start in range(0, len(document.tokens), most)
        ]
    else:
        cut = [tuple(cut_document(document, most, way) for document in unit.documents)]
    kept = (parts for parts in cut if all(part.loss_weights[1:].any() for part in parts))
    return [dataclasses.replace(unit, documents=parts) for parts in kept]


def _has_images(unit: Unit) -> bool:
    return any(document.images for document in unit.documents)


def say_across(count: int, first: str) -> str:
    """Return the line about samples whose prompts end inside a token; `first`: the first of `TokenisedBlock.across`."""
    return (
        f"{count:,} samples have an answer that begins inside a token, often because the prompt ends in a space: given "
        f"the prompt, the model sees other tokens than in training; the first: {first}. End the prompt before the "
        "space, and begin the answer with it"
    )


def _texts(item: _Converted | UserError) -> tuple[Rendered, ...]:
    """Return the texts of a sample to tokenise."""
    document = None if isinstance(item, UserError) else item[1]
    if isinstance(document, RenderedUnit):
        return document.documents
    return (document,) if isinstance(document, Rendered) else ()
