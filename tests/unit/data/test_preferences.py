"""Preference data in the forms of TRL, LLaMA-Factory, ms-swift and ERNIEKit: two answers to one prompt."""

import json

import numpy as np
import pytest
from tiny import byte_tokenizer

from jaxtune.columns import DESIRABLE, NEXT_TOKEN, SCORE_DELTA
from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions, TrainOptions
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.data.rows.splits import open_documents
from jaxtune.errors import UserError
from jaxtune.objectives.options import PreferenceOptions

HI, YO, NO = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yo"), ("assistant", "No"))
)
CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«{}<|im_end|>»\n"
PAIR = [CHAT.format("Yo"), CHAT.format("No")]
FORMS = {
    "TRL, text": {"prompt": "Hi", "chosen": "Yo", "rejected": "No"},
    "TRL, messages": {"prompt": [HI], "chosen": [YO], "rejected": [NO]},
    "TRL, the prompt in the answers": {"chosen": [HI, YO], "rejected": [HI, NO]},
    "UltraFeedback": {"prompt": "Hi", "chosen": [HI, YO], "rejected": [HI, NO]},
    "LLaMA-Factory, Alpaca": {"instruction": "Hi", "input": "", "chosen": "Yo", "rejected": "No"},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Yo"},
        "rejected": {"from": "gpt", "value": "No"},
    },
    "ms-swift, text": {"messages": [HI, YO], "rejected_response": "No"},
    "ms-swift, messages": {"messages": [HI, YO], "rejected_messages": [HI, NO]},
    "ms-swift, of Arrow": {"messages": [HI, YO], "rejected_response": None, "rejected_messages": [HI, NO]},
    "messages as text": {"prompt": json.dumps([HI]), "chosen": json.dumps([YO]), "rejected": "No"},
    "ERNIEKit": {"src": ["Hi"], "tgt": [], "response": [["No"], ["Yo"]], "sort": [0, 1]},
}


@pytest.mark.parametrize("sample", FORMS.values(), ids=FORMS)
def test_a_pair_is_two_answers_after_one_prompt(read, sample):
    texts, notes = read(sample, type="preference")
    assert texts == PAIR
    assert notes[0].startswith("preference from ") and "2 documents" in notes[0]


def test_what_conversations_share_is_not_trained(read):
    """As TRL's extract_prompt; after the shared part, the assistant's messages are trained."""
    more = {"role": "user", "content": "So?"}
    texts, _ = read({"chosen": [HI, YO, more, YO], "rejected": [HI, YO, more, NO]}, type="preference")
    form = CHAT.format("Yo").replace("«", "").replace("»", "") + CHAT.replace("Hi", "So?")
    assert texts == [form.format("Yo"), form.format("No")]


def test_what_texts_share_is_not_trained(tmp_path, read):
    """As TRL's extract_prompt: a space belongs to the answers."""
    texts, _ = read({"chosen": "Human: Hi Bot: Yo", "rejected": "Human: Hi Bot: No"}, type="preference")
    assert texts == ["Human: Hi Bot:« Yo<|im_end|>»", "Human: Hi Bot:« No<|im_end|>»"]


def test_a_tokenizer_without_a_template_joins_texts(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "a.jsonl").write_text(json.dumps(FORMS["TRL, text"]) + "\n" + json.dumps(FORMS["TRL, text"]) + "\n")
    documents = tokenize((Dataset(path=str(tmp_path / "a.jsonl"), type="preference"),), tokenizer, tmp_path / "cache")
    tokens, weights = documents.read(0, 0, 100)
    assert tokenizer.decode(tokens) == "HiYo<|im_end|>" and weights.tolist() == [0, 0, 1, 1, 1]
    assert any("no chat template" in note for note in documents.notes)
    (tmp_path / "b.jsonl").write_text(json.dumps(FORMS["TRL, messages"]) + "\n")
    with pytest.raises(UserError, match="set chat.template"):
        tokenize((Dataset(path=str(tmp_path / "b.jsonl"), type="preference"),), tokenizer, tmp_path / "cache")


