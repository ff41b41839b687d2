"""One folder of models and data for the journeys of a file, and one cache of compiled programs for all journeys."""

import pytest
from runs import write_conversations, write_model_folder

# Dimensions that are whole blocks of 16, and matrices large enough for 8-bit moments.
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture(autouse=True, scope="session")
def share_compilation_cache(compilation_cache):
    """Share the cache of compiled programs with the processes that journeys start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", compilation_cache)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        yield


@pytest.fixture(scope="module")
def home(request, tmp_path_factory):
    """Return a folder with a tiny Qwen3 (with the file's SIZES, if any), some conversations and a folder of text."""
    folder = tmp_path_factory.mktemp("home")
    write_model_folder(folder / "model", **getattr(request.module, "SIZES", SIZES))
    write_conversations(folder / "chat.jsonl")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i + 1))
    return folder
