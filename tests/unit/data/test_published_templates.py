"""Exactly the answers and the tokens that end them are trained, with the published formats of model families.

The formats are written here without {% generation %} marks, as in the families' own templates. Tools and thoughts of
named templates, with and without marks: tests/golden/test_chat_templates.py. TRL's copies of templates, against its
marks: tests/parity/test_chat_templates_trl.py.
"""

import re

import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import ChatOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder, UntrainableSample
from jaxtune.errors import UserError

BAR = "\uff5c"
SPECIAL = (
    *("<s>", "</s>", "<bos>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>", "<|end_of_sentence|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|end|>", "[gMASK]", "<sop>"),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"),
    *(
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|start_of_role|>",
        "<|end_of_role|>",
    ),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|START_TEXT|>", "<|END_TEXT|>"),
    *("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|python_tag|>", "<|eom_id|>"),
    *("<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
    *(f"<{BAR}{name}{BAR}>" for name in ("User", "Assistant", "end▁of▁sentence", "begin▁of▁sentence")),
    *(f"<{BAR}tool▁{name}▁{end}{BAR}>" for name in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    f"<{BAR}tool▁sep{BAR}>",
)


def written(user: str, assistant: str, prompt: str = "", system: str | None = None, begin: str = "", finish: str = ""):
    """Return a template with these texts for each role, CONTENT for the message; `finish` ends what is not a prompt."""
    system = "{{ raise_exception('no system role') }}" if system is None else system
    roles = (
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'system' %}}{system}{{% else %}}{assistant}{{% endif %}}"
    )
    end = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{finish}{{% endif %}}"
    return (begin + f"{{% for m in messages %}}{roles}{{% endfor %}}" + end).replace("CONTENT", "{{ m.content }}")


def alike(form: str, assistant: str = "assistant", finish: str = "", begin: str = "") -> str:
    """Return a template that writes all roles in one form, ROLE CONTENT."""
    of = {role: form.replace("ROLE", role) for role in ("user", "system", assistant)}
    prompt = of[assistant].partition("CONTENT")[0]
    return written(of["user"], of[assistant], prompt, of["system"], begin, finish)


