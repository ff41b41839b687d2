"""Overrides of a model's folder: other entries of config.json, other places, initial zeros."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import write_model_folder

from jaxtune import hf
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.data_options import Dataset
from jaxtune.errors import UserError
from jaxtune.exports.write import export_adapter, export_full
from jaxtune.hf import read_config
from jaxtune.lora.options import LoraOptions
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.weights.base import check_same_config, read_base
from jaxtune.weights.describe import describe_layout
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import config_for_model, initial_parameters, read_parameters


def declare(mesh, lora=LoraOptions(), seq_len=32, **options):
    config = Config(model=ModelOptions(dtype="float32", **options), data=DataOptions(seq_len=seq_len), lora=lora)
    return declare_model(read_base(config), config, mesh), config


def test_an_entry_that_the_family_does_not_read_is_named_with_the_nearest(tmp_path, one_device):
    folder = str(write_model_folder(tmp_path))
    message = "rms_norm_epsilon: config.json has no rms_norm_epsilon, and qwen3 reads none; nearest: rms_norm_eps"
    with pytest.raises(UserError, match=message):
        declare(one_device, path=folder, overrides=("rms_norm_epsilon=1e-5",))
    with pytest.raises(UserError, match="model_type='qwen4' is not supported"):
        declare(one_device, path=folder, overrides=('model_type="qwen4"',))


def test_a_config_that_describes_another_model_than_at_the_checkpoint_is_refused(tmp_path):
    folder = write_model_folder(tmp_path)
    config, saved = Config(model=ModelOptions(path=str(folder))), read_config(folder)
    folders = hf.find_folders(config.model)
    for then in (saved, None, saved | {"transformers_version": "1"}, saved | {"use_cache": not saved.get("use_cache")}):
        check_same_config(then, config, folders)
    with pytest.raises(UserError, match=r"config.json has changed.*\n  rms_norm_eps: 0.5 then, 1e-06 now\nput"):
        check_same_config(saved | {"rms_norm_eps": 0.5}, config, folders)


def test_an_entry_that_only_the_family_knows_can_be_set(tmp_path, one_device):
    """config.json does not list entries with default values."""
    folder = write_model_folder(tmp_path)
    config = {name: value for name, value in read_config(folder).items() if name != "initializer_range"}
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = declare(one_device, path=str(folder), overrides=("initializer_range=0.5",))
    assert model.spec.initializer_range == 0.5


def test_as_many_parameters_are_shown_as_the_files_hold(tmp_path, one_device):
    """The embedding has rows that pad the vocabulary; they are in no file."""
    folder = write_model_folder(tmp_path)
    model, _ = declare(one_device, path=str(folder))
    held = sum(value.size for value in load_file(folder / "model.safetensors").values())
    assert model.spec.padded_vocabulary > model.spec.vocabulary
    assert f" {held:,} parameters, {held:,} trained; " in describe_layout(model, one_device)


def test_parts_that_lie_apart_are_exported_together_with_what_was_changed(tmp_path, one_device):
    folder = write_model_folder(tmp_path / "all")
    for name, files in {
        "weights": ("model.safetensors",),
        "config": ("config.json",),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    }.items():
        (tmp_path / name).mkdir()
        for file in files:
            shutil.copy(folder / file, tmp_path / name)
    places = {name: str(tmp_path / name) for name in ("config", "tokenizer")}
    stretched = {"overrides": ("rms_norm_eps=1e-3",), "rope_scaling": "yarn", "max_positions": 512}
    model, config = declare(one_device, path=str(tmp_path / "weights"), seq_len=300, **places, **stretched)
    assert model.spec.norm.epsilon == 1e-3 and model.spec.max_positions == 512
    parameters = read_parameters(model, model.whole)
    export_full(model, parameters, config, tmp_path / "out")
    again, _ = declare(one_device, path=str(tmp_path / "out"), seq_len=300)
    assert again.spec == model.spec
    for name, value in read_parameters(again, again.whole).items():
        np.testing.assert_array_equal(value, parameters[name])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_rows_longer_than_the_positions_say_how_rope_is_stretched(tmp_path, one_device):
    with pytest.raises(UserError, match="stretch rope: model.max_positions and model.rope_scaling"):
        declare(one_device, path=str(write_model_folder(tmp_path)), seq_len=300)
    model, _ = declare(one_device, path=str(tmp_path), seq_len=300, rope_scaling="dynamic", max_positions=384)
    assert model.spec.max_positions == 384


def test_answers_of_a_pair_share_a_row_and_each_has_the_positions_of_the_model(tmp_path, one_device):
    path = str(write_model_folder(tmp_path))
    limited, free = Dataset(path="a.jsonl", max_tokens=100), Dataset(path="b.jsonl")
    for datasets, refused in (((limited,), False), ((limited, free), True)):
        config = Config(
            ModelOptions(path=path, dtype="float32"),
            DataOptions(seq_len=300, datasets=datasets),
            preference=PreferenceOptions("orpo"),
        )
        with pytest.raises(UserError, match="data.seq_len=300 is more than") if refused else nullcontext():
            declare_model(read_base(config), config, one_device)


def test_an_adapter_warns_that_it_leaves_out_what_was_changed(tmp_path, one_device, caplog):
    folder = str(write_model_folder(tmp_path / "base"))
    lora = LoraOptions(enabled=True, rank=2)
    for overrides, warned in ((("rms_norm_eps=1e-3",), True), ((), False)):
        caplog.clear()
        model, config = declare(one_device, lora, path=folder, overrides=overrides)
        export_adapter(model, initial_parameters(model, config), config, tmp_path / "adapter")
        assert ("an adapter has no config.json" in caplog.text) == warned


def test_changes_are_of_one_model_and_of_adapters_on_it(tmp_path):
    folder, adapter = str(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    described = {"base_model_name_or_path": folder, "peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(described | {"target_modules": ["q_proj"]}))
    config = Config(model=ModelOptions(path=folder, overrides=("rms_norm_eps=1e-3",), tokenizer="t"))
    assert config_for_model(folder, config).model == config.model
    assert config_for_model("another/one", config).model == ModelOptions(path="another/one")


def test_projections_that_start_at_zero_are_those_onto_the_residual_stream(tmp_path, one_device):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    folder = str(write_model_folder(tmp_path, "Qwen3Moe", **sizes))
    model, config = declare(one_device, path=folder, from_scratch=True, zero_projections=True)
    zero = {
        model.parameters[name].local for name, value in initial_parameters(model, config).items() if not np.any(value)
    }
    assert zero == {"attention.o.weight", "mlp.down.weight", "mlp.experts.down.weight"}
