"""Samples of each known form become documents; the form is recognised by its columns."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from jaxtune.config import foreign
from jaxtune.config.schema import Dataset
from jaxtune.config.sources.yaml_file import YamlFile
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.chat.messages import check_messages
from jaxtune.data.formats.dialects import messages_in
from jaxtune.errors import UserError

CHAT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Yo<|im_end|>»\n"
MORE = CHAT.replace("Hi", "So?").replace("Yo", "Ok.")
HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
PAIRS = {
    "question, answer": {"question": "Hi", "answer": "Yo"},
    "query, response": {"query": "Hi", "response": "Yo"},
    "problem, solution": {"problem": "Hi", "solution": "Yo"},
    "prompt, response": {"prompt": "Hi", "response": "Yo"},
    "instruction, response": {"instruction": "Hi", "response": "Yo"},
    "input, output": {"input": "Hi", "output": "Yo"},
    "input, target": {"input": "Hi", "target": "Yo"},
}


@pytest.mark.parametrize("columns, sample", PAIRS.items(), ids=PAIRS)
def test_a_question_and_its_answer_are_known_by_many_names(read, columns, sample):
    texts, notes = read(sample)
    assert texts == [CHAT] and len(notes) == 1
    assert notes[0].startswith(f"instruction from {columns}, 1 document")


CONVERSATIONS = {
    "messages": ({"messages": [HI, YO]}, "messages", CHAT),
    "conversation": ({"conversation": [HI, YO]}, "conversation", CHAT),
    "the text of a list": ({"messages": json.dumps([HI, YO])}, "messages", CHAT),
    "exchanges": (
        {"conversation": [{"human": "Hi", "assistant": "Yo"}, {"human": "So?", "assistant": "Ok."}]},
        "conversation",
        CHAT + MORE,
    ),
    "TRL": (
        {
            "prompt": [HI, YO, {"role": "user", "content": "So?"}],
            "completion": [{"role": "assistant", "content": "Ok."}],
        },
        "prompt, completion",
        CHAT.replace("«", "").replace("»", "") + MORE,
    ),
    "ERNIEKit": ({"src": ["Hi", "So?"], "tgt": ["Yo", "Ok."]}, "src, tgt", CHAT + MORE),
    "ERNIEKit, labels": (
        {"src": ["Hi", "So?"], "tgt": ["Yo", "Ok."], "label": [0, 1]},
        "src, tgt",
        CHAT.replace("«", "").replace("»", "") + MORE,
    ),
    "ERNIEKit, one": ({"src": "Hi", "tgt": "Yo"}, "src, tgt", CHAT),
    "ERNIEKit, system": (
        {"src": ["Hi"], "tgt": ["Yo"], "system": "Be."},
        "src, tgt",
        f"<|im_start|>system\nBe.<|im_end|>\n{CHAT}",
    ),
    "several systems": (
        {"messages": [{"role": "system", "content": "A."}, HI, YO, {"role": "system", "content": "B."}, HI, YO]},
        "messages",
        f"<|im_start|>system\nA.<|im_end|>\n{CHAT}<|im_start|>system\nB.<|im_end|>\n{CHAT}",
    ),
}


@pytest.mark.parametrize("sample, columns, text", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_is_known_in_many_forms(read, sample, columns, text):
    texts, notes = read(sample)
    assert texts == [text] and notes[0].startswith(f"conversation from {columns}, 1 document") and len(notes) == 1


def test_the_history_of_an_instruction_comes_before_it(read):
    samples = [{"instruction": "So?", "output": "Ok.", "history": history} for history in ([["Hi", "Yo"]], [], None)]
    texts, notes = read(*samples)
    assert texts == [CHAT + MORE, MORE, MORE] and len(notes) == 1
    assert notes[0].startswith("instruction from instruction, output, history, 3 documents")
    for wrong in ("Hi", ["Hi"], [["Hi"]], [["Hi", 1]]):
        with pytest.raises(UserError, match=r"a.jsonl:2: column 'history': expected \[\[query, answer\], ...\]"):
            read(samples[0], samples[0] | {"history": wrong})
    texts, notes = read(samples[0], prompt_format="{instruction} ")
    assert texts == ["So? «Ok.<|im_end|>»"] and "1 column is not used: 'history'" in notes
    assert read({"question": "Hi", "answer": "Yo", "history": "of Rome"})[0] == [CHAT]


def test_a_type_that_is_given_knows_the_same_columns(read):
    assert read({"query": "Hi", "answer": "Yo", "text": "x"}, type="instruction")[0] == [CHAT]
    assert read({"src": ["Hi"], "tgt": ["Yo"], "text": "x"}, type="conversation")[0] == [CHAT]
    assert read({"question": "Hi", "answer": "Yo", "text": "x"}, type="text")[0] == ["«x<|im_end|>»"]


SYSTEM = "<|im_start|>system\nBe.<|im_end|>\n"


@pytest.mark.parametrize(
    "stage, kind, sample, text",
    [
        ("SFT", "erniekit", {"system": "Be.", "src": ["Hi"], "tgt": ["Yo"]}, SYSTEM + CHAT),
        ("SFT", "erniekit", {"src": ["Hi"], "tgt": ["Yo"]}, CHAT),
        ("SFT", "alpaca", {"instruction": "H", "input": "i", "output": "Yo", "system": "Be."}, SYSTEM + CHAT),
        ("SFT", "alpaca", {"instruction": "Hi", "input": "", "output": "Yo"}, CHAT),
        ("SFT", "messages", {"messages": [{"role": "system", "content": "Be."}, HI, YO]}, SYSTEM + CHAT),
        ("PT", "erniekit", {"tgt": ["x"]}, "«x<|im_end|>»"),
        ("PT", "erniekit", {"text": "x"}, "«x<|im_end|>»"),
        ("DPO", "erniekit", {"src": ["Hi"], "tgt": [], "response": [["Yo"], ["No"]], "sort": [1, 0]}, CHAT),
        ("DPO", "alpaca", {"system": "Be.", "question": "Hi", "chosen": "Yo", "rejected": "No"}, SYSTEM + CHAT),
    ],
)
def test_the_samples_of_erniekit_are_read_as_its_config_names_them(read, stage, kind, sample, text):
    config = {"model_name_or_path": "m", "train_dataset_path": "a", "stage": stage, "train_dataset_type": kind}
    ((entry, *_),) = [foreign.translate(YamlFile(config, {}), "erniekit").stated["data.datasets"]]
    texts, notes = read(
        sample, **{key: value for key, value in entry.items() if key not in ("path", "max_prompt_tokens")}
    )
    assert texts[0] == text and not [note for note in notes if "not used" in note]


def test_a_list_of_one_text_is_that_text(read):
    with pytest.raises(UserError, match="column 'tgt' must be text, found"):
        read({"tgt": ["x", "y"]}, type="text")


def test_a_column_that_the_entry_names_is_never_replaced_by_a_known_one(read):
    assert read({"question": "Hi", "a": "Yo", "answer": "no"}, output_field="a")[0] == [CHAT]
    with pytest.raises(UserError, match=r"question \(instruction_field\) and b \(output_field\)"):
        read({"question": "Hi", "answer": "no"}, output_field="b")


def test_auto_takes_a_type_that_reads_what_the_entry_sets(read):
    sample = {"text": "x", "messages": [HI, YO], "instruction": "Hi", "output": "Yo"}
    assert read(sample)[0] == [CHAT]
    assert read(sample, text_field="text", type="text")[0] == ["«x<|im_end|>»"]
    assert read(sample, prompt_format="{instruction}: ")[0] == ["Hi: «Yo<|im_end|>»"]
    with pytest.raises(UserError, match="no type reads all of message_property_mappings, prompt_format"):
        read(sample, prompt_format="{instruction}", message_property_mappings=("role=speaker",))


@pytest.mark.parametrize(
    "sample, wrong",
    [
        ({"src": ["Hi", "So?"], "tgt": ["Yo"]}, "found 2 src, 1 tgt$"),
        ({"src": ["Hi"], "tgt": ["Yo"], "label": [1, 1]}, "found 1 src, 1 tgt, 2 label"),
        ({"src": ["Hi"], "tgt": None}, "found 1 src$"),
        ({"src": ["Hi"], "tgt": 3}, "column 'tgt' must be a list, found 3"),
        ({"src": ["Hi"], "tgt": [3]}, "message 1 .assistant.: content must be text, found 3"),
        ({"prompt": [HI], "completion": [{"role": "pirate", "content": "Yo"}]}, "message 1: unknown role 'pirate'"),
        ({"messages": "[{"}, "messages: not JSON"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, r"message 0 \(function_call\): not JSON"),
    ],
)
def test_a_conversation_that_is_none_is_refused_with_the_reason(read, sample, wrong):
    with pytest.raises(UserError, match=wrong):
        read(sample)


KEYS = st.sampled_from(["role", "from", "content", "value", "user", "human", "assistant", "gpt", "tool_calls"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["human", "gpt", "function_call", "[1]", "{}", "["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(
    sample=st.fixed_dictionaries(dict.fromkeys(["messages", "src", "tgt", "prompt", "completion", "label"], VALUES)),
    columns=st.sampled_from([("messages",), ("src", "tgt"), ("prompt", "completion")]),
)
@settings(deadline=None, max_examples=300)
def test_any_json_is_a_conversation_or_refused(sample, columns):
    with contextlib.suppress(UserError):
        messages_in(sample, columns, {"role": "gpt"})


CALL, OTHER = {"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}


def test_function_calls_of_sharegpt_are_tool_calls_and_those_of_one_turn_are_together():
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([OTHER])},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Yo"},
    ]
    assert check_messages(messages_in({"conversations": turns}, ("conversations",), {})) == [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER]},
        {"role": "tool", "content": "2"},
        YO,
    ]


def test_keys_of_messages_can_have_other_names(read):
    turns = [{"speaker": "human", "said": "Hi", "role": None}, {"speaker": "bot", "said": "Yo", "train": True}]
    options = {"message_property_mappings": ("role=speaker", "content=said")}
    assert read({"messages": turns}, **options)[0] == [CHAT]
    with pytest.raises(UserError, match="no assistant message that is to be trained"):
        read(
            {"messages": [turns[0], {"speaker": "bot", "said": "Yo", "ours": False}]},
            message_property_mappings=("role=speaker", "content=said", "train=ours"),
        )


FORMATS = {
    "text of columns": (
        {"title": "T", "body": "b", "year": 1},
        {"text_field": "{title} ({year}): {body}"},
        "«T (1): b<|im_end|>»",
    ),
    "chat of columns": (
        {"dialogue": "Hi", "summary": "Yo", "lang": "en"},
        {"instruction_field": "{dialogue}", "output_field": "summary"},
        CHAT,
    ),
    "prompt and answer of columns": (
        {"dialogue": "Hi", "summary": "Yo", "lang": "en"},
        {"prompt_format": "Sum up {'dialogue'}\n", "output_field": "{summary} ({lang})"},
        "Sum up Hi\n«Yo (en)<|im_end|>»",
    ),
    "output in its place": (
        {"instruction": "Hi", "output": "Yo"},
        {"prompt_format": "Q {instruction} A {output} END", "system_prompt": "S"},
        "Q Hi A «Yo END<|im_end|>»",
    ),
    "braces": ({"question": "Hi", "answer": "Yo"}, {"prompt_format": "{{{question}}} "}, "{Hi} «Yo<|im_end|>»"),
}


@pytest.mark.parametrize("sample, options, text", FORMATS.values(), ids=FORMATS)
def test_columns_stand_where_a_text_names_them(read, sample, options, text):
    assert read(sample, **options)[0] == [text]


@pytest.mark.parametrize(
    "options, wrong",
    [
        (
            {"prompt_format": "{question} {title}"},
            "missing column: it has question, answer.*needs instruction: .*title",
        ),
        ({"prompt_format": "{question"}, "write {{ and }} for plain braces"),
        ({"prompt_format": "{question!r}"}, "braces must hold the name of a column and nothing else"),
        ({"output_field": "{}"}, "braces must hold the name of a column and nothing else"),
    ],
)
def test_a_text_that_names_no_column_is_refused(read, options, wrong):
    with pytest.raises(UserError, match=wrong):
        read({"question": "Hi", "answer": "Yo"}, **options)


def test_a_column_in_a_text_must_be_text_or_a_number(read):
    with pytest.raises(UserError, match=r"a.jsonl:2: column 'body' must be text or a number, found None"):
        read({"title": "T", "body": "b"}, {"title": "T", "body": None}, text_field="{title}: {body}")


ALPACA = """
def prompt(row):
    form = "### Instruction:\\n{instruction}\\n\\n"
    form += "### Input:\\n{input}\\n\\n" if row["input"] else ""
    return {"prompt": (form + "### Response:\\n").format_map(row), "completion": row["output"]}