CHATML = "<|im_start|>ROLE\nCONTENT<|im_end|>\n"
THOUGHTS = (
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ m.thought }}\n</think>\n\n{% endif %}CONTENT<|im_end|>\n"
)
OLMO3 = "<|im_start|>assistant\nCONTENT{% if loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}"
GPT_OSS = (
    "<|start|>assistant<|channel|>final<|message|>CONTENT"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
)
IM_USER, IM_PROMPT = CHATML.replace("ROLE", "user"), "<|im_start|>assistant\n"
NEMOTRON_PROMPT = (
    IM_PROMPT
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
# family: template, eos, the trained part of each of two answers
FAMILIES = {
    "Phi-3, 3.5": (
        alike("<|ROLE|>\nCONTENT<|end|>\n", finish="{{ eos_token }}"),
        "<|endoftext|>",
        "A<|end|>",
        "B<|end|>",
    ),
    "Phi-3-small": (
        alike("<|ROLE|>\nCONTENT<|end|>\n", finish="{{ eos_token }}", begin="{{ bos_token }}"),
        "<|endoftext|>",
        "A<|end|>",
        "B<|end|>",
    ),
    "Phi-4-mini": (alike("<|ROLE|>CONTENT<|end|>", finish="{{ eos_token }}"), "<|endoftext|>", "A<|end|>", "B<|end|>"),
    "Llama 2": (
        written("{{ bos_token }}[INST] CONTENT [/INST]", " CONTENT {{ eos_token }}"),
        "</s>",
        " A </s>",
        " B </s>",
    ),
    "Llama 3": (
        alike("<|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>", begin="{{ bos_token }}"),
        "<|end_of_text|>",
        "A<|eot_id|>",
        "B<|eot_id|>",
    ),
    "Mistral v1": (
        written("[INST] CONTENT [/INST]", "CONTENT{{ eos_token }} ", begin="{{ bos_token }}"),
        "</s>",
        "A</s>",
        "B</s>",
    ),
    "Mistral v3": (
        written("[INST] CONTENT[/INST]", " CONTENT{{ eos_token }}", begin="{{ bos_token }}"),
        "</s>",
        " A</s>",
        " B</s>",
    ),
    "Mistral v7, Tekken": (
        written(
            "[INST]CONTENT[/INST]",
            "CONTENT{{ eos_token }}",
            system="[SYSTEM_PROMPT]CONTENT[/SYSTEM_PROMPT]",
            begin="{{ bos_token }}",
        ),
        "</s>",
        "A</s>",
        "B</s>",
    ),
    "Gemma": (
        alike("<start_of_turn>ROLE\nCONTENT<end_of_turn>\n", "model", begin="{{ bos_token }}"),
        "<bos>",
        "A<end_of_turn>",
        "B<end_of_turn>",
    ),
    "Qwen1.5, 2.5": (alike(CHATML), "<|im_end|>", "A<|im_end|>", "B<|im_end|>"),
    "Qwen of eos <|endoftext|>": (alike(CHATML), "<|endoftext|>", "A<|im_end|>", "B<|im_end|>"),
    "Qwen3": (
        written(IM_USER, THOUGHTS, IM_PROMPT),
        "<|im_end|>",
        "A<|im_end|>",
        "<think>\n\n</think>\n\nB<|im_end|>",
    ),
    "Qwen3.5": (
        written(IM_USER, THOUGHTS, IM_PROMPT + "<think>\n"),
        "<|im_end|>",
        "A<|im_end|>",
        "\n</think>\n\nB<|im_end|>",
    ),
    "Nemotron 3": (
        written(IM_USER, IM_PROMPT + "<think></think>CONTENT<|im_end|>\n", NEMOTRON_PROMPT),
        "<|im_end|>",
        "A<|im_end|>",
        "B<|im_end|>",
    ),
    "DeepSeek-V3": (
        written(
            f"<{BAR}User{BAR}>CONTENT",
            f"<{BAR}Assistant{BAR}>CONTENT{{{{ eos_token }}}}",
            f"<{BAR}Assistant{BAR}>",
            system="CONTENT",
            begin="{{ bos_token }}",
        ),
        f"<{BAR}end▁of▁sentence{BAR}>",
        f"A<{BAR}end▁of▁sentence{BAR}>",
        f"B<{BAR}end▁of▁sentence{BAR}>",
    ),
    "DeepSeek-R1": (
        written(
            f"<{BAR}User{BAR}>CONTENT",
            f"<{BAR}Assistant{BAR}>CONTENT{{{{ eos_token }}}}",
            f"<{BAR}Assistant{BAR}><think>\n",
        ),
        f"<{BAR}end▁of▁sentence{BAR}>",
        f"A<{BAR}end▁of▁sentence{BAR}>",
        f"B<{BAR}end▁of▁sentence{BAR}>",
    ),
    "Command R": (
        written(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>CONTENT<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>CONTENT<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>CONTENT<|END_OF_TURN_TOKEN|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        "A<|END_OF_TURN_TOKEN|>",
        "B<|END_OF_TURN_TOKEN|>",
    ),
    "North Mini": (
        written(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>CONTENT<|END_TEXT|><|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_TEXT|>CONTENT<|END_TEXT|><|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        "<|START_TEXT|>A<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "<|START_TEXT|>B<|END_TEXT|><|END_OF_TURN_TOKEN|>",
    ),
    "Granite": (
        alike("<|start_of_role|>ROLE<|end_of_role|>CONTENT<|end_of_text|>\n"),
        "<|end_of_text|>",
        "A<|end_of_text|>",
        "B<|end_of_text|>",
    ),
    "OLMo 2": (
        written(
            "<|user|>\nCONTENT\n",
            "<|assistant|>\nCONTENT{{ eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}",
            "<|assistant|>\n",
            begin="{{ bos_token }}",
        ),
        "<|endoftext|>",
        "A<|endoftext|>",
        "B<|endoftext|>",
    ),
    "OLMo 3": (written(IM_USER, OLMO3, IM_PROMPT), "<|endoftext|>", "A<|im_end|>", "B<|endoftext|>"),
    "ERNIE": (
        written("User: CONTENT\n", "Assistant: CONTENT<|end_of_sentence|>", "Assistant: "),
        "</s>",
        "A<|end_of_sentence|>",
        "B<|end_of_sentence|>",
    ),
    "gpt-oss": (
        written("<|start|>user<|message|>CONTENT<|end|>", GPT_OSS, "<|start|>assistant"),
        "<|return|>",
        "<|channel|>final<|message|>A<|end|>",
        "<|channel|>final<|message|>B<|return|>",
    ),
    "SmolLM3": (
        alike(CHATML, begin="<|im_start|>system\n## Metadata\n<|im_end|>\n"),
        "<|im_end|>",
        "A<|im_end|>",
        "B<|im_end|>",
    ),
}
GLM = written("<|user|>\nCONTENT", "<|assistant|>\nCONTENT", "<|assistant|>", "<|system|>\nCONTENT", "[gMASK]<sop>")
FAMILIES["GLM-4"] = GLM, "<|endoftext|>", "\nA<|user|>", "\nB<|user|>"
# Command R7B's own template always writes the prompt.
FAMILIES["ChatML that always writes the prompt"] = (
    alike(CHATML, finish=IM_PROMPT),
    "<|im_end|>",
    "A<|im_end|>",
    "B<|im_end|>",
)
USER, MORE = {"role": "user", "content": "Hi?"}, {"role": "user", "content": "So?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("published"), None, SPECIAL, bos="<s>", eos="</s>")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_answers_and_the_tokens_that_end_them_are_trained(tokenizer, name):
    tokenizer.chat_template, tokenizer.eos_token, first, last = FAMILIES[name]
    one, two = ({"role": "assistant", "content": text, "thought": ""} for text in ("Fine.", "Then so."))
    template = ChatTemplate(tokenizer)
    whole = last.replace("B", two["content"])
    for before in ([], [SYSTEM] if "no system role" not in tokenizer.chat_template else []):
        prompt = [*before, USER, one, MORE]
        for messages, expected in (
            ([*prompt, two], [re.sub(r"\bA\b", one["content"], first), whole]),
            ([*before, USER, two], [whole]),
        ):
            rendered = template.render(messages)
            end = "<|user|>" if name == "GLM-4" else ""
            assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False) + end
            assert [rendered.text[slice(*span)] for span in rendered.spans or ()] == expected
            [encoded] = Encoder(tokenizer)([rendered])
            trained = encoded.tokens[encoded.loss_weights > 0]
            assert tokenizer.decode(trained.tolist()) == "".join(expected)
    assert template.turn_end() == tokenizer.convert_ids_to_tokens([int(trained[-1])])[0]


FIRST_ANSWER, SECOND_ANSWER = ({"role": "assistant", "content": text, "thought": ""} for text in ("Hello!", "So."))
WANTS_A_MESSAGE = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
WANTS_A_QUESTION = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('no question') }}{% endif %}"
)


