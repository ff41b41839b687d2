"""Samples to units, a block of samples after the other, in this process or in any other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtune.config.schema import Chat, Dataset
from jaxtune.data import formats
from jaxtune.data.columns import LABEL, Column
from jaxtune.data.encoding import Encoded, Encoder, Refused, Rendered
from jaxtune.data.readers import Sample
from jaxtune.data.units import Unit
from jaxtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Items = list[tuple[str, Sample] | UserError]
"""Samples, each with where it comes from; or why one could not be read."""

_BATCH_CHARS = 2**22


@dataclass(frozen=True)
class Tokenised:
    """What became of a block of samples.

    Attributes:
        units: in the order of their samples.
        places: which sample of the block each is of.
        longer: how many units were left out because they are longer than the entry allows.
        problems: what is wrong with the other samples, in their order.
        said: lines for the user; the same line may be in other blocks too.
        characters: of the texts.
    """

    units: list[Unit]
    places: list[int]
    longer: int
    problems: list[UserError]
    said: list[str]
    characters: int


class Tokeniser:
    """Makes documents of the samples of one entry. The first sample decides the type.

    It can be pickled and does then the same in another process.
    """

    def __init__(
        self, entry: Dataset, tokenizer: "PreTrainedTokenizerFast", labels: tuple[str, ...] = (), chat: Chat = Chat()
    ):
        """`labels`: names of classes, by number; `chat`: what of conversations is trained."""
        self._of = (entry, tokenizer, labels, chat)
        self._settled: tuple[Dataset, tuple[str, ...]] | None = None
        self._start()

    def _start(self) -> None:
        self._said: dict[str, None] = {}
        self._characters = 0
        self._seen: set[str] = set()
        self._convert: formats.Format | None = None
        self._encode = Encoder(self._of[1], self._count)

    def __getstate__(self) -> tuple:
        return self._of, self._settled

    def __setstate__(self, state: tuple) -> None:
        self._of, self._settled = state
        self._start()

    @property
    def entry(self) -> Dataset:
        """The entry, as it was given."""
        return self._of[0]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the units, besides tokens and weights."""
        return (LABEL,) if self.entry.type == "classification" else ()

    @property
    def form(self) -> str | None:
        """The type and the columns that decided it; None as long as it is not decided."""
        return None if self._settled is None else f"{self._settled[0].type} from {', '.join(self._settled[1])}"

    def settle(self, items: Items) -> None:
        """Decides the type by the first sample that can be used, if there is one."""
        for item in items:
            if self._settled is None and not isinstance(item, UserError):
                try:
                    self._detect(item[1])
                except UserError:
                    continue  # whoever tokenises it reports it

    def __call__(self, items: Items) -> Tokenised:
        """Tokenises a block. Raises UserError where the tokenizer or the entry's options do not allow the type."""
        self._said, self._characters = {}, 0
        units, places, problems = [], [], []
        longer, most = 0, self.entry.max_tokens
        pending: list[tuple[str, Rendered | Encoded] | UserError] = []
        chars = 0
        for number, item in enumerate(items, start=1):
            pending.append(self._document(item))
            if not isinstance(pending[-1], UserError) and isinstance(pending[-1][1], Rendered):
                chars += len(pending[-1][1].text)
            if chars >= _BATCH_CHARS or number == len(items):
                for place, found in enumerate(self._encoded(pending), start=number - len(pending)):
                    if isinstance(found, UserError):
                        problems.append(found)
                    elif most is not None and sum(len(document.tokens) for document in found.documents) > most:
                        longer += 1
                    else:
                        units.append(found)
                        places.append(place)
                pending, chars = [], 0
        return Tokenised(units, places, longer, problems, list(self._said), self._characters)

    def _detect(self, sample: Sample) -> None:
        formats.refuse_images(sample)
        self._settled = formats.detect(self.entry, sample)

    def _document(self, item: tuple[str, Sample] | UserError) -> tuple[str, Rendered | Encoded] | UserError:
        """(where the sample comes from, the document), or why there is none."""
        if isinstance(item, UserError):
            return item
        where, sample = item
        try:
            if self._settled is None:
                self._detect(sample)
            else:
                formats.refuse_images(sample)
        except UserError as error:
            return UserError(f"{where}: {error}")
        assert self._settled is not None
        settled, columns = self._settled
        if self._convert is None:
            _, tokenizer, labels, chat = self._of
            self._convert = formats.make_format(settled, columns, tokenizer, self._say, labels, chat)
        if not sample.keys() <= self._seen:
            for line in formats.unused(settled, columns, sample):
                self._say(line)
            self._seen |= sample.keys()
        try:
            document = self._convert(sample)
            if isinstance(document, Rendered):
                document.text.encode()
        except UnicodeEncodeError:
            return UserError(f"{where}: its text holds half a character (a lone surrogate)")
        except UserError as error:
            return type(error)(f"{where}: {error}")
        return where, document

    def _encoded(self, pending: list[tuple[str, Rendered | Encoded] | UserError]) -> list[Unit | UserError]:
        """The documents, each a unit; without those that have no target and no label."""
        found = []
        rendered = [item[1] for item in pending if not isinstance(item, UserError)]
        texts = iter(self._encode([document for document in rendered if isinstance(document, Rendered)]))
        for item in pending:
            if isinstance(item, UserError):
                found.append(item)
                continue
            where, document = item
            encoded = next(texts) if isinstance(document, Rendered) else document
            label = document.label if isinstance(document, Rendered) else None
            if label is not None and len(encoded.tokens):
                found.append(Unit((encoded,), values={LABEL.name: label}))
            elif encoded.loss_weights[1:].any():
                continuous = self._settled is not None and self._settled[0].type in ("text", "tokenized")
                found.append(Unit((encoded,), continuous))
            else:
                found.append(Refused(f"{where}: no token of it is a target"))
        return found

    def _say(self, line: str) -> None:
        self._said[line] = None

    def _count(self, characters: int) -> None:
        self._characters += characters
