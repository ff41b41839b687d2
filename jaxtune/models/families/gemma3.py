"""Gemma 3 with vision: the text decoder as in `gemma3_text`, and a SigLIP tower for images of one size."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout
from jaxtune.models.families import gemma3_text, llama, vision_wrapper
from jaxtune.models.families.entries import choose
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec, Vision

NAMES, IGNORABLE = vision_wrapper.names(gemma3_text.NAMES), gemma3_text.IGNORABLE
UNTOUCHED = r"^(model\.)?(vision_tower|multi_modal_projector)\."
NO_LORA = r"\.mm_input_projection_weight$"  # a parameter of the projector itself, not a linear layer in torch
TOWER, PROJECTOR, PARTS = "model.vision_tower", "model.multi_modal_projector", ("weight", "bias")
# A head over the tower's outputs, which some files have, is not computed.
TENSORS = r"^(model\.)?(vision_tower\.(?!(vision_model\.)?head\.)|multi_modal_projector\.)"
BLOCK = f"{TOWER}.encoder.layers.{{layer}}"
_IN_LAYER = {
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attention.o": "self_attn.out_proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_OUTSIDE = {
    "patches.bias": "embeddings.patch_embedding.bias",
    "patches.kernel": "embeddings.patch_embedding.weight",
    "positions.weight": "embeddings.position_embedding.weight",
    "output_norm.weight": "post_layernorm.weight",
    "output_norm.bias": "post_layernorm.bias",
}
LAYER = {f"{name}.{part}": f"{BLOCK}.{hf}.{part}" for name, hf in _IN_LAYER.items() for part in PARTS}
OUTSIDE = {name: f"{TOWER}.{hf}" for name, hf in _OUTSIDE.items()} | {
    "projector.norm.weight": f"{PROJECTOR}.mm_soft_emb_norm.weight",
    "projector.down.weight": Tensor(f"{PROJECTOR}.mm_input_projection_weight", transposed=True),
}
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Gemma3ForConditionalGeneration` config.json."""
    spec = vision_wrapper.read_spec(
        "gemma3", config, {"gemma3_text": gemma3_text.read_spec}, untouched=UNTOUCHED, tied=True
    )
    # transformers caps the logits only in the text model, not in this class.
    return dataclasses.replace(spec, logit_cap=None)


def read_vision(config: Mapping[str, Any]) -> Vision:
    """Return the tower of a config.json."""
    own = DEFAULTS | (config.get("vision_config") or {})
    choose({"model_type": "siglip_vision_model"} | own, "model_type", "siglip_vision_model")
    hidden, heads, epsilon = own["hidden_size"], own["num_attention_heads"], own["layer_norm_eps"]
    if hidden % heads:
        raise UserError(
            f"config.json: vision_config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    side, merge = _divide(own["image_size"], own["patch_size"], config.get("mm_tokens_per_image", 256))
    layer = Layer(
        Heads(heads, heads, hidden // heads, rope=None, bias=frozenset("qkvo")),
        FeedForward(own["intermediate_size"], bias=True, activation=llama.activation(own), gated=False),
        in_tower=True,
    )
    return Vision(
        layout=ImageLayout(
            patch=own["patch_size"],
            merge=merge,
            token=config.get("image_token_index", config.get("image_token_id", 262_144)),
            bidirectional=True,
            channels=own["num_channels"],
            side=side,
        ),
        hidden=hidden,
        layers=(layer,) * own["num_hidden_layers"],
        norm=Norm(epsilon, centred=True, bias=True),
        frames=None,
        patch_bias=True,
        positions=side,  # as many as an image has, so that interpolation changes none
        projected=0,
        out=read_spec(dict(config)).hidden,
        projector_bias=False,
        projector_norm=Norm(epsilon, offset=True, rounded=False),
        output_norm=True,
        initializer_range=config.get("initializer_range", 0.02),
    )


def _divide(image: int, patch: int, tokens: int) -> tuple[int, int]:
    """Return the patches of the side of an image, and of the side of a block that becomes a token. Raises UserError."""
    side, blocks = image // patch, math.isqrt(tokens)
    if image % patch or blocks**2 != tokens or side % blocks:
        raise UserError(
            f"config.json: vision_config: image_size={image}, patch_size={patch}, mm_tokens_per_image={tokens}: an "
            "image must be divided into whole patches, and its patches into a square of blocks, one for each token"
        )
    return side, side // blocks


VISION = VisionTensors(LAYER, OUTSIDE, TENSORS, read_vision)