@pytest.mark.parametrize("begin", [WANTS_A_MESSAGE, WANTS_A_QUESTION], ids=["message", "question"])
@pytest.mark.parametrize("name", ["Qwen1.5, 2.5", "Qwen3", "Qwen3.5", "Nemotron 3"])
def test_an_answer_that_the_template_writes_no_prompt_for_is_trained(tokenizer, name, begin):
    """The conversation begins with the assistant; Qwen's templates fail on the empty list before it."""
    source, tokenizer.eos_token, first, last = FAMILIES[name]
    tokenizer.chat_template = source.replace("{% for", begin + "{% for", 1)
    expected = [first.replace("A", "Hello!"), last.replace("B", "So.")]
    for before in ([], [] if "no system role" in source else [SYSTEM]):
        messages = [*before, FIRST_ANSWER, USER, SECOND_ANSWER]
        rendered = ChatTemplate(tokenizer).render(messages)
        assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
        assert [rendered.text[slice(*span)] for span in rendered.spans or ()] == expected
        [encoded] = Encoder(tokenizer)([rendered])
        assert tokenizer.decode(encoded.tokens[encoded.loss_weights > 0].tolist()) == "".join(expected)


def test_an_answer_before_which_the_template_writes_more_than_in_its_prompt_is_trained(tokenizer):
    """Llama 3's template begins the text with the first message, and the prompt of the first answer has none."""
    source, tokenizer.eos_token, first, last = FAMILIES["Llama 3"]
    begin, loop, rest = source.partition("{% for m in messages %}")
    tokenizer.chat_template = f"{loop}{{% if loop.first %}}{begin}{{% endif %}}{rest}"
    rendered = ChatTemplate(tokenizer).render([FIRST_ANSWER, USER, SECOND_ANSWER])
    assert rendered.text.startswith("<s><|start_header_id|>assistant")
    parts = [rendered.text[slice(*span)] for span in rendered.spans or ()]
    assert parts == [first.replace("A", "Hello!"), last.replace("B", "So.")]


