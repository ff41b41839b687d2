"""A text cut into pieces has the tokens and loss weights of the whole text."""

import os
import re
import subprocess
import sys
import sysconfig
import threading
import unicodedata
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.chat import cuts
from jaxtune.data.chat.encoding import Encoder, Rendered

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = GPT4.replace("{1,3}", "")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}", r" ?[^\s\p{L}\p{M}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def byte_level(*patterns, prefix=False, behavior="isolated", invert=False):
    steps = [pre_tokenizers.Split(Regex(pattern), behavior, invert) for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
NFC = normalizers.NFC()
CUT = {
    "gpt-2": (GPT2, None, {}),
    "prefix space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None, {}),
    "split, then prefix space": (byte_level(GPT4, prefix=True), None, {}),
    "llama-3": (byte_level(GPT4), None, {"ignore_merges": True}),
    "matches are kept": (byte_level(GPT4, behavior="removed", invert=True), None, {}),
    "qwen-2": (byte_level(QWEN2), NFC, {}),
    "qwen-3.5": (byte_level(QWEN3_5), NFC, {}),
    "gpt-4o": (byte_level(GPT4O), None, {}),
    "deepseek": (byte_level(*DEEPSEEK), normalizers.Sequence([]), {}),
    "digits": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), GPT2]), normalizers.Sequence([NFC]), {}),
}
WHOLE = {
    "nothing splits": (byte_level(), None, {}),
    "nothing splits digits": (byte_level(r" ?\p{L}+|\s+"), None, {}),
    "another pattern": (byte_level(r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)|" + GPT4), None, {}),
    "looks behind": (byte_level(r"(?<= )\p{L}+|" + GPT4), None, {}),
    "merged with previous": (byte_level(GPT4, behavior="merged_with_previous"), None, {}),
    "split at a string": (pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), GPT2]), None, {}),
    "metaspace": (pre_tokenizers.Metaspace(), None, {}),
    "another normalizer": (GPT2, normalizers.NFD(), {}),
    "prepend": (GPT2, normalizers.Sequence([NFC, normalizers.Prepend("_")]), {}),
    "dropout": (GPT2, None, {"dropout": 0.5}),
}
ADDED = [
    AddedToken("<|end|>", normalized=False),
    AddedToken("   ", normalized=True),
    AddedToken("\n\n", normalized=False),
    AddedToken("<l>", lstrip=True, normalized=False),
    AddedToken("<r>", rstrip=True, normalized=False),
    AddedToken("left", lstrip=True, normalized=True),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("caf\xe9", normalized=True),
]
FRAGMENTS = [
    *("a", "B", "c\u0327", "e", "\u0301", "\xe9", "\xdf", "\u0130", "\u0451", "\u0438\u0306", "\u05e9\u05bc", "\u0639"),
    *("字", "が", "か\u3099", "가", "\u1100\u1161", "\u11a8", "\u0915\u093c", "\u0e1b\u0e31", "\ufb01", "\u212a"),
    *("1", "2345", "\xbd", "\u0663", "\u3007", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u3000", "\u200b"),
    *(
        "\uff0c",
        "\u3002",
        ".",
        "/",
        "_",
        "'",
        "'s",
        "'LL",
        "\u2019s",
        "!",
        "$",
        "😀",
        " the",
        "def f(x):\n    return x",
    ),
    *(token.content for token in ADDED),
]
STDLIB = [Path(sysconfig.get_path("stdlib"), name).read_text("utf-8") for name in ("argparse.py", "turtle.py")]


def train(pre_tokenizer, normalizer, options, vocabulary=1000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.normalizer, tokenizer.decoder = pre_tokenizer, normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["".join(pair) for pair in product(FRAGMENTS, repeat=2)], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def cut_tokenizers():
    tokenizers = {name: train(*parts) for name, parts in CUT.items()}
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizers["bytes"] = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizers["bytes"].pre_tokenizer = byte_level()
    for tokenizer in tokenizers.values():
        tokenizer.add_tokens(ADDED)
    return {name: PreTrainedTokenizerFast(tokenizer_object=tokenizer) for name, tokenizer in tokenizers.items()}


# Texts of few fragments, so that every pair of fragments is likely to meet.
TEXTS = (
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=2), min_size=1, max_size=6)
    .flatmap(lambda few: st.lists(st.sampled_from(few), max_size=30))
    .map("".join)
)


