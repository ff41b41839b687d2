"""A checkpoint quantized by transformers and bitsandbytes is read byte for byte, with their dequantized values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import write_model_folder

from jaxtune import hf
from jaxtune.quant.format_names import format_of

torch = pytest.importorskip("torch", reason="bitsandbytes needs torch, whose CPU build exists for Python 3.11 only")
bitsandbytes = pytest.importorskip("bitsandbytes")

LAYERS = 2
SITES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (32, 64),
    "mlp.gate_proj": (320, 64),
    "mlp.down_proj": (64, 320),
}
SIZES = dict(hidden_size=64, intermediate_size=320, head_dim=16)  # 64 x 320: two outer scales, the second for 64 scales


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_in_four_bits(tmp_path, one_device, kind, double_quant):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double_quant
    )
    reference = AutoModelForCausalLM.from_pretrained(
        write_model_folder(tmp_path / "plain", **SIZES), quantization_config=quantization, dtype=torch.float32
    )
    reference.save_pretrained(tmp_path / "quantized")

    scheme = hf.read_scheme(tmp_path / "quantized")
    assert (scheme.options.format, scheme.options.block_size, scheme.options.double_quant) == (kind, 64, double_quant)
    modules = {name for name, module in reference.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
    assert scheme.modules == modules and len(modules) == 7 * LAYERS

    names = {site: [f"model.layers.{i}.{site}" for i in range(LAYERS)] for site in SITES}
    format = format_of(scheme.options, "any.weight")
    targets = {
        site: (
            format.abstract((LAYERS, *shape), jnp.float32, ("layers", None, None)),
            tuple(f"{name}.weight" for name in names[site]),
        )
        for site, shape in SITES.items()
    }
    for site, array in hf.read_quantized(tmp_path / "quantized", scheme, targets).items():
        values = jax.jit(lambda array: array.dequantize())(array)
        for i, name in enumerate(names[site]):
            weight = reference.get_submodule(name).weight
            np.testing.assert_array_equal(np.asarray(array.codes[i]).reshape(-1, 1), weight.data.numpy())
            expected = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state).numpy()
            assert expected.dtype == np.float32 and np.abs(expected).max() > 0.01
            np.testing.assert_allclose(values[i], expected, rtol=1e-6, atol=1e-8)
