"""Which messages of a conversation are trained, and with which weight: the options of the section chat."""

from itertools import pairwise

import numpy as np
import pytest
from tiny import CHATML, byte_tokenizer

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder, UntrainableSample
from jaxtune.data.chat.messages import check_messages
from jaxtune.errors import UserError

MARKED = CHATML.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}",
)
SYSTEM = {"role": "system", "content": "Be."}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
MORE, LAST = {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Ok."}
TALK = [SYSTEM, USER, ANSWER, MORE, LAST]


@pytest.fixture(scope="module", params=[CHATML, MARKED], ids=["differences", "marks"])
def tokenizer(request, tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


def trained(tokenizer, messages, **options):
    """Return (text, weight) for each trained run of tokens."""
    rendered = ChatTemplate(tokenizer, chat=ChatOptions(**options)).render(check_messages(messages))
    [encoded] = Encoder(tokenizer)([rendered])
    edges = [0, *np.flatnonzero(np.diff(encoded.loss_weights)) + 1, len(encoded.tokens)]
    runs = [(encoded.tokens[a:b], float(encoded.loss_weights[a])) for a, b in pairwise(edges)]
    return [(tokenizer.decode(tokens), weight) for tokens, weight in runs if weight]


END = "<|im_end|>"
MESSAGES = {
    "the assistant's": ({}, TALK, ["Yo" + END, "Ok." + END]),
    "the user's": ({"roles": ("user",)}, TALK, ["Hi" + END, "So?" + END]),
    "of two roles": ({"roles": ("system", "assistant")}, TALK, ["Be." + END, "Yo" + END, "Ok." + END]),
    "the last round": ({"loss_scale": "last_round"}, TALK, ["Ok." + END]),
    "a tool's answer is no new round": (
        {"loss_scale": "last_round"},
        [USER, ANSWER, MORE, ANSWER, {"role": "tool", "content": "42"}, LAST],
        ["Yo" + END, "Ok." + END],
    ),
    "a message's own word": (
        {"loss_scale": "last_round"},
        [USER | {"train": True}, ANSWER | {"loss": True}, MORE, LAST],
        ["Hi" + END, "Yo" + END, "Ok." + END],
    ),
    "its own word against": ({}, [USER, ANSWER | {"loss": False}, MORE, LAST], ["Ok." + END]),
    "no stop tokens": ({"train_on_eos": "none"}, TALK, ["Yo", "Ok."]),
    "the last stop token": ({"train_on_eos": "last"}, TALK, ["Yo", "Ok." + END]),
    "all stop tokens": ({"train_on_eos": "all"}, TALK, [END, END, "Yo" + END, END, "Ok." + END]),
}


@pytest.mark.parametrize("options, messages, expected", MESSAGES.values(), ids=MESSAGES)
def test_messages_that_are_trained(tokenizer, options, messages, expected):
    assert trained(tokenizer, messages, **options) == [(text, 1) for text in expected]


def test_everything_is_trained_but_what_says_no(tokenizer):
    whole = ChatTemplate(tokenizer).render(TALK).text
    assert trained(tokenizer, TALK, loss_scale="all") == [(whole, 1)]
    for number, text in ((1, "Hi<|im_end|>"), (2, "Yo<|im_end|>")):
        messages = [message | {"train": False} if i == number else message for i, message in enumerate(TALK)]
        assert trained(tokenizer, messages, loss_scale="all") == [(part, 1) for part in whole.split(text)]


CALL = "I ask. <tool_call>{}</tool_call>"
REACT = "Thought: x\nAction: f\nAction Input: {}\nObservation: 3\nFinal Answer: y"
WEIGHTS = {
    "ignore_empty_think": ("<think>\n\n</think>\n\nYo", [("Yo" + END, 1)]),
    "ignore_empty_think of a thought": ("<think>\nHm\n</think>\n\nYo", [("<think>\nHm\n</think>\n\nYo" + END, 1)]),
    "ignore_think_prefix": ("<think>\nHm\n</think>\n\nYo", [("Hm\n</think>\n\nYo" + END, 1)]),
    "hermes": (CALL, [("I ask. ", 1), ("<tool_call>{}</tool_call>", 2), (END, 1)]),
    "last_round+hermes+ignore_empty_think": (CALL, [("I ask. ", 1), ("<tool_call>{}</tool_call>", 2), (END, 1)]),
    "react": (
        REACT,
        [
            ("Thought: x\n", 1),
            ("Action: f\nAction Input: {}\nObservation:", 2),
            ("Final Answer: y" + END, 1),
        ],
    ),
    "qwen": (
        "✿FUNCTION✿: f\n✿ARGS✿: {}\n✿RESULT✿: 3\n✿RETURN✿: y",
        [("✿FUNCTION✿: f\n✿ARGS✿: {}\n✿RESULT✿:", 2), ("✿RETURN✿: y" + END, 1)],
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_text_in_trained_messages_has_the_weight_of_its_pattern(tokenizer, name):
    content, expected = WEIGHTS[name]
    messages = [USER | {"content": content}, {"role": "assistant", "content": content}]
    assert trained(tokenizer, messages, loss_scale=name.split()[0]) == expected


def test_own_patterns_multiply_and_the_stop_token_is_always_trained(tokenizer):
    patterns = (r"\d+=0.5", r"1\d=3", ".*secret.*=0")
    messages = [USER, ANSWER | {"content": "a 12 b 22"}, MORE, LAST | {"content": "a secret"}]
    assert trained(tokenizer, messages, pattern_weights=patterns) == [
        ("a ", 1),
        ("12", 1.5),
        (" b ", 1),
        ("22", 0.5),
        (END, 1),
        (END, 1),
    ]


def test_a_message_s_own_weight_counts_more_than_patterns(tokenizer):
    messages = [USER, ANSWER | {"loss_scale": 0.25}, MORE, LAST | {"loss_scale": 0}, MORE, LAST]
    assert trained(tokenizer, messages, pattern_weights=(".=2",)) == [("Yo" + END, 0.25), ("Ok.", 2), (END, 1)]


def test_what_cannot_be_done_is_refused(tokenizer, tmp_path):
    with pytest.raises(UntrainableSample, match="no system message that is to be trained"):
        trained(tokenizer, [USER, ANSWER], roles=("system",))
    shouting = byte_tokenizer(tmp_path, CHATML.replace("message.content", "message.content | upper"))
    with pytest.raises(UntrainableSample, match=r"message 0 \(user\) cannot be found: the template changes its text"):
        trained(shouting, [USER, ANSWER], roles=("user",))
    for wrong in ({"loss": 1}, {"loss_scale": -1}, {"loss_scale": "2"}):
        with pytest.raises(UserError, match="message 0: .*loss_scale a number from 0 on"):
            check_messages([ANSWER | wrong])