def test_a_first_answer_of_which_no_prompt_tells_the_header_is_refused(tokenizer):
    tokenizer.chat_template = WANTS_A_MESSAGE + alike(CHATML).partition("{% if add_generation_prompt %}")[0]
    tokenizer.eos_token = "<|im_end|>"
    with pytest.raises(
        UntrainableSample, match="message 0 .* no message of the user is before it, and the chat template fails"
    ):
        ChatTemplate(tokenizer).render([FIRST_ANSWER, USER, SECOND_ANSWER])


# Tools: in the text of the first question, or, for Mistral, before the last one.
FIRST_TOOLS = "{% if tools and loop.first %}{{ tools | tojson }}\n{% endif %}"
LAST_TOOLS = (
    "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
)
# Before and after consecutive results.
NO_RESULT_BEFORE, NO_RESULT_BEHIND = (
    "{% if loop.previtem.role != 'tool' %}",
    "{% if loop.last or loop.nextitem.role != 'tool' %}",
)
IM_RESULT = (
    f"{NO_RESULT_BEFORE}<|im_start|>user{{% endif %}}\n<tool_response>\nCONTENT\n</tool_response>"
    f"{NO_RESULT_BEHIND}<|im_end|>\n{{% endif %}}"
)
LISTED = '{"name": "NAME", "arguments": ARGUMENTS}'
TAGGED = f"<tool_call>\n{LISTED}\n</tool_call>"
PARAMETERS = (
    "<tool_call>\n<function=NAME>\n{% for key, value in c.arguments | items %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>"
)
LLAMA_HEADER, COHERE_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
GRANITE_HEADER = "<|start_of_role|>{}<|end_of_role|>"
D_CALLS, D_CALL, D_OUTPUTS, D_OUTPUT = (
    f"<{BAR}tool▁{name}▁{{}}{BAR}>" for name in ("calls", "call", "outputs", "output")
)
D_EOS = f"<{BAR}end▁of▁sentence{BAR}>"
D_FUNCTION = f"{D_CALL.format('begin')}function<{BAR}tool▁sep{BAR}>{{}}\n```json\n{{}}\n```{D_CALL.format('end')}"
JAX, FLAX = '{"word": "jax"}', '{"word": "flax"}'


def calling(
    question: str,
    answer: str,
    call: tuple[str, str, str, str],
    result: str,
    prompt: str,
    begin: str = "",
    end: str = "",
) -> str:
    """Return a template with these texts for questions, answers, calls and their results; `end` replaces the prompt.

    `call` has four texts: before the calls of a message, one call, between two calls, after the last call.
    """
    before, each, between, behind = call
    calls = (
        f"{before}{{% for c in m.tool_calls %}}{{% set id = c.id %}}{{% set c = c.function %}}{each}"
        f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{behind}"
    )
    roles = (
        f"{{% if m.role == 'user' %}}{question}{{% elif m.role == 'tool' %}}{result}"
        f"{{% elif m.tool_calls %}}{calls}{{% else %}}{answer}{{% endif %}}"
    )
    for name, value in {"CONTENT": "m.content", "NAME": "c.name", "ARGUMENTS": "c.arguments | tojson"}.items():
        roles = roles.replace(name, "{{ " + value + " }}")
    end = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{end}{{% endif %}}"
    # Jinja removes a newline after a block.
    return f"{begin}{{% for m in messages %}}{roles}{{% endfor %}}{end}".replace("%}\n", "%}{{ '\\n' }}")


