"""SmolLM3: Llama with some layers without rope (NoPE), by default every fourth."""

from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "SmolLM3"

NAMES, IGNORABLE = llama.NAMES, llama.IGNORABLE
DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "vocab_size": 128_256}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `SmolLM3ForCausalLM` config.json."""
    config = DEFAULTS | config
    count, period = config["num_hidden_layers"], config.get("no_rope_layer_interval", 4)
    # Despite the entry's name, 1 is a layer with rope.
    has_rope = config.get("no_rope_layers") or [(number + 1) % period != 0 for number in range(count)]
    if len(has_rope) != count:
        raise UserError(f"config.json: no_rope_layers has {len(has_rope)} entries for {count} layers")
    if not config.get("layer_types"):
        kinds = ["full_attention" if has else "sliding_attention" for has in has_rope]
        config = config | {"layer_types": kinds}
    rope = llama.read_rope(config, theta=2e6)
    return llama.common_spec(
        "smollm3",
        config,
        llama.optional_windows(config),
        [rope if has else None for has in has_rope],
        mlp_bias=config.get("mlp_bias", False),
    )
