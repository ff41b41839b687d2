"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, gate and up in another, and one window."""

from typing import Any

from jaxtune.models.families import llama
from jaxtune.models.structure.model_spec import ModelSpec

CLASSIFIER = "Phi3"

QKV, GATE_UP = (f"model.layers.{{layer}}.{name}_proj.weight" for name in ("self_attn.qkv", "mlp.gate_up"))
# The rows of a fused tensor are its parts in this order.
FUSED = {**{f"attention.{name}.weight": QKV for name in "qkv"}, "mlp.gate.weight": GATE_UP, "mlp.up.weight": GATE_UP}
NAMES, IGNORABLE = llama.NAMES_WITHOUT_BIAS | FUSED, llama.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `Phi3ForCausalLM` config.json."""
    rope = llama.read_rope(config, fraction=llama.partial_rotary(config))
    return llama.common_spec("phi3", config, config.get("sliding_window"), rope)
