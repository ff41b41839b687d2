"""A checkpoint with MXFP4 experts, the published format of gpt-oss, is read with the values of transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import logits_on_host, make_batch, tokens
from safetensors.numpy import load_file, save_file
from tiny import read_model, save_torch_model

from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.recipes import RECIPES
from jaxtune.quant.options import QuantOptions
from jaxtune.training.step import Forward, accumulated_gradients

BLOCK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A gpt-oss with random codes and scales as experts."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    save_torch_model("gpt_oss, stacked experts", folder)
    rng, file = np.random.default_rng(0), folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // BLOCK)
        blocks = tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, BLOCK // 2), np.uint8)
        blocks[:, ::5] &= 0x33  # at most 1.5: requantizing would give another scale
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
    model, parameters, _ = read_model(folder, one_device)
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
    assert np.abs(logits_on_host(model, parameters, make_batch(rows, one_device)) - expected).max() <= 2e-5


@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2"])
def test_a_shard_has_its_part(folder, one_device, mesh):
    """Shards of rows and of columns; tensor=2 splits the 96 columns of `down` inside a block of 32."""
    _, whole, _ = read_model(folder, one_device)
    axis, size = mesh.split("=")
    _, parts, _ = read_model(folder, make_mesh(MeshOptions(**{"data": 1, axis: int(size)}), jax.devices()[: int(size)]))
    for name in whole:
        if "experts" in name:
            np.testing.assert_array_equal(parts[name], whole[name])


ADAPTERS = LoraOptions(enabled=True, rank=4, alpha=8.0, target_modules="q_proj|k_proj|v_proj|o_proj")
AS_FOR_USERS = True  # tests/conftest.py: compiled by XLA's own choice of code generator
KEPT = QuantOptions(format="mxfp4", exclude="self_attn")


@pytest.mark.parametrize("size", [1, 2])
def test_codes_and_scales_are_kept_as_they_are(folder, size):
    """Two shards, over the columns of gate and up and over the rows of down."""
    _, parameters, _ = read_model(folder, make_mesh(MeshOptions(fsdp=size), jax.devices()[:size]), quant=KEPT)
    tensors = load_file(folder / "model.safetensors")
    rows = {"gate": ("gate_up", slice(0, None, 2)), "up": ("gate_up", slice(1, None, 2)), "down": ("down", slice(None))}
    found = {name: value for name, value in parameters.items() if "experts" in name and name.endswith("weight")}
    assert len(found) == 2 * len(rows)
    for name, array in found.items():
        hf_name, part = rows[name.split(".")[-2]]
        for number in range(2):  # two layers of each kind: with and without a window
            layer = 2 * number + int(name.split(".")[3])
            stored = f"model.layers.{layer}.mlp.experts.{hf_name}_proj"
            blocks = tensors[f"{stored}_blocks"][:, part]
            codes = blocks.reshape(*blocks.shape[:2], -1)
            np.testing.assert_array_equal(array.codes[number], codes << 4 | codes >> 4)
            np.testing.assert_array_equal(array.scales[number], tensors[f"{stored}_scales"][:, part])


def test_kept_codes_stand_for_what_transformers_makes_of_them(folder, one_device):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, parameters, _ = read_model(folder, one_device, dtype="bfloat16", quant=KEPT)
    down = parameters["stacks.0.blocks.1.mlp.experts.down.weight"].dequantize()
    tensors = load_file(folder / "model.safetensors")
    stored = (tensors[f"model.layers.3.mlp.experts.down_proj_{part}"] for part in ("blocks", "scales"))
    expected = convert_moe_packed_tensors(*map(torch.from_numpy, stored), dtype=torch.bfloat16)
    np.testing.assert_array_equal(np.asarray(down[1], np.float32), expected.float().numpy().swapaxes(1, 2))


@pytest.mark.nightly
def test_adapters_learn_the_same_as_over_dequantized_experts(folder, one_device):
    batch, found = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 32), one_device)), []
    for quant in (QuantOptions(), KEPT):
        model, frozen, _ = read_model(folder, one_device, lora=ADAPTERS, quant=quant)
        assert len(model.quantized) == (2 * 3 if quant.format else 0)
        rng, shapes = np.random.default_rng(0), {name: p.shape for name, p in model.trained.items()}
        adapters = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
        forward = Forward(model.graph, RECIPES["fp32"], ForwardOptions(jnp.dtype("float32")))
        gradients = accumulated_gradients(forward, cross_entropy())
        found.append(jax.device_get(jax.jit(gradients)(jax.device_put(adapters), frozen, batch, jnp.int32(0))))
    expected, kept = found
    np.testing.assert_array_equal(kept.sums.loss, expected.sums.loss)
    for name, gradient in expected.gradients.items():
        assert np.abs(gradient).max() > 0
        np.testing.assert_array_equal(kept.gradients[name], gradient)


def test_it_can_be_quantized_again(folder, one_device):
    model, parameters, _ = read_model(folder, one_device, quant=QuantOptions(format="nf4", block_size=32))
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
        read_model(tmp_path, one_device)
