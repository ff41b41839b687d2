"""A model is found locally or on the hub; errors name the reason."""

import json
from unittest.mock import Mock

import pytest
from huggingface_hub import ModelCard, errors

from jaxtune.errors import UserError
from jaxtune.hf import Evaluation, label_names, read_config, read_generation_config, resolve, write_card, write_config


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "qwen3-tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 256, "dtype": "float32"}')
    return folder


def test_a_local_folder_is_taken_as_it_is(model):
    assert resolve(str(model)) == model
    assert read_config(model)["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("name", "said"),
    [("qwen3-tny", "qwen3-tiny"), ("qwen3-tiny/config.json", "is a file"), (".", "did you mean .*qwen3-tiny")],
)
def test_a_wrong_local_path_names_what_is_near(model, name, said):
    with pytest.raises(UserError, match=said):
        resolve(str(model.parent / name))


def test_a_folder_without_the_file_asked_for_is_refused(model):
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        resolve(str(model), holds="adapter_config.json")


@pytest.mark.parametrize("holds", ["config.json", "adapter_config.json", None])
def test_the_folder_of_a_run_is_refused_and_its_export_named(tmp_path, holds):
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    with pytest.raises(UserError, match="run/ is the folder of a run.*its result is in .*run/export$"):
        resolve(f"{tmp_path}/run/", holds=holds)


def test_a_revision_of_a_local_folder_is_refused(model):
    with pytest.raises(UserError, match="revision 'main'"):
        resolve(str(model), "main")


@pytest.mark.parametrize(
    ("text", "said"), [("{", "cannot be read"), ("[]", "must hold an object"), ("[" * 100_000, "cannot be read")]
)
def test_a_broken_config_is_a_message_with_its_path(model, text, said):
    (model / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json.*{said}"):
        read_config(model)


def test_from_the_hub_come_only_safetensors_and_text(model, monkeypatch):
    passed = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, **kw: passed.update(kw, repo=repo) or str(model)
    )
    assert resolve("owner/name", "v1") == model
    assert (passed["repo"], passed["revision"]) == ("owner/name", "v1")
    assert not [pattern for pattern in passed["allow_patterns"] if pattern.endswith((".bin", ".py", "*"))]
    assert "*.safetensors" in passed["allow_patterns"]
    resolve("owner/name", weights=False)
    assert "*.safetensors" not in passed["allow_patterns"]


def refusal(kind):
    return kind("refused", response=Mock(headers={}))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: refusal(errors.RepositoryNotFoundError), "neither a folder here nor a model"),
        (lambda: refusal(errors.GatedRepoError), "HF_TOKEN"),
        (lambda: refusal(errors.RevisionNotFoundError), "no revision 'v1'"),
        (lambda: errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (lambda: TimeoutError("slow"), "failed: slow"),
    ],
)
def test_what_the_hub_refuses_becomes_a_message(monkeypatch, error, said):
    def refuse(*_, **__):
        raise error()

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=said):
        resolve("owner/name", "v1")


def test_config_is_copied_byte_for_byte_unless_dtype_or_vocabulary_change(model, tmp_path):
    write_config(model, tmp_path / "same", "float32", 256)
    assert (tmp_path / "same/config.json").read_bytes() == (model / "config.json").read_bytes()
    write_config(model, tmp_path / "other", "bfloat16", 300)
    assert read_config(tmp_path / "other") == {"model_type": "qwen3", "vocab_size": 300, "dtype": "bfloat16"}


def test_the_config_of_a_decoder_inside_a_larger_model_changes_where_it_is(tmp_path):
    text = {"model_type": "gemma3_text", "torch_dtype": "bfloat16"}
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {"dtype": "a"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_config(tmp_path, tmp_path / "out", "float32", 300)
    changed = text | {"torch_dtype": "float32", "vocab_size": 300}
    assert read_config(tmp_path / "out") == config | {"torch_dtype": "float32", "text_config": changed}


def test_the_card_of_an_adapter_loads_it_on_its_base(tmp_path):
    """Two folders named `export` have different paths in the snippet, which passes the options transformers needs."""
    base, folder = tmp_path / "first" / "export", tmp_path / "second" / "export"
    for path in (base, folder):
        path.mkdir(parents=True)
    fields = {"title": "t", "name": "export", "rows": {}, "curve": tmp_path / "none"}
    write_card(folder, base_model=str(base), adapter=True, base_options={"num_labels": 3}, ends=[1, 2], **fields)
    card = (folder / "README.md").read_text()
    assert 'from_pretrained("first/export", num_labels=3), "second/export")' in card and str(tmp_path) not in card
    assert "fine-tuned from first/export" in card and 'AutoTokenizer.from_pretrained("second/export")' in card
    assert "\nmodel.generation_config.eos_token_id = [1, 2]" in card


def test_generation_config_is_optional(model):
    assert read_generation_config(model) == {}
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert read_generation_config(model) == {"eos_token_id": [1, 2]}


def test_the_card_tells_origin_and_numbers_but_no_local_path(tmp_path):
    curve = tmp_path / "run" / "loss.png"
    fields = {"title": "t", "name": "ada/t", "rows": {"steps": "1,200", "LoRA": "q|k"}, "curve": curve}
    evaluation = Evaluation({"loss": 1.25, "accuracy": 0.5}, "chats, held-out part")
    more = {"recipe": "chat:\n  template: '```'\n", "datasets": ["ada/chats"], "evaluation": evaluation}
    write_card(tmp_path, base_model="owner/name", adapter=True, **fields, **more)
    card = (tmp_path / "README.md").read_text()
    assert "| steps | 1,200 |" in card and r"| LoRA | q\|k |" in card and "![" not in card
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("owner/name"), "ada/t")' in card
    assert "<details><summary>Recipe</summary>\n\n````yaml\nchat:\n  template: '```'\n````\n\n</details>" in card
    head = ModelCard(card).data  # as the hub reads it
    assert (head.base_model, head.library_name, head.datasets) == ("owner/name", "peft", ["ada/chats"])
    read = [(one.metric_type, one.metric_value, one.dataset_name) for one in head.eval_results]
    assert read == [("loss", 1.25, evaluation.data), ("accuracy", 0.5, evaluation.data)]
    curve.parent.mkdir()
    curve.write_bytes(b"a picture")
    write_card(tmp_path, base_model=str(tmp_path), adapter=False, **fields)
    card = (tmp_path / "README.md").read_text()
    assert str(tmp_path) not in card and f"from {tmp_path.name}" in card and "<details>" not in card
    assert "](loss.png)" in card and (tmp_path / "loss.png").read_bytes() == b"a picture"
    assert 'model = AutoModelForCausalLM.from_pretrained("ada/t")' in card and "model-index" not in card


@pytest.mark.parametrize(
    "wrong", [{"id2label": 3}, {"id2label": ["a"]}, {"id2label": {"x": "a"}}, {"architectures": "LlamaForCausalLM"}]
)
def test_labels_of_a_wrong_form_are_one_line(wrong):
    classifier = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"1": "b", "0": "a"}}
    assert label_names(classifier) == ("a", "b")
    with pytest.raises(UserError, match=rf"^config\.json: {next(iter(wrong))} is .*; it must be [^\n]*$"):
        label_names(classifier | wrong)