def test_a_prompt_that_is_too_long_loses_its_beginning(read):
    texts, _ = read(FORMS["TRL, text"], type="preference", max_prompt_tokens=4)
    assert texts == ["ant\n«Yo<|im_end|>»\n", "ant\n«No<|im_end|>»\n"]


@pytest.mark.parametrize(
    ("longer", "kept"),
    [
        ("right", [CHAT.format("Yo"), CHAT.partition("{")[0] + "No, »"]),
        ("left", [CHAT.format("Yo"), CHAT.format("No, no").removeprefix("<|im_start|>use")]),
        ("delete", []),
        ("split", []),
    ],
)
def test_answers_that_are_too_long_are_cut_each_by_itself_or_left_out_together(read, longer, kept):
    """As DataCollatorForPreference of TRL, whose truncation_mode keep_start is `right`."""
    long = FORMS["TRL, text"] | {"rejected": "No, no"}
    texts, notes = read(FORMS["TRL, text"], long, type="preference", max_tokens=25, longer=longer)
    assert texts == PAIR + kept
    assert any("1 document of more than 25 tokens left out" in note for note in notes) == (not kept)


def test_a_pair_whose_prompt_leaves_no_room_for_its_answers_is_left_out(read):
    with pytest.raises(UserError, match="no sample that can be trained on; 1 document of more than 21 tokens left out"):
        read(FORMS["TRL, text"], type="preference", max_tokens=21, longer="right")


REFUSED = {
    "another column is missing": ({"chosen": "a", "answer": "b"}, "needs preference: chosen"),
    "an answer is empty": (FORMS["TRL, text"] | {"rejected": ""}, "an answer is empty"),
    "an answer is longer": ({"chosen": [HI, YO, HI], "rejected": [HI, YO]}, "is the beginning of the other"),
    "a text is longer": ({"chosen": "ab", "rejected": "a"}, "is the beginning of the other"),
    "neither text nor messages": ({"chosen": 1, "rejected": 2}, "must be text or messages, found 1"),
    "one is text": ({"chosen": "a", "rejected": [HI, YO]}, "one answer is text, the other messages"),
    "no order": (FORMS["ERNIEKit"] | {"sort": [1, 1]}, "neither answer is better"),
    "an order that is none": (FORMS["ERNIEKit"] | {"sort": [None, 1]}, "'sort' must be a number, found None"),
    "answers that are none": (FORMS["ERNIEKit"] | {"response": [[1], ["Yo"]]}, "'response' must be two texts"),
    "the same answer": ({"prompt": "Hi", "chosen": "Yo", "rejected": "Yo"}, "both answers are the same"),
    "a system prompt that is none": (FORMS["TRL, text"] | {"system": 5}, "'system' must be text, found 5"),
    "calls that are none": (
        {"prompt": "Hi", "chosen": [YO | {"tool_calls": 5}], "rejected": [NO]},
        "message 1: tool_calls must be a list",
    ),
}


@pytest.mark.parametrize(("sample", "said"), REFUSED.values(), ids=REFUSED)
def test_a_pair_that_is_none_is_refused_by_its_line(read, sample, said):
    with pytest.raises(UserError, match=f"a.jsonl:1: .*{said}"):
        read(sample, type="preference")


def test_answers_that_begin_with_a_bracket_are_text(read):
    sample = {"prompt": "[INST] Hi [/INST]", "chosen": "[1, 2, 3]", "rejected": "[Verse 1] la"}
    texts, _ = read(sample, type="preference")
    form = CHAT.replace("Hi", "[INST] Hi [/INST]")
    assert texts == [form.format("[1, 2, 3]"), form.format("[Verse 1] la")]


def test_the_first_sample_settles_which_column_is_the_prompt(read):
    """A later sample without this column is bad: it would be rendered differently."""
    with pytest.raises(UserError, match="a.jsonl:2: column 'prompt' must be text or messages, found None"):
        read(FORMS["TRL, text"], FORMS["TRL, text"] | {"prompt": None}, type="preference")


