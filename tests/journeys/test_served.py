"""Trained as served, with the unquantized model as the teacher: resumed, exported, evaluated, sampled, loaded."""

import json

import numpy as np
import pytest
from batches import logits_on_host, make_batch
from journey import SAVED, check_resumed_run
from runs import call, losses, recipe_command, write_conversations
from safetensors import safe_open
from tiny import write_model_folder

from jaxtune.host.run_folder import RunFolder
from jaxtune.weights.served_linears import serve_weights
from jaxtune.weights.values import open_run

SERVED = {"serve.block_size": 32, "lora.rank": 4, "distill.top_k": 16, "distill.weight": 0.5, "serve.start_step": 2}
MIXTURE = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
MIXTURE |= dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
# So that logits differ by less than bfloat16 would round them.
FLOAT32 = {"model.dtype": "float32", "precision.recipe": "fp32"}


@pytest.mark.nightly
def test_first_steps_may_be_unquantized(home):
    """They equal a run's without serve.format; resumed at serve.start_step, the others have equal bits."""
    options = {"lora.rank": 4, "lora.dropout": 0.0, **FLOAT32}
    late = {"serve.format": "int4", "serve.block_size": 32, "serve.start_step": SAVED}
    folder, _ = check_resumed_run(home, "qwen_lora.py", "late", **options, **late)
    call(*recipe_command(home, "qwen_lora.py", "unquantized", **options))
    pairs = list(zip(losses(folder), losses(home / "runs" / "unquantized"), strict=True))
    assert [found == expected for found, expected in pairs] == [step < SAVED for step in range(len(pairs))]


def test_an_export_is_the_model_that_was_trained(home, one_device):
    folder, output = check_resumed_run(home, "qwen_int4.py", "served", **SERVED, **FLOAT32)
    assert "distill.teacher: scoring" in output
    merged = folder / "merged"
    described = json.loads((merged / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "linear layers in int4, as they were trained" in (merged / "README.md").read_text()

    again = call("jaxtune.export", f"--run={folder}", f"--output={home / 'again'}", "--merge", "--quantize=int4")
    trained, written = (part.split()[0].rstrip(",") for part in again.split("validation loss ")[1].split(", ")[:2])
    assert float(trained) == float(written) > 0
    assert (home / "again" / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    plain = call("jaxtune.export", f"--run={folder}", f"--output={home / 'plain'}", "--merge")
    assert "not quantized; as the run was trained to be served: --merge --quantize=int4" in plain

    asked = "--prompt=say 3", "--chat", "--max_new_tokens=12", "--temperature=0"
    of_run, of_export = (call("jaxtune.generate", f"--model={model}", *asked) for model in (folder, merged))
    assert of_run == of_export

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, **how)
    rows = np.arange(40)[None]
    with torch.no_grad():
        expected = theirs(torch.tensor(rows)).logits.numpy()
    run = open_run(RunFolder(folder), one_device, None)
    weights = serve_weights(run.model.linears, {**run.frozen, **run.trained})
    found = logits_on_host(run.model, weights, make_batch(rows, one_device))
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.nightly
def test_a_mixture_of_int4_experts_is_resumed_and_exported_in_equal_bits(tmp_path):
    write_model_folder(tmp_path / "model", "Qwen3Moe", **MIXTURE)
    write_conversations(tmp_path / "chat.jsonl")
    options = {"serve.distill": False, "lora.target_modules": "all-linear", "serve.block_size": 32, "lora.rank": 4}
    folder, _ = check_resumed_run(tmp_path, "qwen_int4.py", "mixture", **options, **FLOAT32)
    with safe_open(folder / "merged" / "model.safetensors", "numpy") as file:
        names = list(file.keys())
    assert "model.layers.1.mlp.experts.3.down_proj.weight_packed" in names
    again = call("jaxtune.export", f"--run={folder}", f"--output={tmp_path / 'again'}", "--merge", "--quantize=int4")
    trained, written = (part.split()[0].rstrip(",") for part in again.split("validation loss ")[1].split(", ")[:2])
    assert float(trained) == float(written) > 0
