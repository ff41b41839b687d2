"""Named chat templates write the same text as their families' own templates, of which TRL has copies.

With the families' own templates, the tokens that are trained on are the ones that TRL marks.
"""

import hashlib
import importlib.resources
import json
import re
from pathlib import Path

import pytest
from tiny import byte_tokenizer

import jaxtune.hf
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.messages import Message
from jaxtune.data.chat.sandbox import Template
from jaxtune.hf.chat_templates import NAMED, find_template

trl = pytest.importorskip("trl", reason="it has the families' templates, and needs torch (Python 3.11 here)")

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Good day."}
MORE, LAST = {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Well then."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, "a"]}}}]}
RESULT = {"role": "tool", "content": '{"found": 3}'}
RESULT_OF_CALL = RESULT | {"name": "f", "tool_call_id": "a"}
CALLED_BY_ID = CALLED | {"tool_calls": [{"id": "a", "type": "function", **CALLED["tool_calls"][0]}]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "x": {"type": "array", "items": {"type": "string"}, "description": "What."},
        "limit": {"type": "integer", "default": 3},
        "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "more": {"type": "object", "properties": {"y": {"type": "number"}}},
    },
    "required": ["x"],
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Finds.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g", "description": "Goes."}},
]
THOUGHT = {"reasoning_content": "Hm.", "thinking": "Hm."}  # Qwen's key, and gpt-oss's
CONVERSATIONS = {
    "multi-turn": ([USER, ANSWER, MORE, LAST], None),
    "system": ([SYSTEM, USER, ANSWER, MORE], None),
    "thinking": ([USER, ANSWER | THOUGHT, MORE, LAST | THOUGHT], None),
    "tools": ([SYSTEM, USER, CALLED, RESULT, LAST, MORE, CALLED | THOUGHT, RESULT, RESULT, LAST | THOUGHT], TOOLS),
}
# ours: (TRL's, the conversations that it can write)
FAMILIES = {
    "qwen3": ("qwen3", tuple(CONVERSATIONS)),
    "gpt_oss": ("gptoss", tuple(CONVERSATIONS)),
    "llama3": ("llama3", ("multi-turn", "system")),
    "gemma3": ("gemma3", ("multi-turn", "system")),
}


