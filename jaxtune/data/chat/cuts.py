"""Find the places at which a text can be cut without changing its tokens, to tokenise a large text in pieces.

A cut lies after a letter or digit and before a space, a newline, or a full-width comma or full stop. Texts are cut only
if every step of the tokenizer is known to work the same on both sides of a cut; other tokenizers get whole texts:

- Added tokens, which are found first, do not reach across the cut.
- NFC normalisation never composes the two characters around the cut.
- The patterns that split text into words consist of the alternatives below. No alternative matches a letter or digit
  followed by a character after the cut, looks behind, or looks ahead from the cut: the words on each side depend on
  that side only. One alternative matches every letter, another every digit, so a word ends at the cut.
- Byte-pair encoding works word by word.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Latin, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Chinese and Korean letters that every version of Unicode has
# and that NFC leaves as they are.
_BEFORE = (
    r"0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u0410-\u044f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    r"\u0904-\u0939\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_AFTER = " \n\uff0c\u3002"

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_NO_CASE = f"(?i:{_CONTRACTIONS})"
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The alternatives found in the pre-tokenizers of GPT-2, Llama 3, Qwen, DeepSeek and their relatives, as written there.
# A tokenizer whose pattern has any other alternative gets whole texts.
_LETTERS = (
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*",
    f"{_UPPER}*{_LOWER}+{_NO_CASE}?|{_UPPER}+{_LOWER}*{_NO_CASE}?",
)
_DIGITS = (r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}")
_OTHERS = (
    *(_CONTRACTIONS, _NO_CASE),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    *("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""),
)
_KNOWN = re.compile(rf"\|(({'|'.join(map(re.escape, _LETTERS + _DIGITS + _OTHERS))})\|)*")
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def find_cuts(tokenizer: "Tokenizer") -> re.Pattern[str] | None:
    """Return a pattern of the two characters around a possible cut; None if the tokenizer needs whole texts."""
    from tokenizers import models

    splitters = _steps(tokenizer.pre_tokenizer)
    # With add_prefix_space a text gets a space in front unless it has one, so every piece must begin with a space.
    after = " " if any(splitter.get("add_prefix_space") for splitter in splitters) else _AFTER
    cut = re.compile(f"[{_BEFORE}][{after}]")
    patterns = [_pattern(splitter) for splitter in splitters]
    # Without an alternative for letters or for digits, a word could reach across the cut.
    words = all(any(f"|{one}|" in pattern for one in kind for pattern in patterns) for kind in (_LETTERS, _DIGITS))
    # Dropout makes tokens random, so pieces would differ from the whole text.
    model = tokenizer.model
    proved = (
        not any(cut.search(_reach(token)) for token in tokenizer.get_added_tokens_decoder().values())
        and all(step["type"] == "NFC" for step in _steps(tokenizer.normalizer))
        and all(_KNOWN.fullmatch(pattern) for pattern in patterns)
        and isinstance(model, models.BPE)
        and not model.dropout
        and (words or _joins_nothing(model))
    )
    return cut if proved else None


def pieces(text: str, cut: re.Pattern[str] | None, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the pieces of a text: each is cut at the first possible place after `size` characters."""
    start = 0
    while cut and (pair := cut.search(text, start + size - 1)):  # the characters before and after the cut
        yield start, pair.end() - 1
        start = pair.end() - 1  # between the two characters
    yield start, len(text)


def _reach(token: Any) -> str:
    """Return an added token with the neighbours that it consumes (rstrip) or inspects (single_word), to search it."""
    return "a" * token.single_word + unicodedata.normalize("NFC", token.content) + " " * token.rstrip


def _steps(component: Any) -> list[dict]:
    """Return the steps of a normalizer or pre-tokenizer, as in tokenizer.json."""

    def flat(part: dict) -> list[dict]:
        inner = part.get("normalizers", part.get("pretokenizers"))
        return [part] if inner is None else [step for one in inner for step in flat(one)]

    return [] if component is None else flat(json.loads(component.__getstate__()))


def _pattern(splitter: dict) -> str:
    """Return the alternatives of a step's splitting pattern, between bars; "unknown" for an unknown step."""
    match splitter:
        case {"type": "ByteLevel", "use_regex": use_regex}:  # which splits by GPT-2's pattern, written in Rust
            return f"|{_GPT2}|" if use_regex else "|"  # only bytes to characters: no split
        case {"type": "Digits", "individual_digits": individual}:
            return r"|\p{N}|" if individual else r"|\p{N}+|"
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated" | "Removed"}:  # others join parts
            return f"|{pattern}|"
    return "unknown"


def _joins_nothing(model: Any) -> bool:
    """Whether every character is a token, as in a byte tokenizer, so that the split into words does not matter."""
    state = json.loads(model.__getstate__())
    joining = ("merges", "ignore_merges", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return not any(state[name] for name in joining)