def text(row):
    return prompt(row)["prompt"]
"""


def test_a_function_writes_the_prompt_and_a_format_takes_it_as_it_is(read, tmp_path):
    (tmp_path / "alpaca_func.py").write_text(ALPACA)
    samples = [{"instruction": "Hi", "input": more, "output": "Yo"} for more in ("", "x")]
    expected = [
        "### Instruction:\nHi\n\n### Response:\n«Yo<|im_end|>»",
        "### Instruction:\nHi\n\n### Input:\nx\n\n### Response:\n«Yo<|im_end|>»",
    ]
    file = f"{tmp_path}/alpaca_func.py"
    assert read(*samples, function=f"{file}:prompt", prompt_format="{instruction}")[0] == expected
    assert read(*samples, function=f"{file}:text", prompt_format="{returned}")[0] == expected


TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_sharegpt_with_tools_calls_them_and_answers(tmp_path):
    """LLaMA-Factory's layout: tools are a JSON text."""
    turns = [("human", "Hi"), ("function_call", json.dumps(CALL)), ("observation", "2"), ("gpt", "Yo")]
    conversation = [{"from": role, "value": text} for role, text in turns]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": conversation, "tools": json.dumps([{"name": "f"}])}))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", TOOLS)
    documents = tokenize((Dataset(path=str(tmp_path / "a.jsonl")),), tokenizer, tmp_path / "cache")
    tokens, weights = documents.read(0, 0, 10**9)
    assert tokenizer.decode(tokens[weights > 0]) == f"{json.dumps(CALL)}<|im_end|>Yo<|im_end|>"
    assert str(tokenizer.decode(tokens)).startswith(
        '<|im_start|>tools\n[{"name": "f"}]<|im_end|>\n<|im_start|>user\nHi'
    )
    assert len(documents.notes) == 1
