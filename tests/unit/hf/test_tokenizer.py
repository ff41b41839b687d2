"""A folder's tokenizer is loaded without running its code, and copied unchanged."""

import json

import pytest
from tiny import byte_tokenizer

from jaxtune import hf
from jaxtune.errors import UserError


def test_a_tokenizer_is_loaded_with_its_chat_template(tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = hf.load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"
    assert "im_start" in tokenizer.chat_template


def test_files_are_copied_byte_for_byte_and_nothing_else_is(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    byte_tokenizer(source)
    (source / "generation_config.json").write_text('{"eos_token_id":   258}')
    (source / "tokenization.py").write_text("raise SystemExit")
    names = hf.copy_tokenizer_files(source, target)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= set(names)
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
