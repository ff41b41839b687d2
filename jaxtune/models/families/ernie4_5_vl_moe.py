"""ERNIE 4.5 VL: `ernie4_5_moe` with rotary positions in three axes, a vision tower, and experts of images.

In each layer with experts, image tokens and the tokens before and after an image go to a mixture of their own. The
numbers of its experts in the files follow the last expert of texts. Without the tower this mixture is not read either.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.families import ernie4_5, ernie4_5_moe, glm4_moe, llama, qwen3_moe, qwen_vision, vision_wrapper
from jaxtune.models.families.entries import check_kinds, choose, require
from jaxtune.models.families.vision_tensors import VisionTensors
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Norm
from jaxtune.models.structure.mixers import Rope
from jaxtune.models.structure.model_spec import ModelSpec, Vision

# The files keep the names of `ernie4_5_moe`; a loaded model has others.
_DECODER = llama.NAMES_WITHOUT_BIAS | glm4_moe.SHARED
_LOADED = vision_wrapper.names(_DECODER)
_OF_IMAGES = {
    name.replace(".experts.", ".vision_experts."): hf.replace("{expert}", "{later_expert}")
    for name, hf in qwen3_moe.EXPERTS.items()
}
NAMES = (
    {name: Tensor(hf, loaded=str(_LOADED[name])) for name, hf in _DECODER.items()}
    | qwen3_moe.EXPERTS
    | _OF_IMAGES
    | {"mlp.router.weight": Tensor(f"{qwen3_moe.MLP}.gate.weight", transposed=True)}
    | {"mlp.vision_router.weight": Tensor(f"{qwen3_moe.MLP}.gate.weight_1", transposed=True)}
    | {f"mlp.{router}.correction": ernie4_5_moe.CORRECTION for router in ("router", "vision_router")}
)
IGNORABLE = llama.IGNORABLE
NO_LORA = r"\.mlp\.experts\."  # peft 0.21 does not convert this family's experts to the parameters of its class
UNTOUCHED, BLOCK = r"^(model\.)?(vision_model|resampler_model)\.", "blocks.{layer}"
_PARTS = ("weight", "bias")
# Parameter -> name in the files and in a loaded model, both without the module of the tower or resampler, and the part.
_LAYER = {
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
    **{f"attention.{name}": "attn.qkv" for name in "qkv"},
    "attention.o": "attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
_JOINED = {"up": ("0", "fc1"), "down": ("2", "fc2"), "norm": ("3", "ln")}


def _in_tower(name: str) -> Tensor:
    return Tensor(f"model.vision_model.{name}", loaded=f"model.vision_tower.{name}")


LAYER = {f"{name}.{part}": _in_tower(f"{BLOCK}.{hf}.{part}") for name, hf in _LAYER.items() for part in _PARTS}
OUTSIDE = (
    {"patches.kernel": _in_tower("patch_embed.proj.weight")}
    | {f"output_norm.{part}": _in_tower(f"ln.{part}") for part in _PARTS}
    | {
        f"projector.{joined}.{name}.{part}": Tensor(
            f"model.resampler_model.{hf}.{number}.{part}", loaded=f"model.resampler_model.{hf}.{loaded}.{part}"
        )
        for joined, hf in (("space", "spatial_linear"), ("time", "temporal_linear"))
        for name, (number, loaded) in _JOINED.items()
        for part in _PARTS
    }
    | {f"projector.out.{part}": f"model.resampler_model.mlp.{part}" for part in _PARTS}
    | {"projector.norm.weight": "model.resampler_model.after_norm.weight"}
)
DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}
EXPERT_SIZES = [1536, 512]  # the default of moe_intermediate_size: experts of texts and of images
TOWER_DEFAULTS = {
    "depth": 32,
    "hidden_size": 1280,
    "hidden_act": "quick_gelu",
    "intermediate_size": 5120,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of the decoder of an `Ernie4_5_VLMoeForConditionalGeneration` config.json."""
    decoders = {"ernie4_5_vl_moe_text": read_text}
    spec = vision_wrapper.read_spec("ernie4_5_vl_moe", config, decoders, untouched=UNTOUCHED, tied=True)
    counts = {experts.count for experts in spec.mixtures.values()}
    numbers = "|".join(str(count + number) for count in counts for number in range(count))
    of_images = rf"\.mlp\.(gate\.weight_1$|experts\.({numbers})\.)" if counts else r"\Z\A."
    return dataclasses.replace(spec, untouched=f"{UNTOUCHED}|{of_images}")


