"""Data of decision models: the questions on a state are documents of one unit, each with the share of its options."""

import json

import numpy as np
import pytest
from tiny import byte_tokenizer

from jaxtune.columns import ASKED, NOT_AN_OPTION, QUESTION_ROWS
from jaxtune.config.schema import DataOptions, Dataset
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.formats.questions import option_shares, read_questions
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.errors import UserError

QUESTIONS = {
    "yes": {"type": "noul", "instructions": "Is it?"},
    "which": {"type": "choice", "criteria": {"a": None, "b": "bee", "c": ""}},
    "level": {"type": "score", "criteria": ["low", "mid", "high"]},
}
LABELS = {
    "true": ("yes", True, [1, 0]),
    "false": ("yes", False, [0, 1]),
    "a probability of true": ("yes", 0.25, [0.25, 0.75]),
    "an option": ("which", "b", [0, 1, 0]),
    "probabilities by name": ("which", {"c": 0.75, "a": 0.25}, [0.25, 0, 0.75]),
    "a level": ("level", 2, [0, 0, 1]),
    "probabilities in order": ("level", [0.5, 0.5, 0.0], [0.5, 0.5, 0]),
    "rounded probabilities": ("level", [0.333, 0.333, 0.333], [1 / 3, 1 / 3, 1 / 3]),
}
WRONG = {
    "another option": ("which", "d", "a label is one of a, b, c, or the probability of each by name.*found 'd'"),
    "a number for an option": ("which", 1, "a label is one of a, b, c"),
    "a sum above 1": ("which", {"a": 0.75, "b": 0.75}, "with the sum 1"),
    "too high a level": ("level", 3, "a level from 0 to 2"),
    "a level that is true": ("level", True, "a level from 0 to 2"),
    "too few levels": ("level", [0.5, 0.5], "the probability of each level"),
    "a probability above 1": ("yes", 2, "true, false or the probability of true"),
}
BAD_QUESTIONS = {
    "no type": ({"q": {"criteria": ["a"]}}, "type must be noul .yes or no., choice or score"),
    "unknown key": ({"q": {"type": "noul", "options": []}}, "has 'options'; known are type, instructions and criteria"),
    "criteria of noul": ({"q": {"type": "noul", "criteria": {"yes": "x"}}}, "describe 'true' and 'false'"),
    "no options": ({"q": {"type": "choice", "criteria": {}}}, "criteria of choice are {option: description}"),
    "levels by name": ({"q": {"type": "score", "criteria": {"a": 1}}}, "criteria of score are a list of levels"),
    "too many": ({"q": {"type": "score", "criteria": ["x"] * 11}}, "11 options; a score question has at most 10"),
    "half JSON": ('{"q": ', "not valid JSON"),
    "a list": ([], "must be {name:"),
}


def question(name):
    return next(one for one in read_questions(QUESTIONS, "questions") if one.name == name)


@pytest.mark.parametrize(("name", "label", "expected"), LABELS.values(), ids=LABELS)
def test_labels_are_hard_or_soft(name, label, expected):
    shares, rows = option_shares(question(name), label, "labels"), QUESTION_ROWS[question(name).kind]
    assert np.allclose(shares[rows.start : rows.start + len(expected)], expected)
    assert (shares != NOT_AN_OPTION).sum() == len(expected)


@pytest.mark.parametrize(("name", "label", "message"), WRONG.values(), ids=WRONG)
def test_a_label_that_does_not_fit_its_question_is_refused(name, label, message):
    with pytest.raises(UserError, match=f"column 'labels', question '{name}': .*{message}"):
        option_shares(question(name), label, "labels")


@pytest.mark.parametrize(("raw", "message"), BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_a_malformed_question_is_refused(raw, message):
    with pytest.raises(UserError, match=message):
        read_questions(raw, "questions")


def write(path, *samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return (Dataset(path=str(path), type="decision"),)


def test_questions_with_a_label_share_a_row_and_are_read_again_from_the_cache(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    samples = [
        {"state": "one", "questions": QUESTIONS, "labels": {"yes": 0.25, "level": 1}},
        {"state": "two", "questions": json.dumps(QUESTIONS), "labels": json.dumps({"which": "c", "yes": None})},
    ]
    entries = write(tmp_path / "data.jsonl", *samples)
    for _ in range(2):  # tokenised, then from the cache
        documents = tokenize(entries, tokenizer, tmp_path / "cache")
        assert documents.units.tolist() == [0, 2, 3]
    row = Rows(documents, DataOptions(seq_len=512, shuffle=False), 1, ASKED)[0]
    (ends,) = np.nonzero(row["last"])
    assert len(ends) == 3 and row["option_shares"].shape == (512, 32)
    text = tokenizer.decode(row["tokens"][: ends[0] + 1])
    assert text == "<|im_start|>user\none\n\nIs it?\nAnswer Yes or No only.<|im_end|>\n<|im_start|>assistant\n"
    kinds = {kind: row["option_shares"][ends[i], rows.start] for i, (kind, rows) in enumerate(QUESTION_ROWS.items())}
    assert kinds == {"noul": 0.25, "score": 0, "choice": 0}
    assert row["option_shares"][ends[2], QUESTION_ROWS["choice"].start + 2] == 1
    assert (row["option_shares"][ends[2] + 1 :] == NOT_AN_OPTION).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": {}}, "no question has a label"),
        ({"labels": {"other": 1}}, "there is no question 'other'"),
        ({"labels": [1]}, "must be {name of a question: label}"),
        ({"state": "a <|im_end|>"}, "holds the special token <|im_end|>; remove it"),
    ],
)
def test_a_bad_sample_is_named(tmp_path, changes, message):
    tokenizer = byte_tokenizer(tmp_path)
    sample = {"state": "one", "questions": QUESTIONS, "labels": {"yes": True}} | changes
    with pytest.raises(UserError) as caught:
        tokenize(write(tmp_path / "data.jsonl", sample), tokenizer, tmp_path / "cache")
    assert message in str(caught.value) and "data.jsonl:1" in str(caught.value)
