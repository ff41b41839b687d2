"""The config.json of common models, so that a plan needs neither network nor files."""

from typing import Any

_LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
_SMOL = {"max_position_embeddings": 8192}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960, "head_dim": 128},
    "llama": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131_072},
    "mistral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32_768, "sliding_window": None},
    "phi3": {"rms_norm_eps": 1e-5, "rope_theta": 250_000, "max_position_embeddings": 16_384},
}
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "tie_word_embeddings")  # fmt: skip
_MODELS: dict[str, tuple[str, tuple[int, int, int, int, int, int, bool], dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M": ("llama", (576, 30, 1536, 9, 3, 49_152, True), _SMOL | {"rope_theta": 1e5}),
    "HuggingFaceTB/SmolLM2-360M": ("llama", (960, 32, 2560, 15, 5, 49_152, True), _SMOL | {"rope_theta": 1e5}),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", (2048, 24, 8192, 32, 32, 49_152, True), _SMOL | {"rope_theta": 1.3e5}),
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 28, 3072, 16, 8, 151_936, True), {}),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 28, 6144, 16, 8, 151_936, True), {}),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 36, 9728, 32, 8, 151_936, True), {}),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 36, 12_288, 32, 8, 151_936, False), {}),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 40, 17_408, 40, 8, 151_936, False), {}),
    "Qwen/Qwen3-32B": ("qwen3", (5120, 64, 25_600, 64, 8, 151_936, False), {}),
    "Qwen/Qwen2.5-0.5B": ("qwen2", (896, 24, 4864, 14, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", (1536, 28, 8960, 12, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-3B": ("qwen2", (2048, 36, 11_008, 16, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-7B": ("qwen2", (3584, 28, 18_944, 28, 4, 152_064, False), {}),
    "Qwen/Qwen2.5-14B": ("qwen2", (5120, 48, 13_824, 40, 8, 152_064, False), {}),
    "Qwen/Qwen2.5-32B": ("qwen2", (5120, 64, 27_648, 40, 8, 152_064, False), {}),
    "Qwen/Qwen2.5-72B": ("qwen2", (8192, 80, 29_568, 64, 8, 152_064, False), {}),
    "meta-llama/Llama-3.2-1B": (
        "llama", (2048, 16, 8192, 32, 8, 128_256, True), {"head_dim": 64, "rope_scaling": _LLAMA_3 | {"factor": 32.0}}
    ),
    "meta-llama/Llama-3.2-3B": (
        "llama", (3072, 28, 8192, 24, 8, 128_256, True), {"head_dim": 128, "rope_scaling": _LLAMA_3 | {"factor": 32.0}}
    ),
    "meta-llama/Llama-3.1-8B": (
        "llama", (4096, 32, 14_336, 32, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "meta-llama/Llama-3.1-70B": (
        "llama", (8192, 80, 28_672, 64, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "meta-llama/Llama-3.3-70B": (
        "llama", (8192, 80, 28_672, 64, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "mistralai/Mistral-7B-v0.3": ("mistral", (4096, 32, 14_336, 32, 8, 32_768, False), {}),
    "microsoft/phi-4": ("phi3", (5120, 40, 17_920, 40, 10, 100_352, False), {}),
}  # fmt: skip


def config_of(model: str) -> dict[str, Any] | None:
    """The config.json of a model by its hub id, also with -Base or -Instruct; None if the model is not listed here."""
    for name in (model, model.removesuffix("-Instruct"), model.removesuffix("-Base")):
        if name in _MODELS:
            kind, sizes, more = _MODELS[name]
            return {"model_type": kind, **_KINDS[kind], **dict(zip(_SIZES, sizes)), **more}
    return None
