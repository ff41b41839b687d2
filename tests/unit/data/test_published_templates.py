"""Exactly the answers and the tokens that end them are trained, with the formats that families are published with.

The formats are written down here without {% generation %} marks, as the families' own templates are. Tools and thoughts
of named templates, with and without marks: tests/golden/test_chat_templates.py.
"""

import pytest
from tiny import byte_tokenizer

from jaxtune.data.chat import ChatTemplate
from jaxtune.data.encoding import Encoder, Refused
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
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>"),
    *(f"<{BAR}{name}{BAR}>" for name in ("User", "Assistant", "end▁of▁sentence", "begin▁of▁sentence")),
)


def written(user: str, assistant: str, prompt: str = "", system: str | None = None, begin: str = "", finish: str = ""):
    """A template that writes each role so, CONTENT for the text; `finish` ends what is not a prompt."""
    system = "{{ raise_exception('no system role') }}" if system is None else system
    roles = (
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'system' %}}{system}{{% else %}}{assistant}{{% endif %}}"
    )
    end = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{finish}{{% endif %}}"
    return (begin + f"{{% for m in messages %}}{roles}{{% endfor %}}" + end).replace("CONTENT", "{{ m.content }}")


def alike(form: str, assistant: str = "assistant", finish: str = "", begin: str = "") -> str:
    """A template that writes all roles in one form, ROLE CONTENT."""
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
# family: template, eos, what is trained of each of two answers
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
        asked = [*before, USER, one, MORE]
        for messages, expected in (
            ([*asked, two], [first.replace("A", one["content"]), whole]),
            ([*before, USER, two], [whole]),
        ):
            rendered = template.render(messages)
            assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
            assert [rendered.text[slice(*span)] for span in rendered.spans or ()] == expected
            [encoded] = Encoder(tokenizer)([rendered])
            trained = encoded.tokens[encoded.loss_weights > 0]
            assert tokenizer.decode(trained.tolist()) == "".join(expected)
    assert template.turn_end() == tokenizer.convert_ids_to_tokens([int(trained[-1])])[0]


def test_a_format_that_ends_no_turn_is_refused(tokenizer):
    """GLM's: an answer ends where the next header begins, and after the last one nothing is written."""
    tokenizer.chat_template = alike("<|ROLE|>\nCONTENT", begin="[gMASK]<sop>")
    messages = [USER, {"role": "assistant", "content": "Fine."}]
    with pytest.raises(Refused, match="without a stop token at its end"):
        ChatTemplate(tokenizer).render(messages)
    with pytest.raises(Refused, match="without a stop token at its end"):
        ChatTemplate(tokenizer).render([*messages, MORE, messages[1]])


@pytest.mark.parametrize("mark", [("", ""), ("{% generation %}", "{% endgeneration %}")], ids=["plain", "marked"])
def test_a_stop_token_that_the_tokenizer_does_not_have_is_named(tmp_path, mark):
    """Gemma's tokenizer with a template of ChatML, for example."""
    other = byte_tokenizer(tmp_path, None, ("<bos>", "<eos>", "<end_of_turn>"), bos="<bos>", eos="<eos>")
    other.chat_template = written(IM_USER, f"{IM_PROMPT}{mark[0]}CONTENT<|im_end|>{mark[1]}", IM_PROMPT)
    with pytest.raises(UserError, match=r"ends a turn in <\|im_end\|>, which this tokenizer does not have") as error:
        ChatTemplate(other).render(
            [USER, {"role": "assistant", "content": "Fine."}, MORE, {"role": "assistant", "content": "So."}]
        )
    assert not isinstance(error.value, Refused)


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
