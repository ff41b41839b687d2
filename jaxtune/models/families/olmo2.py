"""OLMo 2: Llama with norms after attention and feed-forward instead of before, and on all queries and keys."""

from typing import Any

from jaxtune.models.families import gemma2, llama, qwen3
from jaxtune.models.structure.layer_spec import Norm
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Olmo2"

OUT_NORMS = {name: hf for name, hf in gemma2.NORMS.items() if "out_norm" in name}
NAMES, IGNORABLE = llama.NAMES | OUT_NORMS | qwen3.QK_NORMS, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of an `Olmo2ForCausalLM` config.json."""
    return common_spec("olmo2", config)


def common_spec(family: str, config: dict[str, Any], **fields: Any) -> ModelSpec:
    """Return a ModelSpec with the fields that families of OLMo 2 share; `fields` as in llama.common_spec."""
    return llama.common_spec(
        family,
        config,
        norm=Norm(config.get("rms_norm_eps", 1e-5), rounded=False),  # Olmo2RMSNorm rounds after the weight
        layer={"norms": "after"},
        qk_norm="whole",
        **fields,
    )
