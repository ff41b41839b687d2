"""Mistral Small 3.1 to 4 and Ministral 3, with vision: `mistral`, `ministral3` or `mistral4`, and Pixtral's tower."""

from collections.abc import Mapping
from typing import Any

from jaxtune.image_layout import ImageLayout
from jaxtune.models.families import llama, ministral3, mistral, mistral4, qwen_vision, vision_wrapper
from jaxtune.models.families.entries import choose, require
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.structure.layer_spec import FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec, Vision

NAMES, IGNORABLE = vision_wrapper.names(mistral.NAMES | mistral4.NAMES), mistral.IGNORABLE
UNTOUCHED = r"^(model\.)?(vision_tower|multi_modal_projector)\."
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
BLOCK = f"{TOWER}.transformer.layers.{{layer}}"
LAYER = (
    {"attention_norm.weight": f"{BLOCK}.attention_norm.weight", "mlp_norm.weight": f"{BLOCK}.ffn_norm.weight"}
    | {f"attention.{name}.weight": f"{BLOCK}.attention.{name}_proj.weight" for name in "qkvo"}
    | {f"mlp.{name}.weight": f"{BLOCK}.feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")}
)
OUTSIDE = {
    "patches.kernel": f"{TOWER}.patch_conv.weight",
    "input_norm.weight": f"{TOWER}.ln_pre.weight",
    "projector.norm.weight": f"{PROJECTOR}.norm.weight",
    "projector.merge.weight": f"{PROJECTOR}.patch_merger.merging_layer.weight",
} | {
    f"projector.{x}.{part}": f"{PROJECTOR}.linear_{number}.{part}"
    for x, number in (("up", 1), ("down", 2))
    for part in ("weight", "bias")
}
DEFAULTS = {
    "hidden_size": 1024,
    "hidden_act": "gelu",
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "initializer_range": 0.02,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Mistral3ForConditionalGeneration` config.json."""
    decoders = {"mistral": mistral.read_spec, "ministral3": ministral3.read_spec, "mistral4": mistral4.read_spec}
    return vision_wrapper.read_spec("mistral3", config, decoders, untouched=UNTOUCHED, tied=True)


def read_vision(config: Mapping[str, Any]) -> Vision:
    """Return the tower of a config.json."""
    entries, decoder = config.get("vision_config"), read_spec(dict(config))
    own = DEFAULTS | ({"patch_size": 14} if entries is None else entries)
    require(config, projector_hidden_act="gelu", vision_feature_layer=-1)  # -1: the outputs of the last layer
    require(own, model_type="pixtral")
    rope = llama.rope_entries(own)
    # transformers 5.0 to 5.2 wrote "default", which later versions read as "axial".
    choose({"rope_type": rope.get("type", "axial")} | rope, "rope_type", "axial", "default")
    hidden, heads = own["hidden_size"], own["num_attention_heads"]
    pairs = qwen_vision.count_pairs(hidden, heads, "num_attention_heads")
    theta = rope.get("rope_theta", own.get("rope_theta", 10_000.0))
    layer = Layer(
        Heads(heads, heads, hidden // heads, Rope(theta, "axial_alternating", axes=(pairs, pairs))),
        FeedForward(own["intermediate_size"], activation=llama.activation(own)),
        in_tower=True,
    )
    return Vision(
        layout=ImageLayout(
            patch=own["patch_size"],
            merge=config.get("spatial_merge_size", 2),
            token=config.get("image_token_index", config.get("image_token_id", 10)),
            channels=own["num_channels"],
        ),
        hidden=hidden,
        layers=(layer,) * own["num_hidden_layers"],
        norm=Norm(1e-5),
        frames=None,
        patch_bias=False,
        positions=0,
        projected=decoder.hidden,
        out=decoder.hidden,
        projector_bias=config.get("multimodal_projector_bias") or False,
        projector_norm=Norm(decoder.norm.epsilon),
        input_norm=True,
        joined_projection=True,
        initializer_range=own["initializer_range"],
    )


VISION = VisionTensors(LAYER, OUTSIDE, UNTOUCHED, read_vision)