@pytest.mark.parametrize("answers", [{"chosen": "Yo", "rejected": "No"}, {"output": "Yo", "label": True}], ids=str)
def test_what_stands_beside_a_prompt_is_read(read, answers):
    """LLaMA-Factory's columns, and those that `auto` reads for other types; none is reported as unused."""
    sample = {"instruction": "a", "input": "b", "system": "S", "history": [["q", "r"]], **answers}
    second = sample | {"output": "Oh"}  # a single answer has no other to be compared with
    samples = [sample] if "chosen" in answers else [sample, second]
    texts, notes = read(*samples, type="preference" if "chosen" in answers else "unpaired_preference")
    before = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in (("system", "S"), ("user", "q"), ("assistant", "r"), ("user", "a\nb"))
    )
    assert texts[0] == f"{before}<|im_start|>assistant\n«Yo<|im_end|>»\n"
    assert not any("not used" in note for note in notes)


def test_messages_may_have_keys_of_their_own(read):
    messages = [{"speaker": "user", "text": "Hi"}]
    mapped = ("role=speaker", "content=text")
    texts, _ = read(
        {"prompt": messages, "chosen": "Yo", "rejected": "No"}, type="preference", message_property_mappings=mapped
    )
    assert texts == PAIR


def test_scores_of_answers_are_a_column_of_the_pair(tokenizer, tmp_path):
    rated = FORMS["TRL, text"] | {"good": 8.5, "bad": 6}
    (tmp_path / "a.jsonl").write_text(json.dumps(rated) + "\n")
    entry = Dataset(path=str(tmp_path / "a.jsonl"), chosen_score_field="good", rejected_score_field="bad")
    data = DataOptions(datasets=(entry,), seq_len=128)
    config = Config(
        ModelOptions(), data, train=TrainOptions(output_dir=str(tmp_path)), preference=PreferenceOptions("sigmoid")
    )
    documents, _ = open_documents(config, tokenizer)
    row = Rows(documents, data, 1, (*NEXT_TOKEN, SCORE_DELTA))[0]
    assert set(row["score_delta"][row["segment_ids"] > 0].tolist()) == {2.5}
    worse = json.dumps(rated | {"good": 6})
    (tmp_path / "a.jsonl").write_text(worse + "\n")
    with pytest.raises(UserError, match="is not larger than 6"):
        open_documents(config, tokenizer)
    (tmp_path / "a.jsonl").write_text(json.dumps(rated | {"good": float("nan")}) + "\n")
    with pytest.raises(UserError, match="'good' must be a number"):
        open_documents(config, tokenizer)


ANSWERS = [
    {"prompt": "Hi", "completion": "Yo", "label": True},
    {"prompt": [HI], "completion": [NO], "label": False},
    {"messages": [HI, {"role": "assistant", "content": "Ok"}], "label": 1},
]


def test_an_answer_stands_with_that_of_the_next_prompt(read, tokenizer, tmp_path):
    """KTO needs answers to other prompts to measure how far the model has moved."""
    samples = [sample | {"prompt": prompt} for sample, prompt in zip(ANSWERS, ("one", "two"))]
    texts, _ = read(*samples, type="unpaired_preference")
    of = {name: CHAT.replace("Hi", name) for name in ("one", "two")}
    expected = [of["one"].format("Yo"), of["one"].format("No"), of["two"].format("No"), of["two"].format("Yo")]
    assert texts == expected


def test_an_answer_to_another_prompt_is_cut_too(read):
    samples = [sample | {"prompt": prompt} for sample, prompt in zip(ANSWERS, ("Hi", "Hi there"))]
    texts, _ = read(*samples, type="unpaired_preference", max_tokens=28, longer="right")
    assert [text.partition("assistant\n")[2] for text in texts[2:]] == ["«N»", "«Y»"]


