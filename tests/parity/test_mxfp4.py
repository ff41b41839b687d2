"""A checkpoint with MXFP4 experts, as gpt-oss is published, is read as transformers dequantizes it."""

import json

import jax
import numpy as np
import pytest
from batches import logits, make_batch, tokens
from safetensors.numpy import load_file, save_file
from tiny import read, torch_model

from jaxtune.config.schema import Mesh, Quant
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh

BLOCK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gpt-oss whose experts are random codes and scales."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    torch_model("gpt_oss, stacked experts", folder)
    rng, file = np.random.default_rng(0), folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // BLOCK)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, BLOCK // 2), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 124, shape, np.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_logits_are_those_of_transformers(folder, one_device):
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    rows = tokens(2, 16)
    model, parameters, _ = read(folder, one_device)
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
    assert np.abs(logits(model, parameters, make_batch(rows, one_device)) - expected).max() <= 2e-5


@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2"])
def test_a_shard_has_its_part(folder, one_device, mesh):
    """Shards of rows and of columns; tensor=2 cuts the 96 columns of `down` inside a block of 32."""
    _, whole, _ = read(folder, one_device)
    axis, size = mesh.split("=")
    _, parts, _ = read(folder, make_mesh(Mesh(**{"data": 1, axis: int(size)}), jax.devices()[: int(size)]))
    for name in whole:
        if "experts" in name:
            np.testing.assert_array_equal(parts[name], whole[name])


def test_it_can_be_quantized_again(folder, one_device):
    model, parameters, _ = read(folder, one_device, quant=Quant(format="nf4", block_size=32))
    experts = [name for name in model.quantized if "experts" in name]
    assert len(experts) == 2 * 3 and all(parameters[name].codes.dtype == np.uint8 for name in experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "gate_up_proj_blocks has no .*gate_up_proj_scales"),
        (lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:2]}), "must be U8"),
        (lambda tensors, name: tensors[f"{name}_scales"].fill(255), "a scale of MXFP4 is NaN"),
    ],
)
def test_what_is_damaged_is_said(folder, one_device, tmp_path, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.gate_up_proj")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        read(tmp_path, one_device)
