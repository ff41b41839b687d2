"""A folder's tokenizer is loaded without running its code, and copied unchanged."""

import hashlib
import json
import logging
import re
from pathlib import Path

import pytest
import transformers
from tiny import byte_tokenizer

from jaxtune import hf
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.errors import UserError
from jaxtune.hf import chat_templates
from jaxtune.hf.chat_templates import find_template


def test_a_tokenizer_is_loaded_with_its_chat_template(tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = hf.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"
    assert "im_start" in tokenizer.chat_template


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),  # panics at loading
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": r"(\w|\s)(?=("}, "behavior": "Isolated", "invert": False},
        ),
        ("truncation", {"max_length": 2, "stride": 5, "strategy": "LongestFirst", "direction": "Right"}),  # at use
    ],
    ids=["panic", "exception", "panic in use"],
)
def test_a_damaged_tokenizer_is_one_line(tmp_path, part, value):
    byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(UserError, match=f"^the tokenizer in {tmp_path} cannot be loaded: .+$"):
        hf.load_tokenizer(tmp_path)


def test_transformers_does_not_say_first_that_pytorch_is_missing():
    """Other warnings of transformers are shown."""
    logger, messages = logging.getLogger("transformers"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.warning("PyTorch was not found. Models won't be available")
    logger.warning("something else")
    logger.removeHandler(handler)
    assert messages == ["something else"]
    assert '"PyTorch was not found' in Path(transformers.__file__).read_text("utf-8"), "transformers no longer warns so"


def test_the_chat_template_of_an_older_processor_is_found(tmp_path):
    byte_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert hf.load_tokenizer(tmp_path).chat_template == "{{ messages }}"
    hf.write_chat_template(tmp_path, "{{ tools }}")
    assert hf.load_tokenizer(tmp_path).chat_template == "{{ tools }}"
    assert not (tmp_path / "chat_template.json").exists()


def test_files_are_copied_byte_for_byte_and_nothing_else_is(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    byte_tokenizer(source)
    (source / "generation_config.json").write_text('{"eos_token_id":   258}')
    (source / "preprocessor_config.json").write_text('{"image_processor_type":   "Gemma3ImageProcessor"}')
    (source / "tokenization.py").write_text("raise SystemExit")
    target.mkdir()
    (target / "added_tokens.json").write_text("{}")  # from an earlier export
    names = hf.copy_tokenizer_files(source, target)
    assert {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "generation_config.json"} <= set(names)
    assert {file.name for file in target.iterdir()} == set(names)
    for name in names:
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_a_folder_without_tokenizer_is_a_message(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer; tokenizer\.json"):
        hf.load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_a_message(tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="cannot be loaded"):
        hf.load_tokenizer(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path):
    byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        hf.load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
# name: special tokens of the tokenizer, the rendered text, and its trained part
NAMED = {
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n",
        "Yo<|im_end|>",
    ),
    "llama3": (
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>",
        "Yo<|eot_id|>",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_chat_template_by_name_renders_as_in_transformers_and_marks_answers(tmp_path, name):
    special, whole, trained = NAMED[name]
    byte_tokenizer(tmp_path, None, special, bos=special[0] if name == "llama3" else None, eos=special[-1])
    tokenizer = hf.load_tokenizer(tmp_path, name)
    rendered = ChatTemplate(tokenizer).render(TALK)
    assert rendered.text == whole == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert [rendered.text[slice(*span)] for span in rendered.spans] == [trained]
    prompt = ChatTemplate(tokenizer).prompt(TALK[:1])
    assert prompt == tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            "llama3",
            r"writes <\|start_header_id\|> and .* does not have; --config.data.special_tokens='<\|start_header_id",
        ),
        ("chatlm", "neither one of chatml, .*, seed_oss nor a file that can be read"),
    ],
)
def test_a_chat_template_that_cannot_be_used_says_why(tmp_path, wanted, said):
    byte_tokenizer(tmp_path)
    with pytest.raises(UserError, match=said):
        hf.load_tokenizer(tmp_path, wanted)


@pytest.mark.parametrize(
    ("template", "wanted", "said"),
    [
        ("{{ 1 }}", None, "the tokenizer's own, because chat.template is unset"),
        ("{{ 1 }}", "{{ 1 }}", "Jinja text, because chat.template says so"),
        ("{{ 1 }}", "mine.jinja", "mine.jinja, because chat.template says so"),
        ("qwen3_8", None, "the tokenizer's own, because chat.template is unset; published with Qwen3.8"),
        ("granite4_1", "granite4_1", "granite4_1, because chat.template says so; published with Granite 4.0 and 4.1"),
        ("glm4_moe", "glm4_moe", "glm4_moe, because chat.template says so; published with GLM-4.5"),
    ],
)
def test_a_line_says_which_chat_template_is_used_and_why(template, wanted, said):
    source = template if "{" in template else find_template(template, dict.fromkeys(chat_templates.NAMED[template], 0))
    assert hf.describe_template(source, wanted) == said
    assert "published" not in hf.describe_template(source + " ", None)  # only the exact text is known


def test_every_published_template_here_is_known_by_its_text():
    folder = Path(chat_templates.__file__).parent / "templates" / "published"
    known = json.loads((folder / "models.json").read_text())
    for file in folder.glob("*.jinja"):
        words = known[hashlib.sha256(file.read_bytes()).hexdigest()]
        assert file.stem in chat_templates.NAMED and "later revision" not in words
    newer = re.findall(r"chat\.template=(\w+)", " ".join(known.values()))
    assert newer and set(newer) <= set(chat_templates.NAMED)


def test_a_chat_template_from_a_file_is_exported_with_the_token_that_ends_its_turns(tmp_path):
    byte_tokenizer(tmp_path / "model")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    assert hf.load_tokenizer(tmp_path / "model", str(tmp_path / "mine.jinja")).chat_template.startswith("{{ messages")
    assert hf.load_tokenizer(tmp_path / "model", "{% if 1 %}its text{% endif %}").chat_template.endswith("{% endif %}")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 3, "top_p": 0.9}')
    hf.write_chat_template(tmp_path / "model", "another")
    assert hf.write_turn_end(tmp_path / "model", 5, {}) == [3, 5]
    assert hf.load_tokenizer(tmp_path / "model").chat_template == "another"
    assert hf.read_generation_config(tmp_path / "model") == {"eos_token_id": [3, 5], "top_p": 0.9}


