"""Each named chat template on a set of conversations: the tokens, the role each belongs to, and their weights.

The tables in `chat` are the record, one file a family; `pytest --regenerate` writes them again.
"""

import difflib
import json
import pathlib
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from tiny import add_special_tokens
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder, Rendered, UntrainableSample
from jaxtune.data.chat.messages import Message, check_messages, check_tools
from jaxtune.errors import UserError
from jaxtune.hf.chat_templates import NAMED, find_template

TABLES = pathlib.Path(__file__).parent / "chat"
BAR = "\uff5c"
_BRACKETED = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[TOOL_CALLS]")
_BRACKETED += ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_CALLS = tuple(
    f"<{BAR}tool▁{name}▁{end}{BAR}>" for name in ("calls", "call", "outputs", "output") for end in ("begin", "end")
)
KIMI_CALLS = ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
COHERE = ("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
COHERE += tuple(f"<|{end}_{name}|>" for name in ("THINKING", "ACTION", "TOOL_RESULT") for end in ("START", "END"))
# templates byte for byte as they were published, so without our marks
QWEN = ("qwen3_2507", "qwen3_5", "qwen3_5_nothinking", "qwen3_6", "qwen3_8")
PUBLISHED = (*QWEN, "gemma4", "glm4_moe", "nemotron_3_nano", "nemotron_3_super", "lfm2", "lfm2_5", "glm4_7_flash")
PUBLISHED += ("minimax_m2", "granite4", "granite4_1", "ministral3_reasoning", "north_mini_code", "seed_oss")
# name: other special tokens of the family's tokenizer, its bos and its eos
TOKENIZERS = {
    "chatml": (("<|endoftext|>",), None, "<|endoftext|>"),
    "qwen3": (("<|endoftext|>",), None, "<|im_end|>"),
    "qwen3_nothinking": (("<|endoftext|>",), None, "<|im_end|>"),
    "llama3": ((), "<|begin_of_text|>", "<|end_of_text|>"),
    "gemma3": ((), "<bos>", "<eos>"),
    "mistral_v3": (_BRACKETED[2:], "<s>", "</s>"),
    "mistral_v7": (_BRACKETED, "<s>", "</s>"),
    "phi4": (("<|endoftext|>",), None, "<|im_end|>"),
    "deepseek": ((*_CALLS, f"<{BAR}tool▁sep{BAR}>"), f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"),
    "gpt_oss": (("<|endoftext|>",), None, "<|return|>"),
    "glm4": (("<|endoftext|>",), None, "<|endoftext|>"),
    "ernie": ((), None, "</s>"),
    "zephyr": ((), "<s>", "</s>"),
    "alpaca": ((), "<s>", "</s>"),
    "vicuna": ((), "<s>", "</s>"),
    **dict.fromkeys(QWEN, (("<|endoftext|>",), None, "<|im_end|>")),
    "gemma4": (
        ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
        "<bos>",
        "<eos>",
    ),
    **dict.fromkeys(("glm4_moe", "glm4_7_flash"), (("<|endoftext|>",), None, "<|endoftext|>")),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super"), ((), "<s>", "<|im_end|>")),
    **dict.fromkeys(("lfm2", "lfm2_5"), ((), "<|startoftext|>", "<|im_end|>")),
    "kimi_k2": (tuple(f"<|tool_call{end}|>" for end in KIMI_CALLS), None, "<|im_end|>"),
    "minimax_m2": ((), "]~!b[", "[e~["),
    **dict.fromkeys(("granite4", "granite4_1"), ((), None, "<|end_of_text|>")),
    "ministral3_reasoning": ((*_BRACKETED, "[ARGS]", "[THINK]", "[/THINK]"), "<s>", "</s>"),
    "north_mini_code": (COHERE, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "seed_oss": ((), None, "<seed:eos>"),
}

ENDS = r"(<\|(im_end|eot_id|end)\|>|<end_of_turn>|</s>|\[/\w+\]|<\uff5ctool▁outputs?▁end\uff5c>|</tool_response>|"
ENDS += r'<turn\|>|<\|"\|>}<tool_response\|>|\n)*'

USER, ANSWER = {"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Good day."}
MORE, LAST = {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Well then."}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "jax"}'}}
LOOK_UP = {
    "name": "look_up",
    "description": "Looks up a word.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "description": "The word."}, "limit": {"type": "integer"}},
        "required": ["word"],
    },
}
CASES = {
    "single": [USER, ANSWER],
    "multi-turn": [USER, ANSWER, MORE, LAST],
    "system": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"found": 3}', "tool_call_id": "abcdefghi"},
        LAST,
    ],
    "thinking": [
        USER,
        ANSWER | {"reasoning_content": "A greeting."},
        MORE,
        LAST | {"reasoning_content": "A question."},
    ],
}
TEXT = "tools as text"  # for templates that do not support tools
CASES[TEXT] = CASES["tools"]
KNOW_TOOLS = ("qwen3", "qwen3_nothinking", "mistral_v3", "mistral_v7", "deepseek", "gpt_oss", "glm4", "kimi_k2")
KNOW_TOOLS += PUBLISHED


def cases(name: str) -> list[str]:
    return [case for case in CASES if case != TEXT or name not in KNOW_TOOLS]


def tokenizer_of(name: str, words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of a family and these words."""
    more, bos, eos = TOKENIZERS[name]
    special = dict.fromkeys((*NAMED[name], *more, *filter(None, (bos, eos))))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*words, "<unk>"))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = add_special_tokens(tokenizer, special, bos, eos)
    fast.chat_template = find_template(name, fast.get_vocab())
    return fast


def render(name: str, case: str, tokenizer: PreTrainedTokenizerFast, say=lambda line: None):
    tools = check_tools([{"type": "function", "function": LOOK_UP}]) if case in ("tools", TEXT) else None
    chat = ChatOptions(agent_template="hermes" if case == TEXT else None)
    return ChatTemplate(tokenizer, say, chat).render(check_messages(CASES[case]), tools)


def encode(name: str, case: str, say=lambda line: None):
    """Return the conversation as text and as tokens, by a tokenizer that knows its words."""
    document = render(name, case, tokenizer_of(name), say)
    split = tokenizer_of(name).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    specials = "|".join(map(re.escape, tokenizer_of(name).get_added_vocab()))
    texts = [text for text in re.split(f"(?:{specials})", document.text) if text]
    tokenizer = tokenizer_of(name, tuple(dict.fromkeys(word for text in texts for word, _ in split(text))))
    return document, tokenizer, Encoder(tokenizer)([document])[0]


def owners(document: Rendered, messages: list[Message]) -> list[str]:
    """Return for each character the role of the first message that ends after it; tool results as text are the
    user's.
    """
    roles, spans = [], iter(document.spans or ())
    for message in messages:
        if message["role"] == "assistant":
            end = next(spans)[1]
        else:
            content = message["content"] if message["content"] in document.text else json.dumps(message["content"])
            match = re.compile(re.escape(content) + ENDS).search(document.text, len(roles))
            assert match is not None
            end = match.end()
        roles += [message["role"]] * (end - len(roles))
    return roles + [messages[-1]["role"]] * (len(document.text) - len(roles))


def table(name: str, case: str) -> str:
    """Return a line for each token: its weight, its message's role, and its text."""
    lines = []
    try:
        document, tokenizer, tokens = encode(name, case, lines.append)
    except (UntrainableSample, UserError) as error:
        return f"== {case}\n{type(error).__name__}: {error}\n"
    roles = owners(document, check_messages(CASES[case]))
    position = 0
    for token, weight in zip(tokenizer.convert_ids_to_tokens(tokens.tokens.tolist()), tokens.loss_weights):
        lines.append(f"{weight:g} {roles[position]:9} {token!r}")
        position += len(token) if document.text.startswith(token, position) else 0
    return "\n".join([f"== {case}", *lines]) + "\n"


@pytest.mark.parametrize("name", NAMED)
def test_tokens_roles_and_weights_are_those_on_record(name, request):
    tables = "\n".join(table(name, case) for case in cases(name))
    file = TABLES / f"{name}.txt"
    if request.config.getoption("--regenerate"):
        file.write_text(tables)
    changed = "\n".join(difflib.unified_diff(file.read_text().split("\n"), tables.split("\n"), lineterm="", n=0))
    assert not changed, changed


@pytest.mark.parametrize("name", NAMED)
def test_a_text_begins_with_one_bos_and_every_turn_ends_with_a_trained_stop_token(name):
    for case in ("single", "multi-turn", "thinking"):
        _, tokenizer, tokens = encode(name, case)
        if tokenizer.bos_token_id is not None:
            assert tokens.tokens[0] == tokenizer.bos_token_id
            assert np.count_nonzero(tokens.tokens == tokenizer.bos_token_id) == 1
        edges = np.flatnonzero(np.diff(tokens.loss_weights, append=0) < 0)
        assert len(edges) == sum(message["role"] == "assistant" for message in CASES[case])
        stops = tokenizer.convert_ids_to_tokens(tokens.tokens[edges].tolist())
        # The marks of LFM2.5's own template include the end of the line.
        assert set(stops) - ({"\n"} if name == "lfm2_5" else set()) <= set(tokenizer.get_added_vocab())


undated = partial(re.sub, r"Current date: [\d-]+", "")


@pytest.mark.parametrize("name", NAMED)
def test_the_text_is_that_of_transformers(name):
    """Users of the exported template in other programs get the same prompt."""
    tokenizer = tokenizer_of(name)
    for case in CASES.keys() - {TEXT}:
        tools: Any = [{"type": "function", "function": LOOK_UP}] if case == "tools" else None
        try:
            text = render(name, case, tokenizer).text
        except UserError:
            continue
        theirs = tokenizer.apply_chat_template(check_messages(CASES[case]), tools=tools, tokenize=False)
        # GLM's own templates end no turn; the token with which the next message begins is appended.
        assert undated(text) == undated(f"{theirs}<|user|>" if name in ("glm4_moe", "glm4_7_flash") else str(theirs))


@pytest.mark.parametrize("name", [name for name in NAMED if name not in PUBLISHED])
def test_marks_and_differences_of_renderings_agree(name):
    marked, unmarked = tokenizer_of(name), tokenizer_of(name)
    without = str(unmarked.chat_template).replace("generation %}", "if true %}").replace("endif true", "endif")
    unmarked.chat_template = without
    for case in cases(name):
        try:
            expected = render(name, case, marked)
        except UserError:
            continue
        assert render(name, case, unmarked) == expected, case
