"""One folder of models and data for the journeys of a file."""

import pytest
from runs import conversations, model_folder

# Whole blocks of every quantization format, and matrices whose 8-bit moments have some.
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny Qwen3, some conversations and a folder of text."""
    folder = tmp_path_factory.mktemp("home")
    model_folder(folder / "model", **SIZES)
    conversations(folder / "chat.jsonl")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i + 1))
    return folder
