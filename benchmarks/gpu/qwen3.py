"""Configs (config.json) of Qwen3 and Qwen2.5 models, and their numbers of parameters."""

import math
from typing import Any

RANK, ALPHA = 16, 32.0


def _config(hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int = 8, **fields: Any) -> dict:
    return {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": hidden < 4096,
        **fields,
    }


CONFIGS = {
    "0.6B": _config(1024, 28, 3072, 16),
    "1.7B": _config(2048, 28, 6144, 16),
    "4B": _config(2560, 36, 9728, 32),
    "8B": _config(4096, 36, 12_288, 32),
    "Qwen2.5-0.5B": _config(896, 24, 4864, 14, 2, head_dim=64, model_type="qwen2"),
    "Qwen2.5-1.5B": _config(1536, 28, 8960, 12, 2, model_type="qwen2"),
    "Qwen2.5-7B": _config(3584, 28, 18_944, 28, 4, vocab_size=152_064, tie_word_embeddings=False, model_type="qwen2"),
    "small": _config(256, 4, 512, 4, 2, head_dim=64, vocab_size=512),
    "tiny": _config(128, 2, 256, 4, 2, head_dim=64, vocab_size=256),
}


def linears(config: dict) -> list[tuple[int, int]]:
    """Return (in, out) of the linear modules of a layer; each has an adapter."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", "key_value"))
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    return attention + [(hidden, intermediate)] * 2 + [(intermediate, hidden)]


def matrix_parameters(config: dict) -> int:
    """Return the number of parameters in matrix products; a head tied to the embedding counts once."""
    in_layers = config["num_hidden_layers"] * sum(math.prod(shape) for shape in linears(config))
    return in_layers + config["vocab_size"] * config["hidden_size"]


def adapter_parameters(config: dict) -> int:
    """Return the number of parameters of the adapters."""
    return config["num_hidden_layers"] * RANK * sum(sum(shape) for shape in linears(config))
