"""Tables of small files by system, a module for each: the least file, and options in it with what they become."""

from types import ModuleType
from typing import Any

from golden.foreign_tables import axolotl, erniekit, qefficient, surogate, trl, xorl

SYSTEMS: dict[str, ModuleType] = {
    "surogate": surogate,
    "xorl": xorl,
    "erniekit": erniekit,
    "trl": trl,
    "axolotl": axolotl,
    "qefficient": qefficient,
}
# Dataset lists that replace another way to name data, which the least file uses.
INSTEAD = {
    ("trl", "datasets"): "dataset_name",
    ("trl", "dataset_mixture.datasets"): "dataset_name",
    ("axolotl", "pretraining_dataset"): "datasets",
}
# Likewise within the entry of a list.
IN_ENTRY: dict[str, dict[str, Any]] = {
    "text_field": {"type": "text"},
    "instruction_field": {"type": "instruction"},
    "output_field": {"type": "instruction"},
    "prompt_format": {"type": "instruction"},
    "prompt_format_no_input": {"type": "instruction", "prompt_format": "{instruction}"},
    "shards": {"shards_idx": 0},
    "shards_idx": {"shards": 4},
}
