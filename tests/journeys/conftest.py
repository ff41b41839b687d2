"""One folder of models and data for the journeys of a file, and one cache of compiled programs for all journeys."""

import jax
import pytest
from runs import write_conversations, write_model_folder

# Dimensions that are whole blocks of 16, and matrices large enough for 8-bit moments.
SIZES = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


@pytest.fixture(autouse=True, scope="session")
def share_compilation_cache(tmp_path_factory):
    """Share one compilation cache between all journeys, including those that run in separate processes."""
    folder = str(tmp_path_factory.mktemp("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
    jax.config.update("jax_compilation_cache_dir", None)


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
