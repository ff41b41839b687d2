"""Adapters are exchanged with the peft library unchanged; other adapters than plain LoRA are refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import write_model_folder

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions

MODULE = "model.layers.0.self_attn.q_proj"
LORA = LoraOptions(rank=4, alpha=8.0, dropout=0.1)


def write(folder, modules, lora=LORA, base_model="owner/name", targets=None):
    tensors = [
        hf.OutputTensor(f"{module}.lora_{half}.weight", array.shape, array.dtype, lambda array=array: array)
        for module, pair in modules.items()
        for half, array in zip("AB", pair)
    ]
    targets = targets or sorted({module.rsplit(".", 1)[1] for module in modules})
    hf.write_adapter(folder, tensors, lora, base_model, "v1", targets)


def halves(adapter, module):
    """Return A and B as they are in the file."""
    tensors = (adapter.tensors[f"{module}.lora_{half}.weight"] for half in "AB")
    return [tensor.rows(0, tensor.shape[0], (slice(None),)) for tensor in tensors]


def pair(rows, columns, rank=4, seed=0):
    generator = np.random.default_rng(seed)
    return (
        generator.standard_normal((rank, columns)).astype(np.float32),
        generator.standard_normal((rows, rank)).astype(np.float32),
    )


@pytest.fixture
def adapter(tmp_path):
    write(tmp_path, {MODULE: pair(6, 5)})
    return tmp_path


def test_what_is_written_is_read_back(adapter):
    back = hf.read_adapter(adapter)
    assert (back.rank, back.alpha, back.dropout, back.use_rslora) == (4, 8.0, 0.1, False)
    assert (back.base_model, back.revision) == ("owner/name", "v1")
    assert back.modules == {MODULE} and back.tensors.keys() == {f"{MODULE}.lora_{half}.weight" for half in "AB"}
    for half, written in zip(halves(back, MODULE), pair(6, 5), strict=True):
        np.testing.assert_array_equal(half, written)


def test_an_adapter_of_older_names_is_of_the_modules_of_now(tmp_path):
    write(tmp_path, {"language_model.model.layers.0.self_attn.q_proj": pair(6, 5)})
    assert hf.read_adapter(tmp_path).modules == {"model.language_model.layers.0.self_attn.q_proj"}


def test_every_module_is_among_the_targets(tmp_path):
    with pytest.raises(ValueError, match="q_proj"):
        write(tmp_path, {MODULE: pair(6, 5)}, targets=["v_proj"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", "yes"),
        ("bias", "boft_only"),
        ("modules_to_save", "lm_head"),
        ("rank_pattern", {"q_proj": 0.5}),
        ("alpha_pattern", [8]),
        ("fan_in_fan_out", True),
        ("trainable_token_indices", [1]),
        ("init_lora_weights", "pissa"),
        ("some_later_option", 3),
        ("r", "4"),
        ("r", True),
        ("r", 0),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("use_rslora", "yes"),
        ("target_parameters", "experts.down_proj"),
        ("target_parameters", [1]),
    ],
)
def test_anything_but_plain_lora_is_named_and_refused(adapter, key, value):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=rf"adapter_config\.json: {key} is "):
        hf.read_adapter(adapter)


def test_experts_in_one_tensor_are_known_by_their_ranks_and_the_names_of_parameters(tmp_path):
    experts = "model.layers.0.mlp.experts"
    modules = {MODULE: pair(6, 5), f"{experts}.base_layer": pair(6, 5, rank=12), experts: pair(5, 3, rank=12)}
    tensors = [
        hf.OutputTensor(f"{module}.lora_{half}.weight", array.shape, array.dtype, lambda array=array: array)
        for module, halves in modules.items()
        for half, array in zip("AB", halves)
    ]
    parameters = ["experts.down_proj", "experts.gate_up_proj"]
    with pytest.raises(ValueError, match="do not match"):
        hf.write_adapter(tmp_path, tensors, LORA, "owner/name", "v1", ["q_proj"])
    hf.write_adapter(tmp_path, tensors, LORA, "owner/name", "v1", ["q_proj"], parameters)
    back = hf.read_adapter(tmp_path)
    assert back.modules == modules.keys() and back.targets == (*parameters, MODULE)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for pattern in ("down_proj", r"experts\.down_proj", r"model\.layers\.0\.mlp\.experts\.down_proj", ".*_proj"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {pattern: 2}}))
        with pytest.raises(UserError, match="alpha_pattern is .* numbers by name of module"):
            hf.read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"q_proj": 2}}))
    assert hf.read_adapter(tmp_path).alphas == {MODULE: 2.0}

    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{experts}.lora_B.weight": np.zeros((5, 8), np.float32)}, file)
    with pytest.raises(UserError, match=f"the rank of {experts} is 12 in lora_A and 8 in lora_B"):
        hf.read_adapter(tmp_path)
    save_file(load_file(file) | {f"base_model.model.{experts}.lora_B.weight": np.zeros((5, 0), np.float32)}, file)
    with pytest.raises(UserError, match=r"\(5, 0\); it must be \(out, r\) with r = 4, or r times the experts"):
        hf.read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"base_model.model.{MODULE}.lora_B.weight": None}, f"missing for {MODULE}"),
        ({f"base_model.model.{MODULE}.lora_B.weight": np.zeros((6, 3), np.float32)}, r"lora_B.weight is F32 \(6, 3\)"),
        ({f"base_model.model.{MODULE}.lora_A.weight": np.zeros((4, 5), np.int32)}, "is I32"),
        ({f"base_model.model.{MODULE}.lora_magnitude_vector": np.zeros(6, np.float32)}, "use_dora in .* is False"),
        ({f"base_model.model.{MODULE}.lora_C.weight": np.zeros((4, 5), np.float32)}, "not understood"),
    ],
)
def test_tensors_that_make_no_adapter_are_named_and_refused(adapter, changes, said):
    tensors = load_file(adapter / "adapter_model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=said):
        hf.read_adapter(adapter)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("use_dora", True, f"{MODULE} has no lora_magnitude_vector, but use_dora in .* is True"),
        ("rank_pattern", {"q_proj": 8}, "must be .* with r = 8"),
        ("modules_to_save", ["lm_head"], "there is no tensor of lm_head"),
    ],
)
def test_tensors_must_be_those_that_the_config_says(adapter, key, value, said):
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match=said):
        hf.read_adapter(adapter)


def test_an_adapter_saved_as_a_pickle_is_refused(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match="saved as safetensors"):
        hf.read_adapter(adapter)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_computes_what_merging_by_hand_does(tmp_path, use_rslora):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    def load():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)

    write_model_folder(tmp_path / "model")
    merged = load()
    shapes = {
        name: module.weight.shape
        for name, module in merged.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    modules = {name: pair(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    lora = dataclasses.replace(LORA, use_rslora=use_rslora)
    write(tmp_path / "adapter", modules, lora, base_model=str(tmp_path / "model"))
    with torch.no_grad():
        for name, (a, b) in modules.items():
            scale = 8.0 / (2.0 if use_rslora else 4.0)
            merged.get_submodule(name).weight += scale * torch.tensor(b) @ torch.tensor(a)
    tokens = torch.arange(24).reshape(2, 12)
    adapted = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    with torch.no_grad():
        plain, wanted, by_peft = (model(tokens).logits for model in (load(), merged, adapted))
    assert (plain - wanted).abs().max() > 1e-2
    assert (by_peft - wanted).abs().max() <= 1e-5

    adapted.save_pretrained(tmp_path / "saved")
    read = hf.read_adapter(tmp_path / "saved")
    assert (read.rank, read.alpha, read.use_rslora, read.modules) == (4, 8.0, use_rslora, modules.keys())
    for name, pair_written in modules.items():
        for half, written in zip(halves(read, name), pair_written, strict=True):
            np.testing.assert_array_equal(half, written)
