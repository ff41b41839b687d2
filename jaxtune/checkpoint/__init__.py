"""Checkpoints: asynchronous and atomic, verified by checksums when restored."""

from jaxtune.checkpoint.fingerprint import fingerprint, verify_fingerprint
from jaxtune.checkpoint.manager import CheckpointManager, Restored
