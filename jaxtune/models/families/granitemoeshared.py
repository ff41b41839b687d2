"""Granite 3 with a mixture of experts and a shared expert in every layer."""

from typing import Any

from jaxtune.models.families import granitemoe
from jaxtune.models.structure.model_spec import ModelSpec

SHARED = "model.layers.{layer}.shared_mlp"
NAMES = granitemoe.NAMES | {
    "mlp.shared.gate.weight": f"{SHARED}.input_linear.weight",
    "mlp.shared.up.weight": f"{SHARED}.input_linear.weight",
    "mlp.shared.down.weight": f"{SHARED}.output_linear.weight",
}
IGNORABLE = granitemoe.IGNORABLE


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a `GraniteMoeSharedForCausalLM` config.json."""
    return granitemoe.common_spec("granitemoeshared", config, shared=config.get("shared_intermediate_size", 0))
