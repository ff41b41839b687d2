"""LoRA and QLoRA on the experts and the attention of a mixture: resumed, exported, merged, loaded elsewhere."""

import numpy as np
import pytest
from batches import logits, make_batch
from journey import loads_in_transformers, row
from runs import call, conversations
from tiny import model_folder, read

SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MIXTURES = {
    "Qwen3Moe": dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
}
OPTIONS = {"lora.rank": 4, "model.dtype": "float32", "precision.recipe": "fp32"}
TOKENS = np.arange(40)[None]  # those of loads_in_transformers


@pytest.fixture(scope="module", params=MIXTURES)
def home(request, tmp_path_factory):
    """A folder with a tiny mixture of experts and some conversations."""
    folder = tmp_path_factory.mktemp(request.param)
    model_folder(folder / "model", request.param, **SIZES, **MIXTURES[request.param])
    conversations(folder / "chat.jsonl")
    return folder


@pytest.mark.parametrize("recipe", ["qwen_lora", "qwen_qlora_nf4"])
def test_resumes_exactly_exports_and_loads(home, one_device, recipe):
    """The adapter of a run on a quantized base is loaded onto what `--merge` says that the base is."""
    folder, _ = row(home, f"{recipe}.py", recipe, **OPTIONS)
    merged = home / f"{recipe}-merged"
    output = call("jaxtune.export", f"--run={folder}", f"--output={merged}", "--merge")
    if recipe == "qwen_qlora_nf4":
        largest, difference = (float(output.split(part)[1].split()[0].rstrip(",")) for part in ("largest is ", "by "))
        assert difference <= 1e-5 * largest
    model, parameters, _ = read(merged, one_device)
    ours = logits(model, parameters, make_batch(TOKENS, one_device))

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    quantized = recipe != "qwen_lora"
    theirs = loads_in_transformers(merged, home / "model", folder / "export", within=0.05 if quantized else 1e-5)
    with torch.no_grad():
        found = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(found - ours).max() <= 1e-5 * np.abs(ours).max()
