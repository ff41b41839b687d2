"""Qwen2.5-VL: Qwen2 with rotary positions in three axes, and a vision tower whose attention is in windows."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.image_layout import ImageLayout
from jaxtune.models.families import llama, qwen2, qwen3_vl, qwen_vision, vision_wrapper
from jaxtune.models.families.entries import Entries
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec, Vision

# The files keep the names from before transformers 4.52; only peft sees the new ones.
_INSIDE = vision_wrapper.names(qwen2.NAMES)
NAMES = {name: Tensor(hf, loaded=str(_INSIDE[name])) for name, hf in qwen2.NAMES.items()}
IGNORABLE, UNTOUCHED = qwen2.IGNORABLE, r"^visual\."
BLOCK, PARTS = "visual.blocks.{layer}", ("weight", "bias")
LAYER = (
    {"attention_norm.weight": f"{BLOCK}.norm1.weight", "mlp_norm.weight": f"{BLOCK}.norm2.weight"}
    | {f"attention.{name}.{part}": f"{BLOCK}.attn.qkv.{part}" for part in PARTS for name in "qkv"}
    | {f"attention.o.{part}": f"{BLOCK}.attn.proj.{part}" for part in PARTS}
    | {f"mlp.{x}.{part}": f"{BLOCK}.mlp.{x}_proj.{part}" for part in PARTS for x in ("gate", "up", "down")}
)
OUTSIDE = {"patches.kernel": "visual.patch_embed.proj.weight", "projector.norm.weight": "visual.merger.ln_q.weight"} | {
    f"projector.{x}.{part}": f"visual.merger.mlp.{number}.{part}"
    for x, number in (("up", 0), ("down", 2))
    for part in PARTS
}
DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "initializer_range": 0.02,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of a `Qwen2_5_VLForConditionalGeneration` config.json."""
    # Published files have the decoder's entries next to the whole model's.
    text = config.get("text_config") or config
    tied = config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    spec = read_text(text | {"tie_word_embeddings": tied})
    return dataclasses.replace(spec, untouched=UNTOUCHED)


def read_text(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Qwen2_5_VLTextModel` config.json."""
    config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768} | config
    rope = {**llama.rope_entries(config)}
    kind = rope.get("rope_type", rope.get("type"))
    # "mrope" is the default kind, with positions in three axes.
    turning = config | {"rope_parameters": rope | {"rope_type": "default" if kind in (None, "mrope") else kind}}
    return llama.common_spec(
        "qwen2_5_vl",
        config,
        llama.optional_windows({"max_window_layers": 80} | config),
        qwen3_vl.three_axes(turning, 1e6, [16, 24, 24], interleaved=False),
        bias=frozenset("qkv"),
    )


def read_vision(config: Mapping[str, Any]) -> Vision:
    """Return the tower of a config.json."""
    own = DEFAULTS | (config.get("vision_config") or Entries({}))
    hidden, heads, merge = own["hidden_size"], own["num_heads"], own["spatial_merge_size"]
    pairs, block = qwen_vision.count_pairs(hidden, heads), own["patch_size"] * merge
    if own["window_size"] % block:
        raise UserError(
            f"config.json: vision_config: window_size={own['window_size']} is not a multiple of patch_size * "
            f"spatial_merge_size = {block}"
        )
    window = own["window_size"] // block

    def layer(number: int) -> Layer:
        rope, whole = Rope(10_000.0, "axial", axes=(pairs, pairs)), number in own["fullatt_block_indexes"]
        return Layer(
            Heads(heads, heads, hidden // heads, rope, None if whole else window, bias=frozenset("qkvo")),
            FeedForward(own["intermediate_size"], bias=True, activation=llama.activation(own)),
            in_tower=True,
        )

    return Vision(
        layout=ImageLayout(
            patch=own["patch_size"],
            merge=merge,
            token=config.get("image_token_id", 151_655),
            window=window,
            rope_axes=True,
            channels=own["in_channels"],
        ),
        hidden=hidden,
        layers=tuple(map(layer, range(own["depth"]))),
        norm=Norm(1e-6),
        frames=own["temporal_patch_size"],
        patch_bias=False,
        positions=0,
        projected=hidden * merge**2,
        out=own["out_hidden_size"],
        initializer_range=own["initializer_range"],
    )


def _as_loaded(names: dict[str, str]) -> dict[str, Tensor]:
    return {name: Tensor(hf, loaded=f"model.{hf}") for name, hf in names.items()}


VISION = VisionTensors(_as_loaded(LAYER), _as_loaded(OUTSIDE), UNTOUCHED, read_vision)
