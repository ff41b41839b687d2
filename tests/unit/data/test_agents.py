"""Tools, calls and results in chat templates: in the template's own format, or as text if it has none."""

import pytest
from tiny import CHATML, byte_tokenizer

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import UntrainableSample
from jaxtune.data.chat.messages import check_messages, check_tools
from jaxtune.errors import UserError
from jaxtune.hf.chat_templates import find_template

SYSTEM = {"role": "system", "content": "Be brief."}
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is 3."}
FUNCTION = {"name": "look_up", "description": "Looks up a word.", "parameters": {"type": "object", "properties": {}}}
TOOLS = check_tools([{"type": "function", "function": FUNCTION}])
CALL = {"function": {"name": "look_up", "arguments": '{"word": "jäx"}'}}
CALLED = {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1"}
TALK = [SYSTEM, USER, CALLED | {"tool_calls": [CALL, CALL]}, RESULT, RESULT, ANSWER]


def trained(rendered):
    return [rendered.text[slice(*span)] for span in rendered.spans]


def test_hermes_is_how_qwen_writes_tools(tmp_path):
    plain, qwen = byte_tokenizer(tmp_path / "a", CHATML), byte_tokenizer(tmp_path / "b")
    qwen.chat_template = find_template("qwen3", qwen.get_vocab())
    lines = []
    ours = ChatTemplate(plain, lines.append, ChatOptions(agent_template="hermes"))
    theirs = ChatTemplate(qwen)
    more = [*check_messages(TALK), USER]  # Qwen3 adds an empty thought to the last turn
    assert lines == [] and ours.prompt(more, TOOLS) == theirs.prompt(more, TOOLS)
    assert ours.prompt(more[1:], TOOLS) == theirs.prompt(more[1:], TOOLS)
    assert trained(ours.render(check_messages(TALK), TOOLS)) == [
        "I ask." + '\n<tool_call>\n{"name": "look_up", "arguments": {"word": "jäx"}}\n</tool_call>' * 2 + "<|im_end|>",
        "It is 3.<|im_end|>",
    ]


AGENTS = {
    "react": (
        "should be one of [look_up]\n",
        'I ask.\nAction: look_up\nAction Input: {"word": "jäx"}<|im_end|>',
        "<|im_start|>user\nObservation: 3<|im_end|>",
    ),
    "toolbench": (
        'following APIs: [{"name": "look_up"',
        'Thought: I ask.\nAction: look_up\nAction Input: {"word": "jäx"}<|im_end|>',
        "<|im_start|>user\n3<|im_end|>",
    ),
}


@pytest.mark.parametrize("style", AGENTS)
def test_agent_templates_write_tools_as_text(tmp_path, style):
    tools, call, result = AGENTS[style]
    template = ChatTemplate(byte_tokenizer(tmp_path), chat=ChatOptions(agent_template=style))
    rendered = template.render(check_messages([SYSTEM, USER, CALLED, RESULT, ANSWER]), TOOLS)
    assert rendered.text.startswith("<|im_start|>system\nBe brief.\n\n") and tools in rendered.text
    assert result in rendered.text and trained(rendered) == [call, "It is 3.<|im_end|>"]


def test_a_result_stays_a_tool_s_for_what_is_trained(tmp_path):
    messages = check_messages([USER, CALLED, RESULT, ANSWER])
    whole = ChatOptions(agent_template="react", loss_scale="all")
    for chat, expected in (
        (ChatOptions(agent_template="react", loss_scale="last_round"), [AGENTS["react"][1], "It is 3.<|im_end|>"]),
        (ChatOptions(agent_template="react", roles=("user",)), ["Hi<|im_end|>"]),
        (ChatOptions(agent_template="react", roles=("tool",)), ["Observation: 3<|im_end|>"]),
        (whole, [ChatTemplate(byte_tokenizer(tmp_path), chat=whole).render(messages, TOOLS).text]),
    ):
        assert trained(ChatTemplate(byte_tokenizer(tmp_path), chat=chat).render(messages, TOOLS)) == expected


def test_without_an_agent_template_a_lost_call_is_refused(tmp_path):
    with pytest.raises(UntrainableSample, match="leaves out its tool call; use .* chat.agent_template"):
        ChatTemplate(byte_tokenizer(tmp_path)).render(check_messages([USER, CALLED, RESULT, ANSWER]), TOOLS)


CONTENT = "{{ message.content }}"
WRITTEN = CHATML.replace(CONTENT, CONTENT + "{% for call in message.tool_calls or [] %}CALL{% endfor %}")
OF_CALLS = {
    "added to text": "{{ call.function.name + call.function.arguments }}",
    "printed": "{{ call.function.name }}{{ call.function.arguments }}",
    "encoded": "{{ call.function.name }}{{ call.function.arguments | tojson }}",
    "by type": "{{ call.type and call.function.name }}{{ call.function.arguments | tojson }}",
}


@pytest.mark.parametrize("form", OF_CALLS)
def test_arguments_are_json_however_the_template_writes_them(tmp_path, form):
    template = ChatTemplate(byte_tokenizer(tmp_path, WRITTEN.replace("CALL", OF_CALLS[form])))
    for arguments in ('{"word": "jäx"}', {"word": "jäx"}):
        call = {"function": {"name": "look_up", "arguments": arguments}}
        rendered = template.render(check_messages([USER, CALLED | {"tool_calls": [call]}, RESULT, ANSWER]))
        assert trained(rendered)[0] == 'I ask.look_up{"word": "jäx"}<|im_end|>'


def test_a_template_that_fails_on_any_arguments_says_its_own_reason(tmp_path):
    template = ChatTemplate(byte_tokenizer(tmp_path, WRITTEN.replace("CALL", "{{ raise_exception('no calls') }}")))
    with pytest.raises(UserError, match="no calls"):
        template.render(check_messages([USER, CALLED, RESULT, ANSWER]))


def test_answers_begin_with_the_response_prefix_when_the_model_is_asked(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    prompt = ChatTemplate(tokenizer, chat=ChatOptions(response_prefix="<think>\n")).prompt([USER])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