@pytest.mark.parametrize("name", CUT)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_pieces_have_the_words_of_the_whole(name, text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer, _ = CUT[name]

    def words(part: str) -> list[str]:
        normal = tokenizer.normalizer.normalize_str(part) if tokenizer.normalizer else part
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]

    cut = cuts.find_cuts(tokenizer)
    assert cut is not None
    parts = [text[start:stop] for start, stop in cuts.pieces(text, cut, 1)]
    assert "".join(parts) == text and len(parts) == 1 + len(cut.findall(text))
    assert [word for part in parts for word in words(part)] == words(text)


@pytest.mark.parametrize("name", [*CUT, "bytes"])
@given(text=TEXTS, ends=st.lists(st.integers(0, 60), min_size=2, max_size=2).map(sorted), piece=st.sampled_from((1, 4)))
@settings(max_examples=50, deadline=None)
def test_pieces_have_the_tokens_and_weights_of_the_whole(cut_tokenizers, name, text, ends, piece):
    documents = [Rendered(text, (tuple(ends),)), Rendered(""), Rendered(text)]
    in_pieces = Encoder(cut_tokenizers[name], piece_chars=piece)(documents)
    whole = Encoder(cut_tokenizers[name], piece_chars=10**9)(documents)
    for one, other in zip(in_pieces, whole, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.loss_weights.tolist() == other.loss_weights.tolist()


def test_progress_moves_within_a_document(cut_tokenizers):
    reported = []
    Encoder(cut_tokenizers["llama-3"], reported.append)([Rendered(STDLIB[0])])
    assert len(reported) > 1 and sum(reported) == len(STDLIB[0])


def test_what_stands_before_a_cut_is_a_letter_or_digit_for_everyone_and_stays_so():
    before = re.compile(f"[{cuts._BEFORE}]")
    characters = [character for character in map(chr, range(0x10000)) if before.match(character)]
    assert len(characters) > 30_000
    for character in characters:
        assert unicodedata.category(character)[0] == "L" or character in "0123456789"
        assert unicodedata.normalize("NFC", character) == character
    pre_tokenizer = pre_tokenizers.Split(Regex(r"[\p{L}\p{N}]"), "removed")
    assert pre_tokenizer.pre_tokenize_str("".join(characters)) == []


@pytest.mark.parametrize("name", WHOLE)
def test_a_tokenizer_of_which_nothing_is_proved_gets_the_whole_text(name):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], **WHOLE[name][2]))
    tokenizer.pre_tokenizer, tokenizer.normalizer, _ = WHOLE[name]
    assert cuts.find_cuts(tokenizer) is None


@pytest.mark.parametrize(
    "model", [models.Unigram([("a", 0.0)]), models.WordPiece({"a": 0}), models.WordLevel({"a": 0}, unk_token="a")]
)
def test_another_model_gets_the_whole_text(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = GPT2
    assert cuts.find_cuts(tokenizer) is None


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("New York", normalized=False),
        AddedToken(" of", single_word=True),
        AddedToken("end", rstrip=True),
        AddedToken("一\n", normalized=True),
    ],
)
def test_an_added_token_that_reaches_across_cuts_gets_the_whole_text(token):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = GPT2
    assert cuts.find_cuts(tokenizer) is not None
    tokenizer.add_tokens([token])
    assert cuts.find_cuts(tokenizer) is None


def test_a_large_document_takes_less_than_ten_times_its_bytes(cut_tokenizers, tmp_path):
    """In a process of its own, because memory that earlier tests have freed would be used again and not counted."""
    cut_tokenizers["qwen-2"].save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "small.txt").write_text("warm up")
    (tmp_path / "large.txt").write_text("".join(STDLIB * 40)[: 2**23])  # a batch of pieces takes 10 MB, however large
    code = "import sys, pathlib, test_cuts; print(test_cuts.added_bytes(pathlib.Path(sys.argv[1])))"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    printed = subprocess.check_output([sys.executable, "-c", code, tmp_path], env=os.environ | {"PYTHONPATH": path})
    assert 2**23 < int(printed) < 10 * 2**23


def added_bytes(folder: Path) -> int:
    """Return the most memory that this process takes in addition while it tokenises large.txt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    tokenizer.eos_token = "<|end|>"  # a text document ends with it
    tokenize((Dataset(path=str(folder / "small.txt")),), tokenizer, folder / "cache")
    seen, done = [_anonymous_bytes()], threading.Event()

    def watch():
        while not done.wait(0.005):
            seen.append(_anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        documents = tokenize((Dataset(path=str(folder / "large.txt")),), tokenizer, folder / "cache")
    finally:
        done.set()
        thread.join()
    assert documents.lengths[0] > 2**20
    return max(seen) - seen[0]


def _anonymous_bytes() -> int:
    """Return the memory of this process that does not belong to files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s*(\d+) kB", status)[1]) * 1024