def prefixes(messages: list[Message]) -> list[tuple[list[Message], bool]]:
    """A conversation cut after each message, as a whole and as a prompt."""
    cuts = [messages[: i + 1] for i in range(messages[0]["role"] == "system", len(messages))]
    return [
        (cut, prompt) for cut in cuts for prompt in (False, True) if not (prompt and cut[-1]["role"] == "assistant")
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_named_template_writes_the_family_s_format(tmp_path, name):
    theirs, kinds = FAMILIES[name]
    tokenizer = byte_tokenizer(tmp_path, None, ("<s>", "</s>", *NAMED[name]), bos="<s>", eos="</s>")
    other = importlib.resources.files(trl).joinpath("chat_templates", f"{theirs}.jinja").read_text()
    ours = find_template(name, tokenizer.get_vocab())
    for messages, tools in (CONVERSATIONS[kind] for kind in kinds):
        for cut, prompt in prefixes(messages):
            variables = dict(messages=cut, tools=tools, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")
            assert Template(ours).render(**variables)[0] == Template(other).render(**variables)[0]


# ours of templates/published: TRL's
PUBLISHED = {
    **{name: name for name in ("qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super")},
    "qwen3_2507": "qwen3_instruct_2507",
    "qwen3_5": "qwen3_5_think",
    "qwen3_5_nothinking": "qwen3_5_nothink",
    "gemma4": "gemma4_v5",
    "glm4_moe": "glm4moe",
    "lfm2": "lfm2_v2",
    "lfm2_5": "lfm2_2_5_v2",
}
THEIRS = importlib.resources.files(trl).joinpath("chat_templates")
# Templates that TRL lacks, from llama.cpp: templates/published/README.md. Their texts are pinned by models.json.
OF_LLAMA_CPP = {"glm4_7_flash", "granite4", "granite4_1", "minimax_m2", "ministral3_reasoning", "north_mini_code"}
OF_LLAMA_CPP |= {"seed_oss"}


def test_published_templates_are_those_of_trl_byte_for_byte():
    files = importlib.resources.files(jaxtune.hf).joinpath("templates", "published")
    names = {Path(file.name).stem for file in files.iterdir() if file.name.endswith(".jinja")}
    assert names == PUBLISHED.keys() | OF_LLAMA_CPP
    for ours, theirs in PUBLISHED.items():
        assert files.joinpath(f"{ours}.jinja").read_bytes() == THEIRS.joinpath(f"{theirs}.jinja").read_bytes()


def test_every_text_that_is_known_is_one_of_trl_or_of_llama_cpp():
    files = importlib.resources.files(jaxtune.hf).joinpath("templates", "published")
    others = [files.joinpath(f"{name}.jinja") for name in OF_LLAMA_CPP]
    known = {hashlib.sha256(file.read_bytes()).hexdigest() for file in (*THEIRS.iterdir(), *others)}
    known.add("2294f49b51a0b9a1b0194add3f124237b5bd986599f43180eec49bba4de01365")  # LFM2-8B-A1B's, in llama.cpp
    assert known >= json.loads(files.joinpath("models.json").read_text()).keys()


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"])
def test_calls_of_gemma_4_are_trained_up_to_the_token_that_asks_for_the_result(tmp_path, name):
    """TRL has no training version of Gemma 4's templates. Its models have <|tool_response> as an end token."""
    source = THEIRS.joinpath(f"{name}.jinja").read_text()
    special = tuple(dict.fromkeys(re.findall(r"<\|[a-z_\"]+\|?>|<[a-z_]+\|>", source)))
    tokenizer = byte_tokenizer(tmp_path, None, ("<bos>", "<eos>", *special), bos="<bos>", eos="<eos>")
    tokenizer.chat_template = source
    messages = [SYSTEM, USER, CALLED_BY_ID, RESULT_OF_CALL, CALLED_BY_ID, RESULT_OF_CALL, LAST]
    rendered = ChatTemplate(tokenizer).render(messages, TOOLS[:1])
    call = '<|tool_call>call:f{x:[1,<|"|>a<|"|>]}<tool_call|><|tool_response>'
    assert [rendered.text[slice(*span)] for span in rendered.spans or ()] == [call, call, "Well then.<turn|>"]
    assert rendered.text == tokenizer.apply_chat_template(messages, tools=TOOLS[:1], tokenize=False)


# Published templates: TRL's copies, and its training versions with {% generation %} marks.
TRAINED = (
    *("qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507", "gptoss", "glm4moe"),
    *("nemotron_3_nano", "nemotron_3_super", "lfm2_v2"),
)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_of_a_published_template_is_what_trl_marks(tmp_path, name):
    """TRL also marks the end of the prompt and the white space after the token that ends a turn."""
    folder = importlib.resources.files(trl).joinpath("chat_templates")
    published, marked = (folder.joinpath(f"{name}{end}.jinja").read_text() for end in ("", "_training"))
    special = tuple(dict.fromkeys(re.findall(r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>", published + marked)))
    eos = next((token for token in special if token in ("<|im_end|>", "<|return|>")), "</s>")
    tokenizer = byte_tokenizer(tmp_path, None, ("<s>", "</s>", *special), bos="<s>", eos=eos)
    messages = [SYSTEM, USER, CALLED_BY_ID, RESULT_OF_CALL, LAST]
    parts = []
    for source in (published, marked):
        tokenizer.chat_template = source
        rendered = ChatTemplate(tokenizer).render(messages, TOOLS[:1])
        parts.append([rendered.text[slice(*span)] for span in rendered.spans or ()])
    assert len(parts[0]) == len(parts[1]) == 2
    variables = dict(tools=TOOLS[:1], add_generation_prompt=True, bos_token="<s>", eos_token=eos)
    for ours, theirs, before in zip(*parts, (messages[:2], messages[:4])):
        more, found, behind = theirs.partition(ours.rstrip())
        prompts = [
            Template(published).render(messages=before, **variables, **thought)[0]
            for thought in ({}, {"enable_thinking": False})
        ]
        assert found and not behind.strip() and any(prompt.endswith(more) for prompt in prompts), (ours, theirs)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think"])
def test_a_conversation_that_begins_with_the_assistant_is_trained(tmp_path, name):
    """These templates fail on an empty list, so the first answer has no prompt."""
    tokenizer = byte_tokenizer(
        tmp_path, None, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), bos="<s>", eos="<|im_end|>"
    )
    source = importlib.resources.files(trl).joinpath("chat_templates", f"{name}.jinja").read_text()
    tokenizer.chat_template, messages = source, [ANSWER, USER, LAST]
    rendered = ChatTemplate(tokenizer).render(messages)
    assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
    first, last = [rendered.text[slice(*span)] for span in rendered.spans or ()]
    thought = {"qwen2_5": "", "qwen3": "<think>\n\n</think>\n\n", "qwen3_5_think": "\n</think>\n\n"}[name]
    assert (first, last) == ("Good day.<|im_end|>", f"{thought}Well then.<|im_end|>")
