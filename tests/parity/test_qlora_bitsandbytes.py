"""QLoRA against peft on bitsandbytes' 4-bit linear layers: loss and adapter gradients of the same weights and batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from nightly_rows import nightly
from tiny import read_model, save_torch_model

from jaxtune.exports.write import export
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.precision.recipes import RECIPES
from jaxtune.quant.options import QuantOptions
from jaxtune.training.step import Forward, accumulated_gradients

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LORA = LoraOptions(enabled=True, rank=4, alpha=8.0)


@pytest.mark.parametrize(("kind", "double_quant"), [("nf4", False), nightly("nf4", True), ("fp4", True)])
def test_loss_and_adapter_gradients_are_those_of_peft_and_bitsandbytes(one_device, tmp_path, kind, double_quant):
    """Quantized here; or read from bitsandbytes' files, because on a CPU its 8-bit scales are not the nearest."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = tmp_path / "base"
    save_torch_model("llama, linear rope", base, intermediate_size=128)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )
    reference = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits, dtype=torch.float32)
    quant = QuantOptions(format=kind, double_quant=False)
    if double_quant:
        base, quant = tmp_path / "quantized", QuantOptions()
        reference.save_pretrained(base)
    model, frozen, config = read_model(base, one_device, lora=LORA, quant=quant)
    assert len(model.quantized) == 7
    rng = np.random.default_rng(0)
    adapters = {
        name: jax.device_put(rng.normal(size=model.parameters[name].shape).astype(np.float32) * 0.1)
        for name in model.trained
    }
    export(model, {**frozen, **adapters}, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft", is_trainable=True)
    theirs.train()  # in evaluation mode, bitsandbytes multiplies in bfloat16 on a CPU

    rows = tokens(2, 48)
    loss = theirs(torch.tensor(rows), labels=torch.tensor(rows)).loss
    loss.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }

    forward = Forward(model.graph, RECIPES["fp32"], ForwardOptions(jnp.dtype("float32")))
    gradients = accumulated_gradients(forward, cross_entropy())
    batch = jax.tree.map(lambda x: x[None], make_batch(rows, one_device))
    with jax.default_matmul_precision("highest"):
        summed = jax.jit(gradients)(adapters, frozen, batch, jnp.int32(0))
    count = float(summed.sums.weight)
    assert abs(float(summed.sums.loss) / count - loss.item()) <= 1e-4 * loss.item()
    found = {
        place.name: np.asarray(summed.gradients[name])[index] / count
        for name, parameter in model.trained.items()
        for index, place in parameter.elements()
    }
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-4 * np.abs(expected[name]).max(), name