def test_an_answer_to_another_prompt_is_cut_and_its_sample_kept_if_longer_ones_are_deleted(read):
    samples = [
        {"prompt": "Hi", "completion": "Yo there", "label": True},
        {"prompt": "Hi there", "completion": "No", "label": False},
    ]
    texts, _ = read(*samples, type="unpaired_preference", max_tokens=31)  # each sample has 31
    assert [text.partition("assistant\n")[2] for text in texts[2:]] == ["«No<|im_end|>»\n", "«Yo t»"]


def test_whether_an_answer_is_wanted_is_a_column_of_its_unit(read, tokenizer, tmp_path):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in ANSWERS[:2]))
    data = DataOptions(datasets=(Dataset(path=str(tmp_path / "b.jsonl")),), seq_len=256, shuffle=False)
    config = Config(
        ModelOptions(), data, train=TrainOptions(output_dir=str(tmp_path)), preference=PreferenceOptions("kto")
    )
    documents, _ = open_documents(config, tokenizer)
    row = Rows(documents, data, 1, (*NEXT_TOKEN, DESIRABLE))[0]
    of_documents = [set(row["desirable"][row["segment_ids"] == segment].tolist()) for segment in (1, 2, 3, 4)]
    assert of_documents == [{1.0}, {1.0}, {0.0}, {0.0}]
    unwanted = {"messages": [HI, NO], "label": 0}
    texts, _ = read(ANSWERS[2], unwanted, type="unpaired_preference", output_field="messages")
    assert texts[0] == CHAT.format("Ok")
    (tmp_path / "c.csv").write_text("prompt,completion,label\nHi,Yo,true\nHi,No,False\n")
    read_back = tokenize(
        (Dataset(path=str(tmp_path / "c.csv"), type="unpaired_preference"),), tokenizer, tmp_path / "cache"
    )
    assert [read_back.values("desirable", i, 0, 9) for i in range(4)] == [1, 1, 0, 0]
    with pytest.raises(UserError, match="'label' must be true or false, found 'maybe'"):
        read(ANSWERS[0] | {"label": "maybe"}, type="unpaired_preference")


def test_an_answer_is_not_compared_with_itself(read):
    with pytest.raises(
        UserError, match=r"data: .*a.jsonl has only one answer, and KTO compares it with answers of oth"
    ):
        read(ANSWERS[0], type="unpaired_preference")
    with pytest.raises(UserError, match="has only one answer"):
        read(ANSWERS[0], ANSWERS[0], type="unpaired_preference")


@pytest.mark.parametrize(("labels", "said"), [((1, 1), "wanted"), ((0, 0), "not wanted"), ((1, 0), None)], ids=str)
def test_answers_of_one_kind_are_said(tokenizer, tmp_path, labels, said):
    samples = [{"prompt": "Hi", "completion": text, "label": label} for text, label in zip(("Yo", "No"), labels)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    data = DataOptions(datasets=(Dataset(path=str(tmp_path / "a.jsonl")),), seq_len=256)
    config = Config(
        ModelOptions(), data, train=TrainOptions(output_dir=str(tmp_path)), preference=PreferenceOptions("kto")
    )
    notes = [note for note in open_documents(config, tokenizer)[0].notes if note.startswith("each of")]
    assert [note.partition(" (")[0] for note in notes] == ([f"each of the 2 answers is {said}"] if said else [])


def test_pairs_are_not_cut(tokenizer, tmp_path):
    """A pair longer than a row is left out and counted."""
    samples = [FORMS["TRL, text"], FORMS["TRL, text"] | {"chosen": "long " * 40}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    data = DataOptions(datasets=(Dataset(path=str(tmp_path / "a.jsonl")),), seq_len=128)
    config = Config(
        ModelOptions(), data, train=TrainOptions(output_dir=str(tmp_path)), preference=PreferenceOptions("sigmoid")
    )
    rows = Rows(open_documents(config, tokenizer)[0], data, 1)
    assert rows.counts.documents == 2 and rows.counts.dropped_documents == 2
    assert np.unique(rows[0]["segment_ids"]).tolist() == [0, 1, 2]
