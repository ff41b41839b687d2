"""Gemma 2: norms before and after, windows in turn, GELU, soft caps of logits, embeddings scaled by sqrt(hidden)."""

from collections.abc import Sequence
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import llama
from jaxtune.models.structure.layer_spec import FeedForward, Norm
from jaxtune.models.structure.mixers import Rope
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Gemma2"

NORMS = {
    "mlp_norm.weight": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "attention_out_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp_out_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
NAMES, IGNORABLE = llama.NAMES | NORMS, llama.IGNORABLE
DEFAULTS = {
    "vocab_size": 256_000,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Gemma2ForCausalLM` config.json."""
    return common_spec("gemma2", llama.every_nth_is_full(DEFAULTS | config, 2))


def common_spec(family: str, config: dict[str, Any], rope: Sequence[Rope] | None = None, **heads: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that Gemma families share; `rope` and `heads` as in llama.common_spec."""
    if config.get("use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention=true is not supported: attention here is causal")
    feed_forward = FeedForward(config["intermediate_size"], activation=llama.activation(config, "hidden_activation"))
    return llama.common_spec(
        family,
        config,
        llama.windows(config),
        rope,
        feed_forward,
        norm=Norm(config["rms_norm_eps"], offset=True, rounded=False),  # Gemma2RMSNorm: x * (1 + weight)
        layer={"norms": "both"},
        model={
            "embedding_scale": config["hidden_size"] ** 0.5,
            "logit_cap": config.get("final_logit_softcapping"),
        },
        scale=config["query_pre_attn_scalar"] ** -0.5,
        soft_cap=config.get("attn_logit_softcapping"),
        **heads,
    )
