"""One folder of models and data for the journeys of a file."""

import pytest
from runs import conversations, model_folder

# Whole blocks of 16, and matrices whose 8-bit moments have some.
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def home(request, tmp_path_factory):
    """A folder with a tiny Qwen3 (of the file's SIZES, if it has some), some conversations and a folder of text."""
    folder = tmp_path_factory.mktemp("home")
    model_folder(folder / "model", **getattr(request.module, "SIZES", SIZES))
    conversations(folder / "chat.jsonl")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i + 1))
    return folder
