"""Checkpoints: asynchronous and atomic, verified by checksums when restored.

The manager, which loads Orbax, is imported on first use: the manifest and the fingerprint need only Python.
"""

from typing import TYPE_CHECKING, Any

from jaxtune.checkpoint.fingerprint import fingerprint, verify_fingerprint

if TYPE_CHECKING:
    from jaxtune.checkpoint.manager import CheckpointManager, RestoredCheckpoint

__all__ = ["CheckpointManager", "RestoredCheckpoint", "fingerprint", "verify_fingerprint"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("CheckpointManager", "RestoredCheckpoint"):
        return getattr(importlib.import_module("jaxtune.checkpoint.manager"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
