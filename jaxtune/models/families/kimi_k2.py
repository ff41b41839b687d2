"""Kimi K2: DeepSeek-V3 with other sizes. transformers reads it if config.json says `deepseek_v3`."""

import dataclasses
from typing import Any

from jaxtune.models.families import deepseek_v3
from jaxtune.models.structure.model_spec import ModelSpec

NAMES, IGNORABLE, MTP = deepseek_v3.NAMES, deepseek_v3.IGNORABLE, deepseek_v3.MTP


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """ModelSpec of a config.json of Kimi K2, whose class has the defaults of `DeepseekV3ForCausalLM`."""
    return dataclasses.replace(deepseek_v3.read_spec(config), family="kimi_k2")
