"""LoRA and QLoRA on the experts and the attention of a mixture: resumed, exported, merged, loaded elsewhere."""

from pathlib import Path

import numpy as np
import pytest
from batches import logits_on_host, make_batch
from journey import check_killed_run, check_resumed_run, load_in_transformers
from nightly_rows import nightly, nightly_except
from runs import call, write_conversations
from tiny import read_model, write_model_folder

from jaxtune.config import load_recipe, resolve
from jaxtune.exports.write import export_full
from jaxtune.quant.options import QuantOptions

SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts_per_tok=2)
# Families whose files have a module for each expert, and families with all experts in one tensor.
MIXTURES = {
    "Qwen3Moe": dict(moe_intermediate_size=64, num_experts=4, norm_topk_prob=True),
    "GptOss": dict(intermediate_size=64, num_local_experts=4, sliding_window=16, layer_types=["full_attention"] * 2),
}
QUANTIZED = {"Qwen3Moe": "qwen_qlora_nf4", "GptOss": "gpt_oss_20b_lora"}
KILLED = (("Qwen3Moe", "qwen_lora"), ("GptOss", "gpt_oss_20b_lora"))  # the others only lose their newest checkpoint
OPTIONS = {"lora.rank": 4, "lora.target_modules": "all-linear", "model.dtype": "float32", "precision.recipe": "fp32"}
TOKENS = np.arange(40)[None]  # the tokens of `load_in_transformers`


@pytest.fixture(scope="module", params=nightly_except(["Qwen3Moe"], MIXTURES))
def home(request, tmp_path_factory):
    """Return a folder, by the mixture's name, with a tiny mixture and some conversations."""
    folder = tmp_path_factory.mktemp("home") / request.param
    folder.mkdir()
    write_model_folder(folder / "model", request.param, **SIZES, **MIXTURES[request.param])
    write_conversations(folder / "chat.jsonl")
    return folder


@pytest.mark.parametrize("quantized", [nightly(False), True], ids=["lora", "qlora"])
def test_resumes_exactly_exports_and_loads(home, one_device, quantized):
    recipe = QUANTIZED[home.name] if quantized else "qwen_lora"
    if (home.name, recipe) in KILLED:
        folder = check_killed_run(home, f"{recipe}.py", **OPTIONS)
    else:
        folder, _ = check_resumed_run(home, f"{recipe}.py", recipe, **OPTIONS)
    base, merged = home / "model", home / f"{recipe}-merged"
    output = call("jaxtune.export", f"--run={folder}", f"--output={merged}", "--merge")
    if quantized:
        largest, difference = (
            float(output.split(part)[1].split()[0].rstrip(",")) for part in ("logits, at most ", "differ by ")
        )
        assert difference <= 1e-5 * largest
        base = dequantize_base(home, one_device, resolve(load_recipe(recipe), recipe).quant)
    model, parameters, _ = read_model(merged, one_device)
    ours = logits_on_host(model, parameters, make_batch(TOKENS, one_device))

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    theirs = load_in_transformers(merged, base, folder / "export", within=1e-5)
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor(TOKENS)).logits.numpy() - ours).max() <= 1e-5 * np.abs(ours).max()


def dequantize_base(home: Path, mesh, quant: QuantOptions) -> Path:
    """Write the base of a quantized run, dequantized, for transformers; return its folder."""
    model, parameters, config = read_model(home / "model", mesh, quant=quant)
    export_full(model, parameters, config, home / "dequantized")
    return home / "dequantized"
