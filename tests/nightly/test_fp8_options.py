"""FP8 training with options that no other test combines: a quantized base, two stacks, delayed scales."""

import pytest
from runs import call, metrics, recipe_command, write_conversations, write_model_folder

COVERS = ("jaxtune/precision", "jaxtune/models", "jaxtune/recipes/qwen_fp8.py")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quant.format": "nf4"}, id="on an NF4 base"),
        pytest.param(
            {
                "lora.enabled": False,
                "optim.learning_rate": 1e-3,
                "precision.skip_first_layers": 1,
                "train.freeze": r"layers\.1\.mlp",
            },
            id="most weights, two stacks",
        ),
        pytest.param({"precision.fp8.online_scale_steps": 3, "mesh.fsdp": 2}, id="online scales, two devices"),
    ],
)
def test_fp8_trains_with_other_options(tmp_path, options):
    write_model_folder(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    write_conversations(tmp_path / "chat.jsonl")
    call(*recipe_command(tmp_path, "qwen_fp8.py", "fp8", **options), devices=options.get("mesh.fsdp", 1))
    found = [row["loss"] for row in metrics(tmp_path / "runs" / "fp8") if "loss" in row]
    assert len(found) == 8 and found[-1] < found[0]
