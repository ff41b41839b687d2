"""Multi-token-prediction modules in Hugging Face's files: the names of their tensors, and the layers they have."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtune.errors import UserError
from jaxtune.models.places import Tensor
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.model_spec import ModelSpec

LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class MtpTensors:
    """The multi-token-prediction modules of a family.

    Attributes:
        entry: the entry of config.json with their number.
        names: the tensor of each parameter of a module, as in the family's NAMES; the number of a module's layer is one
            after the last layer of the model or of the module before. Without `output_norm.weight` the body's last norm
            comes before the head.
        tensors: a regex for all their tensors. A group in it matches the layer's number.
        copies: tensors of a module that are copies of the embedding and of the head, by the parameter they copy.
        most: the largest number of modules that have different names; None: any number.
        layer: returns the layer of a module, from the model's last one with attention and from config.json; None: they
            are equal.
    """

    entry: str
    names: Mapping[str, str | Tensor]
    tensors: str
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    most: int | None = None
    layer: Callable[[Layer, Mapping[str, Any]], Layer] | None = None


def as_layers(names: Mapping[str, str | Tensor]) -> MtpTensors:
    """Return the modules of a family that stores them as further layers, as DeepSeek-V3 does.

    Each has a copy of the embedding and of the head. The names are from DeepSeek-V3's README_WEIGHTS.md; vLLM reads
    them in deepseek_mtp.py and glm4_moe_mtp.py.
    """
    added = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "output_norm": "shared_head.norm",
    }
    return MtpTensors(
        entry="num_nextn_predict_layers",
        names={**names, **{f"{name}.weight": f"{LAYER}{hf}.weight" for name, hf in added.items()}},
        tensors=r"^model\.layers\.(\d+)\.",
        copies={"embed.weight": f"{LAYER}embed_tokens.weight", "head.weight": f"{LAYER}shared_head.head.weight"},
    )


def apart(
    names: Mapping[str, str | Tensor], entry: str, layer: Callable[[Layer, Mapping[str, Any]], Layer] | None = None
) -> MtpTensors:
    """Return the module of a family that stores it outside the layers, as Qwen3-Next does.

    vLLM reads these names in qwen3_next_mtp.py, qwen3_5_mtp.py and exaone_moe_mtp.py. Further layers would share a
    module's projection and norms there. `layer` as in MtpTensors.
    """

    def rename(entry: str | Tensor) -> str | Tensor:
        if isinstance(entry, Tensor):
            return dataclasses.replace(entry, name=rename(entry.name), loaded=entry.loaded and rename(entry.loaded))
        return entry.replace(LAYER, "mtp.layers.0.")

    added = {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "output_norm": "norm",
    }
    return MtpTensors(
        entry=entry,
        names={name: rename(hf) for name, hf in names.items()}
        | {f"{name}.weight": f"mtp.{hf}.weight" for name, hf in added.items()},
        tensors=r"^mtp\.",
        most=1,
        layer=layer,
    )


def add_modules(spec: ModelSpec, tensors: MtpTensors, config: Mapping[str, Any], default: int | None) -> ModelSpec:
    """Return the spec with the multi-token-prediction modules that config.json counts.

    default: their number if there is no such entry; None: the entry must be there. Raises UserError if there are none,
    more than the names can tell apart, or if their layer is not supported.
    """
    text = config.get("text_config") or config
    count = text.get(tensors.entry, default)
    if not count:
        found = f"{tensors.entry}={count!r}" if tensors.entry in text else f"no {tensors.entry}"
        raise UserError(
            f"mtp.weight: the model has no multi-token-prediction module: config.json has {found}; leave mtp.weight "
            "out, or take a model that has one"
        )
    if tensors.most is not None and count > tensors.most:
        raise UserError(
            f"config.json: {tensors.entry}={count}; mtp.weight trains at most {tensors.most} of {spec.family}"
        )
    attention = [layer for layer in spec.layers if isinstance(layer.mixer, Heads)]
    if not attention:
        raise UserError(f"mtp.weight: a module has a layer with attention, and no layer of this {spec.family} has any")
    layer = attention[-1] if tensors.layer is None else tensors.layer(attention[-1], text)
    layer = dataclasses.replace(layer, predictor=True, output_norm="output_norm.weight" in tensors.names)
    return dataclasses.replace(spec, mtp=(layer,) * count)