# family: template, eos, the trained part of a call, of two calls in a message (None: only one allowed), of an answer
CALLING = {
    "Llama 3.1": (
        calling(
            LLAMA_HEADER.format("user") + FIRST_TOOLS + "CONTENT<|eot_id|>",
            LLAMA_HEADER.format("assistant") + "CONTENT<|eot_id|>",
            (LLAMA_HEADER.format("assistant"), '{"name": "NAME", "parameters": ARGUMENTS}', "", "<|eot_id|>"),
            LLAMA_HEADER.format("ipython") + '"CONTENT"<|eot_id|>',
            LLAMA_HEADER.format("assistant"),
            "{{ bos_token }}",
        ),
        "<|eot_id|>",
        f'{{"name": "look_up", "parameters": {JAX}}}<|eot_id|>',
        None,
        "B<|eot_id|>",
    ),
    "Mistral v3": (
        calling(
            LAST_TOOLS + "[INST] CONTENT[/INST]",
            " CONTENT{{ eos_token }}",
            ("[TOOL_CALLS] [", LISTED[:-1] + ', "id": "{{ id }}"}', ", ", "]{{ eos_token }}"),
            '[TOOL_RESULTS] {"content": CONTENT, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
            "",
            "{{ bos_token }}",
        ),
        "</s>",
        f'[TOOL_CALLS] [{{"name": "look_up", "arguments": {JAX}, "id": "abcdefghi"}}]</s>',
        f'[TOOL_CALLS] [{{"name": "look_up", "arguments": {JAX}, "id": "abcdefghi"}}, '
        f'{{"name": "look_up", "arguments": {FLAX}, "id": "abcdefghj"}}]</s>',
        " B</s>",
    ),
    "Mistral v11, Tekken": (
        calling(
            LAST_TOOLS + "[INST]CONTENT[/INST]",
            "CONTENT{{ eos_token }}",
            ("", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", "{{ eos_token }}"),
            "[TOOL_RESULTS]CONTENT[/TOOL_RESULTS]",
            "",
            "{{ bos_token }}",
        ),
        "</s>",
        f"[TOOL_CALLS]look_up[ARGS]{JAX}</s>",
        f"[TOOL_CALLS]look_up[ARGS]{JAX}[TOOL_CALLS]look_up[ARGS]{FLAX}</s>",
        "B</s>",
    ),
    "Qwen2.5, 3": (
        calling(
            f"<|im_start|>user\n{FIRST_TOOLS}CONTENT<|im_end|>\n",
            f"{IM_PROMPT}CONTENT<|im_end|>\n",
            ("<|im_start|>assistant", "\n" + TAGGED, "", "<|im_end|>\n"),
            IM_RESULT,
            IM_PROMPT,
        ),
        "<|im_end|>",
        f'<tool_call>\n{{"name": "look_up", "arguments": {JAX}}}\n</tool_call><|im_end|>',
        f'<tool_call>\n{{"name": "look_up", "arguments": {JAX}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "look_up", "arguments": {FLAX}}}\n</tool_call><|im_end|>',
        "B<|im_end|>",
    ),
    "Qwen3.5": (
        calling(
            f"<|im_start|>user\n{FIRST_TOOLS}CONTENT<|im_end|>\n",
            f"{IM_PROMPT}<think>\n\n</think>\n\nCONTENT<|im_end|>\n",
            (f"{IM_PROMPT}<think>\n\n</think>\n\n", PARAMETERS, "\n", "<|im_end|>\n"),
            IM_RESULT,
            f"{IM_PROMPT}<think>\n",
        ),
        "<|im_end|>",
        "\n</think>\n\n<tool_call>\n<function=look_up>\n<parameter=word>\njax\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>",
        None,
        "\n</think>\n\nB<|im_end|>",
    ),
    "Nemotron 3": (
        calling(
            f"<|im_start|>user\n{FIRST_TOOLS}CONTENT<|im_end|>\n",
            f"{IM_PROMPT}<think></think>CONTENT<|im_end|>\n",
            (f"{IM_PROMPT}<think></think>\n", PARAMETERS + "\n", "", "<|im_end|>\n"),
            IM_RESULT,
            NEMOTRON_PROMPT,
        ),
        "<|im_end|>",
        "\n<tool_call>\n<function=look_up>\n<parameter=word>\njax\n</parameter>\n</function>\n</tool_call>\n<|im_end|>",
        None,
        "B<|im_end|>",
    ),
    "DeepSeek-V3": (
        calling(
            f"<{BAR}User{BAR}>{FIRST_TOOLS}CONTENT",
            f"{NO_RESULT_BEFORE}<{BAR}Assistant{BAR}>{{% endif %}}CONTENT{{{{ eos_token }}}}",
            (
                f"{NO_RESULT_BEFORE}<{BAR}Assistant{BAR}>{{% endif %}}" + D_CALLS.format("begin"),
                D_FUNCTION.format("NAME", "{{ c.arguments }}"),
                "\n",
                D_CALLS.format("end") + "{{ eos_token }}",
            ),
            f"{NO_RESULT_BEFORE}{D_OUTPUTS.format('begin')}{{% endif %}}{D_OUTPUT.format('begin')}CONTENT"
            f"{D_OUTPUT.format('end')}{NO_RESULT_BEHIND}{D_OUTPUTS.format('end')}{{% endif %}}",
            f"{{% if messages[-1].role != 'tool' %}}<{BAR}Assistant{BAR}>{{% endif %}}",
            "{{ bos_token }}",
        ),
        D_EOS,
        f"{D_CALLS.format('begin')}{D_FUNCTION.format('look_up', JAX)}{D_CALLS.format('end')}{D_EOS}",
        f"{D_CALLS.format('begin')}{D_FUNCTION.format('look_up', JAX)}\n{D_FUNCTION.format('look_up', FLAX)}"
        f"{D_CALLS.format('end')}{D_EOS}",
        f"B{D_EOS}",
    ),
    "GLM-4.5 to 4.7": (
        calling(
            f"<|user|>\n{FIRST_TOOLS}CONTENT",
            "<|assistant|>\n<think></think>\nCONTENT",
            (
                "<|assistant|>\n<think></think>",
                "\n<tool_call>NAME\n{% for key, value in c.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
                "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
                "",
                "",
            ),
            f"{NO_RESULT_BEFORE}<|observation|>{{% endif %}}\n<tool_response>\nCONTENT\n</tool_response>",
            "<|assistant|>",
            "[gMASK]<sop>",
        ),
        "<|endoftext|>",
        "\n<think></think>\n<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>jax</arg_value>\n</tool_call>"
        "<|observation|>",
        None,
        "\n<think></think>\nB<|user|>",
    ),
    "Command R7B": (
        calling(
            COHERE_HEADER.format("USER") + FIRST_TOOLS + "CONTENT<|END_OF_TURN_TOKEN|>",
            COHERE_HEADER.format("CHATBOT") + "<|START_RESPONSE|>CONTENT<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            (
                COHERE_HEADER.format("CHATBOT") + "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n",
                '    {"tool_name": "NAME", "parameters": ARGUMENTS}',
                ",\n",
                "\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
            ),
            f"{NO_RESULT_BEFORE}{COHERE_HEADER.format('SYSTEM')}<|START_TOOL_RESULT|>[{{% endif %}}\nCONTENT"
            f"{NO_RESULT_BEHIND}\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>{{% endif %}}",
            COHERE_HEADER.format("CHATBOT"),
            end=COHERE_HEADER.format("CHATBOT"),  # always written, even without a prompt
        ),
        "<|END_OF_TURN_TOKEN|>",
        f'<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {{"tool_name": "look_up", "parameters": {JAX}}}'
        "\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
        None,
        "<|START_RESPONSE|>B<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "Granite 4": (
        calling(
            GRANITE_HEADER.format("user") + FIRST_TOOLS + "CONTENT<|end_of_text|>\n",
            GRANITE_HEADER.format("assistant") + "CONTENT<|end_of_text|>\n",
            (GRANITE_HEADER.format("assistant"), TAGGED, "\n", "<|end_of_text|>\n"),
            f"{NO_RESULT_BEFORE}{GRANITE_HEADER.format('user')}{{% endif %}}\n<tool_response>\nCONTENT\n"
            f"</tool_response>{NO_RESULT_BEHIND}<|end_of_text|>\n{{% endif %}}",
            GRANITE_HEADER.format("assistant"),
        ),
        "<|end_of_text|>",
        f'<tool_call>\n{{"name": "look_up", "arguments": {JAX}}}\n</tool_call><|end_of_text|>',
        None,
        "B<|end_of_text|>",
    ),
    "Gemma 4": (  # a model's turn continues after the results of its calls
        calling(
            f"<|turn>user\n{FIRST_TOOLS}CONTENT<turn|>\n",
            f"{NO_RESULT_BEFORE}<|turn>model\n{{% endif %}}CONTENT<turn|>\n",
            (
                f"{NO_RESULT_BEFORE}<|turn>model\n{{% endif %}}",
                '<|tool_call>call:NAME{word:<|"|>{{ c.arguments.word }}<|"|>}<tool_call|>',
                "",
                f"{NO_RESULT_BEHIND}<|tool_response>{{% endif %}}",
            ),
            '<|tool_response>response:look_up{value:<|"|>CONTENT<|"|>}<tool_response|>',
            "{% if messages[-1].role == 'user' %}<|turn>model\n{% endif %}",
            "{{ bos_token }}",
        ),
        "<eos>",
        '<|tool_call>call:look_up{word:<|"|>jax<|"|>}<tool_call|><|tool_response>',
        '<|tool_call>call:look_up{word:<|"|>jax<|"|>}<tool_call|>'
        '<|tool_call>call:look_up{word:<|"|>flax<|"|>}<tool_call|><|tool_response>',
        "B<turn|>",
    ),
    "gpt-oss": (
        calling(
            f"<|start|>user<|message|>{FIRST_TOOLS}CONTENT<|end|>",
            GPT_OSS,
            ("<|start|>assistant", " to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS", "", "<|call|>"),
            "<|start|>functions.{{ loop.previtem.tool_calls[0].function.name }} to=assistant<|channel|>commentary"
            "<|message|>CONTENT<|end|>",
            "<|start|>assistant",
        ),
        "<|return|>",
        f" to=functions.look_up<|channel|>commentary json<|message|>{JAX}<|call|>",
        None,
        "<|channel|>final<|message|>B<|return|>",
    ),
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    {"id": number, "type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
    for number, word in (("abcdefghi", "jax"), ("abcdefghj", "flax"))
]
RESULTS = [{"role": "tool", "name": "look_up", "content": "7", "tool_call_id": call["id"]} for call in CALLS]
CALLED, CALLED_TWICE = ({"role": "assistant", "content": "", "tool_calls": CALLS[:count]} for count in (1, 2))
ANSWER = {"role": "assistant", "content": "Seven."}


def trained_parts(tokenizer, template: ChatTemplate, messages) -> list[str]:
    """Return the trained spans of a conversation with tools, after checking that exactly their tokens are trained."""
    rendered = template.render(messages, TOOLS)
    spans = [rendered.text[slice(*span)] for span in rendered.spans or ()]
    [encoded] = Encoder(tokenizer)([rendered])
    assert tokenizer.decode(encoded.tokens[encoded.loss_weights > 0].tolist()) == "".join(spans)
    return spans


@pytest.mark.parametrize("name", CALLING)
def test_calls_and_the_tokens_that_end_them_are_trained(tokenizer, name):
    tokenizer.chat_template, tokenizer.eos_token, one, two, last = CALLING[name]
    answer, template = last.replace("B", ANSWER["content"], 1), ChatTemplate(tokenizer)
    earlier = answer.replace("<|return|>", "<|end|>")
    called = [USER, CALLED, RESULTS[0]]
    assert trained_parts(tokenizer, template, [USER, CALLED]) == [one]
    assert trained_parts(tokenizer, template, [*called, ANSWER]) == [one, answer]
    assert trained_parts(tokenizer, template, [*called, CALLED, RESULTS[0], ANSWER]) == [one, one, answer]
    assert trained_parts(tokenizer, template, [*called, ANSWER, *called, ANSWER]) == [one, earlier, one, answer]
    assert trained_parts(tokenizer, template, [USER, ANSWER, *called, ANSWER]) == [earlier, one, answer]
    if two is not None:
        assert trained_parts(tokenizer, template, [USER, CALLED_TWICE, *RESULTS, ANSWER]) == [two, answer]


def test_calls_of_a_template_that_writes_none_are_trained_as_text(tokenizer):
    """SmolLM3's template writes neither calls nor the data's tools, and reads results as the user's messages."""
    smol = written(IM_USER, f"{IM_PROMPT}CONTENT<|im_end|>\n", IM_PROMPT, IM_USER.replace("user", "system"))
    tokenizer.chat_template = smol.replace("m.role == 'user'", "m.role in ('user', 'tool')")
    tokenizer.eos_token = "<|im_end|>"
    messages = [USER, CALLED, RESULTS[0], ANSWER]
    with pytest.raises(UntrainableSample, match="message 1 .* renders as nothing"):
        ChatTemplate(tokenizer).render(messages, TOOLS)
    template = ChatTemplate(tokenizer, chat=ChatOptions(agent_template="hermes"))
    call, answer = trained_parts(tokenizer, template, messages)
    assert answer == "Seven.<|im_end|>" and call.startswith("<tool_call>") and call.endswith("</tool_call><|im_end|>")


def test_text_that_a_template_writes_behind_the_result_is_refused(tokenizer):
    """Gemma 4's template does so if the message calls a tool as well; the text would not be trained."""
    tokenizer.chat_template = calling(
        "<|im_start|>user\nCONTENT<|im_end|>\n",
        "CONTENT<|im_end|>\n",
        (IM_PROMPT, TAGGED, "", "<|im_end|>"),
        "<tool_response>CONTENT</tool_response>{{ loop.previtem.content }}",
        "{% if messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}",
    )
    with pytest.raises(UntrainableSample, match="message 1 .* writes its text behind the next message"):
        ChatTemplate(tokenizer).render([USER, CALLED | {"content": "Wait."}, RESULTS[0], ANSWER])


def test_text_next_to_a_call_that_a_template_leaves_out_is_said(tokenizer):
    tokenizer.chat_template, tokenizer.eos_token, one, *_ = CALLING["gpt-oss"]
    lines = []
    template = ChatTemplate(tokenizer, lines.append)
    messages = [USER, ANSWER, MORE, CALLED | {"content": "Wait."}, RESULTS[0], ANSWER]
    assert one in trained_parts(tokenizer, template, messages)
    assert "the text next to tool calls in messages of role 'assistant' is left out by the chat template" in lines


def test_a_turn_that_nothing_ends_is_said_to_end_with_the_next_header(tokenizer):
    """As in GLM's template: the last answer, too, is followed by the first token of another question."""
    tokenizer.chat_template, tokenizer.eos_token = GLM, "<|endoftext|>"
    lines = []
    template = ChatTemplate(tokenizer, lines.append)
    for _ in range(2):
        rendered = template.render([USER, ANSWER])
    assert rendered.text == tokenizer.apply_chat_template([USER, ANSWER], tokenize=False) + "<|user|>"
    assert [line for line in lines if "no token that ends a turn; <|user|>" in line] == lines


@pytest.mark.parametrize("messages", [[USER, ANSWER, ANSWER], [USER, ANSWER, SYSTEM, ANSWER]], ids=["answer", "system"])
def test_a_turn_that_only_a_header_ends_which_no_model_stops_at_is_refused(tokenizer, messages):
    tokenizer.chat_template, tokenizer.eos_token = GLM, "<|endoftext|>"
    with pytest.raises(UntrainableSample, match="message 1 .* without a stop token at its end"):
        ChatTemplate(tokenizer).render(messages)


def test_a_format_without_special_tokens_that_ends_no_turn_is_refused(tokenizer):
    tokenizer.chat_template = written("USER: CONTENT ", "ASSISTANT: CONTENT ", "ASSISTANT:")
    with pytest.raises(UntrainableSample, match="without a stop token at its end"):
        ChatTemplate(tokenizer).render([USER, ANSWER, MORE, ANSWER])


def test_a_template_that_always_writes_the_prompt_and_ends_turns_in_no_eos_is_refused(tokenizer):
    tokenizer.chat_template, tokenizer.eos_token = alike(CHATML, finish=IM_PROMPT), "<|endoftext|>"
    with pytest.raises(UntrainableSample, match=r"unclear which of <\|im_end\|>, <\|im_start\|> ends the turn"):
        ChatTemplate(tokenizer).render([USER, ANSWER])


@pytest.mark.parametrize("mark", [("", ""), ("{% generation %}", "{% endgeneration %}")], ids=["plain", "marked"])
def test_a_stop_token_that_the_tokenizer_does_not_have_is_named(tmp_path, mark):
    """Gemma's tokenizer with a ChatML template, for example."""
    gemma = byte_tokenizer(tmp_path, None, ("<bos>", "<eos>", "<end_of_turn>"), bos="<bos>", eos="<eos>")
    gemma.chat_template = written(IM_USER, f"{IM_PROMPT}{mark[0]}CONTENT<|im_end|>{mark[1]}", IM_PROMPT)
    with pytest.raises(UserError, match=r"ends a turn in <\|im_end\|>, which this tokenizer does not have") as error:
        ChatTemplate(gemma).render(
            [USER, {"role": "assistant", "content": "Fine."}, MORE, {"role": "assistant", "content": "So."}]
        )
    assert not isinstance(error.value, UntrainableSample)


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron 3", "gpt-oss", "OLMo 3", "Llama 3"])
def test_the_number_of_renderings_does_not_grow_with_the_turns(tokenizer, name, monkeypatch):
    tokenizer.chat_template, tokenizer.eos_token, _, _ = FAMILIES[name]
    counts = []
    for turns in (4, 40):
        template = ChatTemplate(tokenizer)
        real, calls = template._template.render, []

        def counted(calls=calls, real=real, **variables):
            calls.append(1)
            return real(**variables)

        monkeypatch.setattr(template._template, "render", counted)
        answer = {"role": "assistant", "content": "Fine.", "thought": ""}
        assert len(template.render([USER, answer] * turns).spans or ()) == turns
        counts.append(len(calls))
    assert counts[0] == counts[1]
