"""LFM2: gated short convolutions, attention with norms of each head on some layers, and dense feed-forwards."""

from collections.abc import Sequence
from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.families.entries import check_kinds, require
from jaxtune.models.structure.layer_spec import Experts, FeedForward, Norm
from jaxtune.models.structure.mixers import ShortConv
from jaxtune.models.structure.model_spec import ModelSpec

LAYER = "model.layers.{layer}"
# The projections b, c and x are parts of one matrix.
CONV = {
    f"short_conv.{name}.{part}": f"{LAYER}.conv.in_proj.{part}" for part in ("weight", "bias") for name in "bcx"
} | {
    "short_conv.kernel": f"{LAYER}.conv.conv.weight",
    "short_conv.kernel_bias": f"{LAYER}.conv.conv.bias",
    "short_conv.o.weight": f"{LAYER}.conv.out_proj.weight",
    "short_conv.o.bias": f"{LAYER}.conv.out_proj.bias",
}
PARTS = (("gate", "w1"), ("down", "w2"), ("up", "w3"))
MLP = {f"mlp.{name}.weight": f"{LAYER}.feed_forward.{hf}.weight" for name, hf in PARTS}
OTHERS = {
    "norm.weight": "model.embedding_norm.weight",
    "attention_norm.weight": f"{LAYER}.operator_norm.weight",
    "mlp_norm.weight": f"{LAYER}.ffn_norm.weight",
    "attention.o.weight": f"{LAYER}.self_attn.out_proj.weight",
    **{f"attention.{x}_norm.weight": f"{LAYER}.self_attn.{x}_layernorm.weight" for x in "qk"},
}
NAMES, IGNORABLE = llama.NAMES_WITHOUT_BIAS | OTHERS | CONV | MLP, llama.IGNORABLE
MIXERS = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
}
DEFAULTS = MIXERS | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Lfm2ForCausalLM` config.json."""
    config = DEFAULTS | config
    # Entries of published files that transformers does not read.
    require(config, block_use_swiglu=True, use_pos_enc=True)
    attends = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [
        "full_attention" if attends is None or number in attends else "conv"
        for number in range(config["num_hidden_layers"])
    ]
    return common_spec("lfm2", config, kinds, FeedForward(inner_size(config)))


def common_spec(
    family: str,
    config: dict[str, Any],
    kinds: Sequence[str],
    feed_forward: FeedForward | Sequence[FeedForward | Experts],
) -> ModelSpec:
    """Return a ModelSpec whose layers are convolutions or attention; `kinds`: "conv" or "full_attention" for each."""
    require(config, hidden_act="silu", attention_bias=False)
    kinds = check_kinds(config, kinds, "conv", "full_attention")
    spec = llama.common_spec(
        family,
        config | {"tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"])},
        rope=llama.read_rope(config, theta=1e6),
        feed_forward=feed_forward,
        norm=Norm(config["norm_eps"]),
        qk_norm="head",
    )
    conv = ShortConv(config["hidden_size"], config["conv_L_cache"], bool(config["conv_bias"]))
    return llama.change_layers(spec, kinds, "conv", mixer=conv)


def inner_size(config: dict[str, Any]) -> int:
    """Return the hidden features of a feed-forward: two thirds of the config's, rounded up to a multiple."""
    size = config["block_ff_dim" if "block_ff_dim" in config else "intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return size
    # As Lfm2MLP, which rounds both factors down.
    size, multiple = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)), config["block_multiple_of"]
    return -(-size // multiple) * multiple
