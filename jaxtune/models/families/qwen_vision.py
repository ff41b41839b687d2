"""The vision tower of Qwen3-VL and Qwen3.5: learned and rotary positions, merged blocks, DeepStack."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout
from jaxtune.models.families import llama
from jaxtune.models.families.entries import choose
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.structure.layer_spec import FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import Vision

BLOCK = "model.visual.blocks.{layer}"
PARTS = ("weight", "bias")
# Queries, keys and values are parts of one tensor.
LAYER = (
    {f"attention_norm.{part}": f"{BLOCK}.norm1.{part}" for part in PARTS}
    | {f"mlp_norm.{part}": f"{BLOCK}.norm2.{part}" for part in PARTS}
    | {f"attention.{name}.{part}": f"{BLOCK}.attn.qkv.{part}" for part in PARTS for name in "qkv"}
    | {f"attention.o.{part}": f"{BLOCK}.attn.proj.{part}" for part in PARTS}
    | {f"mlp.up.{part}": f"{BLOCK}.mlp.linear_fc1.{part}" for part in PARTS}
    | {f"mlp.down.{part}": f"{BLOCK}.mlp.linear_fc2.{part}" for part in PARTS}
)
MERGER = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
OUTSIDE = (
    {"patches.kernel": "model.visual.patch_embed.proj.weight", "patches.bias": "model.visual.patch_embed.proj.bias"}
    | {"positions.weight": "model.visual.pos_embed.weight"}
    | {f"projector.{x}.{part}": f"model.visual.merger.{hf}.{part}" for x, hf in MERGER.items() for part in PARTS}
)
DEEPSTACK = {
    f"{x}.{part}": f"model.visual.deepstack_merger_list.{{number}}.{hf}.{part}"
    for x, hf in MERGER.items()
    for part in PARTS
}
DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "initializer_range": 0.02,
}
TENSORS = r"^model\.visual\."


def count_pairs(hidden: int, heads: int, entry: str = "num_heads") -> int:
    """Return the pairs of a head's features that turn with the row, and as many with the column. Raises UserError."""
    if hidden % (4 * heads):
        raise UserError(
            f"config.json: vision_config: hidden_size={hidden} is not {entry}={heads} times a multiple of 4, as "
            "rotary positions of rows and columns need"
        )
    return hidden // heads // 4


def read_layer(own: dict[str, Any]) -> Layer:
    """Return a layer of the tower; own: the vision_config, with its defaults."""
    rope, hidden, heads = own.get("rope_parameters") or {}, own["hidden_size"], own["num_heads"]
    choose({"rope_type": "axial"} | rope, "rope_type", "axial")
    pairs = count_pairs(hidden, heads)
    return Layer(
        Heads(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            rope=Rope(rope.get("rope_theta", 10_000.0), "axial", axes=(pairs, pairs)),
            bias=frozenset("qkvo"),
        ),
        FeedForward(own["intermediate_size"], bias=True, activation=llama.activation(own), gated=False),
        in_tower=True,
    )


def read_layout(config: Mapping[str, Any], own: Mapping[str, Any], image_token: int) -> ImageLayout:
    """Return the layout of images; own: the vision_config, with its defaults. image_token: the default."""
    return ImageLayout(
        patch=own["patch_size"],
        merge=own["spatial_merge_size"],
        token=config.get("image_token_id", image_token),
        rope_axes=True,
        channels=own["in_channels"],
    )


def read_vision(config: Mapping[str, Any], image_token: int, **defaults: Any) -> Vision:
    """Return the tower of a config.json; defaults: other ones than DEFAULTS."""
    own = DEFAULTS | defaults | (config.get("vision_config") or {})
    side, taken = math.isqrt(own["num_position_embeddings"]), own["deepstack_visual_indexes"]
    if side**2 != own["num_position_embeddings"]:
        raise UserError(
            f"config.json: vision_config: num_position_embeddings={own['num_position_embeddings']} is not the square "
            "of a whole number"
        )
    if len(set(taken)) < len(taken) or not all(0 <= number < own["depth"] for number in taken):
        raise UserError(
            f"config.json: vision_config: deepstack_visual_indexes={taken} must be different layers from 0 to "
            f"{own['depth'] - 1}"
        )
    return Vision(
        layout=read_layout(config, own, image_token),
        hidden=own["hidden_size"],
        layers=(read_layer(own),) * own["depth"],
        norm=Norm(1e-6, centred=True, bias=True),
        frames=own["temporal_patch_size"],
        patch_bias=True,
        positions=side,
        projected=own["hidden_size"] * own["spatial_merge_size"] ** 2,
        out=own["out_hidden_size"],
        deepstack=tuple(sorted(taken)),
        initializer_range=own["initializer_range"],
    )


def tensors(image_token: int, **defaults: Any) -> VisionTensors:
    """Return the tower of a family with another image token, or other defaults than DEFAULTS."""
    read = partial(read_vision, image_token=image_token, **defaults)
    return VisionTensors(LAYER, OUTSIDE, TENSORS, read, DEEPSTACK)
