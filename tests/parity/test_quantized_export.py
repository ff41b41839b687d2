"""A model exported quantized, in every format, has the same values in transformers and when read here."""

import jax
import numpy as np
import pytest
from batches import logits_on_host, make_batch, tokens
from tiny import read_model, save_torch_model

from jaxtune.exports import write
from jaxtune.hf import SCHEMES
from jaxtune.quant.format_names import format_of

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")

SIZES = dict(num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4)
# Experts, for the formats whose readers support quantized experts; layer 1 is dense.
MIXTURE = ("qwen3_moe, a dense layer, router loss", dict(SIZES, head_dim=64, moe_intermediate_size=128))
DENSE = ("qwen3, yarn rope, tied", SIZES)
CASES = {"nf4": DENSE, "fp8": MIXTURE, "nvfp4": DENSE, "mxfp4": DENSE, "int4": MIXTURE, "int8": MIXTURE}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in CASES])
def case(request, tmp_path_factory):
    """Return (kind, folder of the model, folder of its export)."""
    kind, home = request.param, tmp_path_factory.mktemp(request.param)
    name, sizes = CASES[kind]
    save_torch_model(name, home / "model", **sizes)
    return kind, home / "model", home / "written"


@pytest.fixture
def written(case, one_device, monkeypatch):
    kind, folder, output = case
    if not output.exists():
        monkeypatch.setattr(write, "write_tokenizer", lambda *_: None)  # the model has none
        model, parameters, config = read_model(folder, one_device)
        write.export_full(model, parameters, config, output, kind)
    return case


def test_read_again_it_is_what_quantizing_the_weights_gives(written, one_device):
    """Bit by bit; NVFP4's matrix scale within a rounding (files hold its reciprocal), and shared as servers need."""
    kind, folder, output = written
    model, found, _ = read_model(output, one_device)
    assert model.base.scheme.options == SCHEMES[kind] and model.base.scheme.modules
    _, plain, _ = read_model(folder, one_device)
    format = format_of(SCHEMES[kind], "")
    for name, parameter in model.parameters.items():
        if name not in model.quantized:
            assert np.array_equal(found[name], plain[name]), name
        elif kind != "nvfp4":
            expected = format.make(plain[name], parameter.axes)
            jax.tree.map(np.testing.assert_array_equal, found[name], expected)
    if kind == "nvfp4":
        apart = {name.rsplit(".", 2)[1]: name for name in model.quantized if name.startswith("stacks.0.")}
        for together in ("qkv", ("gate", "up"), ("o",), ("down",)):
            names = [apart[name] for name in together]
            whole = format.make(np.concatenate([plain[name][1] for name in names]), (None, None))
            for field in ("codes", "scales"):
                ours = np.concatenate([getattr(found[name], field)[1] for name in names])
                np.testing.assert_array_equal(ours, getattr(whole, field))
            for name in names:
                np.testing.assert_allclose(found[name].outer_scales[1], whole.outer_scales, rtol=2e-7)


def test_transformers_has_the_same_logits(written, one_device):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    kind, _, output = written
    how = {}
    if kind in ("nvfp4", "mxfp4", "int4", "int8"):
        pytest.importorskip("compressed_tensors")
        how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, attn_implementation="eager", **how)
    theirs.train()  # in evaluation mode, bitsandbytes multiplies in bfloat16 on a CPU
    assert (kind == "nf4") == any(type(module).__name__ == "Linear4bit" for module in theirs.modules())
    model, found, _ = read_model(output, one_device)
    if kind == "nvfp4":  # always bfloat16, whatever is requested; so compare weights, not layer outputs
        weights = theirs.state_dict()
        for name, parameter in model.quantized.items():
            values = jax.jit(lambda array: array.dequantize())(found[name])
            for index, place in parameter.elements():
                np.testing.assert_allclose(weights[place.name], values[index], rtol=2**-7)
        return
    rows = tokens(2, 32)
    with torch.no_grad():
        expected = theirs(torch.tensor(rows)).logits.numpy()
    ours = logits_on_host(model, found, make_batch(rows, one_device))
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()
