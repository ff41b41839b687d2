"""Gemma 4 with vision and audio: the text decoder as in `gemma4_text`, and a tower for images of any size; no audio.

An image token is the average of the tower's outputs of 3 x 3 patches. E2B and E4B clip the tower's linear layers.
"""

from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout
from jaxtune.models.families import gemma4_text, llama, vision_wrapper
from jaxtune.models.families.entries import choose, require
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import BOUNDS, FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec, Vision

NAMES, IGNORABLE = vision_wrapper.names(gemma4_text.NAMES), gemma4_text.IGNORABLE
UNTOUCHED = r"^model\.(vision_tower|audio_tower|embed_vision|embed_audio)\."
TOWER, TENSORS = "model.vision_tower", r"^model\.(vision_tower|embed_vision)\."
BLOCK = f"{TOWER}.encoder.layers.{{layer}}"
_LINEARS = {f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"} | {
    f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
LAYER: dict[str, str | Tensor] = {
    **{f"{name}.weight": f"{BLOCK}.{hf}.linear.weight" for name, hf in _LINEARS.items()},
    **{
        f"{name}.{bound}": Tensor(f"{BLOCK}.{hf}.{bound}", scalar=True)
        for name, hf in _LINEARS.items()
        for bound in BOUNDS
    },
    **{f"{name}.weight": f"{BLOCK}.{hf}.weight" for name, hf in _NORMS.items()},
}
OUTSIDE = {
    "patches.linear.weight": f"{TOWER}.patch_embedder.input_proj.weight",
    "positions.weight": f"{TOWER}.patch_embedder.position_embedding_table",
    "projector.shift": f"{TOWER}.std_bias",
    "projector.scale": f"{TOWER}.std_scale",
    "projector.down.weight": "model.embed_vision.embedding_projection.weight",
}
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
    "initializer_range": 0.02,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Gemma4ForConditionalGeneration` config.json."""
    return vision_wrapper.read_spec(
        "gemma4", config, {"gemma4_text": gemma4_text.read_spec}, untouched=UNTOUCHED, tied=True
    )


def read_vision(config: Mapping[str, Any]) -> Vision:
    """Return the tower of a config.json."""
    entries, text = config.get("vision_config"), config["text_config"]
    if entries is None:
        raise UserError("config.json: vision_config is null: this model has no vision tower")
    own = DEFAULTS | entries
    require(own, model_type="gemma4_vision")
    rope, width = own.get("rope_parameters") or {}, own["head_dim"]
    # Published files have "default", which transformers reads as "axial".
    choose({"rope_type": "axial"} | rope, "rope_type", "axial", "default")
    if width % 4:
        raise UserError(
            f"config.json: vision_config: head_dim={width} is not a multiple of 4, as rotary positions of rows and "
            "columns need"
        )
    norm = Norm(own["rms_norm_eps"], rounded=False)
    heads = Heads(
        heads=own["num_attention_heads"],
        kv_heads=own["num_key_value_heads"],
        head_dim=width,
        rope=Rope(rope.get("rope_theta", 100.0), "axial_apart", axes=(width // 4, width // 4)),
        qk_norm="head",
        v_norm=True,
        scale=1.0,
    )
    layer = Layer(
        heads,
        FeedForward(own["intermediate_size"], activation=llama.activation(own, "hidden_activation")),
        norms="both",
        in_tower=True,
        clipped=own.get("use_clipped_linears", False),
    )
    return Vision(
        layout=ImageLayout(
            patch=own["patch_size"],
            merge=own["pooling_kernel_size"],
            token=config.get("image_token_id", 258_880),
            bidirectional=text.get("use_bidirectional_attention") == "vision",
            longest=own["position_embedding_size"],
        ),
        hidden=own["hidden_size"],
        layers=(layer,) * own["num_hidden_layers"],
        norm=norm,
        frames=None,
        patch_bias=False,
        patch_matrix=True,
        positions=own["position_embedding_size"],
        position_axes=True,
        projected=0,
        out=read_spec(dict(config)).hidden,
        projector_bias=False,
        projector_norm=Norm(own["rms_norm_eps"], weighted=False),
        average_factor=own["hidden_size"] ** 0.5,
        standardized=own.get("standardize", False),
        layer_embedding_token=text.get("pad_token_id") or 0,
        initializer_range=own["initializer_range"],
    )


VISION = VisionTensors(LAYER, OUTSIDE, TENSORS, read_vision)
