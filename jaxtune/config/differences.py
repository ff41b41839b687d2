"""Options that differ between the config of a run and the one that continues it."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxtune.config import keys
from jaxtune.config.schema import Dataset
from jaxtune.objectives.options import is_server

# Options that may differ when a run continues: they change where and how, never what is computed.
MAY_CHANGE = (
    "attention", "ckpt", "device", "eval", "export", "log", "memory", "mesh", "parallel", "prof", "data.cache_dir",
    "data.cache_only", "data.num_proc", "data.num_workers", "data.on_bad_row", "data.prefetch",
    "guard.deviations", "guard.norm_factor", "guard.max_loss", "guard.max_loss_steps",
    "rollout.call_seconds", "rollout.completions_at_once", "rollout.server_seconds",
    "train.output_dir", "train.run_name", "train.hang_seconds", "train.max_bad_steps", "train.max_steps",
    "train.epochs", "train.micro_batch_size", "train.grad_accum_steps",
)  # fmt: skip
# Options whose servers may be elsewhere when a run continues: a scheduler may give them other hosts.
_SERVERS = ("rollout.server", "distill.teacher")


_NO_ENTRY = asdict(Dataset())  # in place of a missing entry, if one list of datasets is shorter


def differences(before: Any, after: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, after) of each option below `key` that differs and may not: see MAY_CHANGE."""
    if key in MAY_CHANGE or before == after:
        return
    if key in _SERVERS and before and after and is_server(before) and is_server(after):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif keys.has_entries(key):
        for i in range(max(len(before), len(after))):
            first, second = (entries[i] if i < len(entries) else {} for entries in (before, after))
            yield from differences({**_NO_ENTRY, **first}, {**_NO_ENTRY, **second}, f"{key}[{i}]")
    else:
        yield key, before, after