@pytest.mark.parametrize(
    ("special", "ends", "described", "rows", "chosen"),
    [
        (("<|end|>", "<|im_start|>", "<|pad|>"), {256}, None, 259, "<|pad|>"),
        (("<|end|>", "<unk>", "<|reserved_1|>"), {256}, 256, 259, "<|reserved_1|>"),  # documents end with 256
        (("<|end|>", "<|im_start|>", "<|pad|>"), {256}, 257, 259, "<|im_start|>"),
        (("<|end|>", "<|im_start|>"), set(), None, 258, "<|end|>"),  # no document ends with it
        (("<|end|>",), {256}, None, 320, "<|pad|>"),
        (("<|end|>",), {256}, None, 257, "<|end|>"),
    ],
)
def test_padding_is_a_token_that_no_document_ends_with(tmp_path, caplog, special, ends, described, rows, chosen):
    """A new token if the model has a row for it; otherwise a line says what to do."""
    byte_tokenizer(tmp_path, special=special, eos="<|end|>")
    tokenizer = hf.load_tokenizer(tmp_path)
    assert tokenizer.pad_token is None
    number = hf.choose_padding(tokenizer, ends, described, rows)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (chosen, number)
    assert ("data.special_tokens='<|pad|>'" in caplog.text) == (number in ends)