def read_text(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Ernie4_5_VLMoeTextModel` config.json."""
    config = DEFAULTS | config
    require(config, use_bias=False)
    count, size = config["num_hidden_layers"], _expert_sizes(config)[0]
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    experts = ernie4_5_moe.experts(config, size)
    return llama.common_spec(
        "ernie4_5_vl_moe",
        config,
        rope=_rope(config),
        feed_forward=[
            experts if kind == "sparse" else llama.dense(config)
            for kind in check_kinds(config, kinds, "dense", "sparse", entry="mlp_layer_types")
        ],
        model=qwen3_moe.router_loss(config, 0.001),
    )


def _expert_sizes(config: Mapping[str, Any]) -> list[int]:
    """Return the hidden features of an expert of texts and of one of images."""
    sizes = {**config}.get("moe_intermediate_size") or EXPERT_SIZES  # unchecked: in other families it is one number
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise UserError(
            f"config.json: moe_intermediate_size is {sizes!r}; in this family it must be two whole numbers from 1, for "
            "experts of texts and of images"
        )
    return sizes


def _rope(config: dict[str, Any]) -> Rope:
    """Return the rope; mrope_section counts the pairs of height, width and time."""
    entries = llama.rope_entries(config)
    choose({"rope_type": entries.get("type", "default")} | entries, "rope_type", "default")
    sections = entries.get("mrope_section") or [22, 22, 20]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if len(sections) != 3 or sections[0] != sections[1] or 2 * sum(sections) != width:
        raise UserError(
            f"config.json: mrope_section={sections}: it must be three numbers, of height, width and time, with a sum "
            f"of {width // 2}, half of the {width} features of a head; the first two must be equal"
        )
    height, across, time = sections
    return dataclasses.replace(ernie4_5.rope(config), axes=(time, height, across), time_last=True)


def read_vision(config: Mapping[str, Any]) -> Vision:
    """Return the tower of a config.json, and the mixture of image tokens."""
    own, decoder = TOWER_DEFAULTS | (config.get("vision_config") or {}), read_spec(dict(config))
    require(own, temporal_merge_size=2)
    layout = qwen_vision.read_layout(config, own, 100_295)
    text = next(iter(decoder.mixtures.values()), None)
    size = _expert_sizes(config["text_config"])[1]
    around = (config.get("image_start_token_id", 101_304), config.get("image_end_token_id", 101_305))
    return Vision(
        layout=layout,
        hidden=own["hidden_size"],
        layers=(qwen_vision.read_layer(own),) * own["depth"],
        norm=Norm(own["rms_norm_eps"], centred=True, bias=True),
        frames=None,
        patch_bias=False,
        positions=0,
        projected=own["hidden_size"] * layout.merge**2,
        out=decoder.hidden,
        projector_norm=Norm(decoder.norm.epsilon),
        output_norm=True,
        flat_kernel=True,
        resampled=True,
        experts=text and dataclasses.replace(text, size=size, shared=0),
        visual_tokens=(layout.token, *around) if text else (),
        initializer_range=own["initializer_range"],
    )


# With the tower, the tensors of all experts are parameters.
VISION = VisionTensors(LAYER, OUTSIDE, rf"{UNTOUCHED}|\.mlp\.(gate\.weight_1$|experts\.)", read_vision)
