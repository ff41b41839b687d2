"""StarCoder2: LayerNorm, biases everywhere, and two matrices with a GELU between them as feed-forward layer."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.layer_spec import FeedForward, Norm
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Starcoder2"

MLP = {
    f"mlp.{name}.{part}": f"model.layers.{{layer}}.mlp.{hf}.{part}"
    for name, hf in (("up", "c_fc"), ("down", "c_proj"))
    for part in ("weight", "bias")
}
NORM_BIASES = {
    name.replace("weight", "bias"): hf.replace("weight", "bias") for name, hf in llama.NAMES.items() if "norm" in name
}
NAMES, IGNORABLE = llama.NAMES | NORM_BIASES | MLP, llama.IGNORABLE
DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "initializer_range": 0.018042,
    "tie_word_embeddings": True,
    "use_bias": True,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Starcoder2ForCausalLM` config.json."""
    config = DEFAULTS | config
    feed_forward = FeedForward(config["intermediate_size"], config["use_bias"], llama.activation(config), gated=False)
    return llama.common_spec(
        "starcoder2",
        config,
        config.get("sliding_window"),
        feed_forward=feed_forward,
        norm=Norm(config["norm_epsilon"], centred=True, bias=True, rounded=False),  # torch's LayerNorm
        bias=frozenset("qkvo" if config["use_bias"] else ""),
    )
