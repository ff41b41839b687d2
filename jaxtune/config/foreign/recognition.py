"""Recognise the system that a config file was written for, by its options."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config import keys
from jaxtune.config.foreign.option_table import DIALECTS, flatten, table
from jaxtune.errors import UserError

MARKS = {
    "LLaMA-Factory": "finetuning_type cutoff_len neat_packing lora_target quantization_bit "
    "dataset_dir pref_loss pref_beta pref_ftx plot_loss overwrite_cache mask_history",
    "torchtune": "_component_",
    "NeMo": "_target_",
    "LitGPT": "class_path",
    "ms-swift": "tuner_type train_type freeze_vit freeze_llm",
    "verl": "actor_rollout_ref",
}
"""Options, anywhere in a file, that identify a system without a table here."""


def recognise(values: Mapping[str, Any], name: str) -> str | None:
    """Return the system that has most of the options; None if it is jaxtune or no known system.

    Raises:
        UserError: Several systems match equally, or the system is not supported.
    """
    ours = sum(keys.lookup(key) is not None for key, _ in keys.flatten_options(values))
    # An empty section, such as `train:`, counts as ours too.
    ours += sum(not value and keys.is_section(name) for name, value in values.items())
    known = {dialect: sum(name in table(dialect) for name in flatten(values, table(dialect))) for dialect in DIALECTS}
    matches = [dialect for dialect, count in known.items() if count == max(known.values())]
    if "base" not in values and 2 * ours < len(list(keys.flatten_options(values))):  # most of the options are not ours
        _refuse_other_systems(values, name)
    if "base" in values or known[matches[0]] <= ours:
        return None
    if len(matches) > 1:  # such as Axolotl and TRL, which share names of transformers' TrainingArguments
        first, last = matches[:-1], matches[-1]
        systems = f"{', '.join(DIALECTS[dialect] for dialect in first)} and {DIALECTS[last]}"
        raise UserError(f"{name}: {systems} have these options; choose one with --dialect={matches[0]}")
    return matches[0]


def _refuse_other_systems(values: Mapping[str, Any], name: str) -> None:
    """Raise UserError for a config of a system without a table here."""
    for system, marks in MARKS.items():
        if mark := next((option for option in _names(values) if option in marks.split()), None):
            example = (
                f"`jaxtune options {mark}` names ours"
                if keys.nearest_option(mark)
                else "`jaxtune options --all` lists them"
            )
            raise UserError(
                f"{name}: a config of {system} (it has {mark}), which is not supported; "
                f"use jaxtune's options ({example}); --dialect=NAME reads a config of {', '.join(DIALECTS.values())}"
            )


def _names(values: Any) -> Iterator[str]:
    """Yield all keys of nested mappings and lists."""
    if isinstance(values, Mapping):
        yield from values
    for value in values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ():
        yield from _names(value)
