"""LLM training and fine-tuning in JAX for NVIDIA GPUs, from one GPU to many hosts.

From Python: `train`, which returns a `Run`, `config_of`, and the `UserError` that they raise.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from jaxtune import interrupt

if interrupt.is_command():  # before any import that takes a second
    interrupt.leave_at_once()

import pallas_kernels  # noqa: F401 (silences jax's CUDA plugin on machines without a GPU)
from jaxtune.errors import UserError

# transformers is used only for tokenizers and configs, which need no PyTorch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))

if TYPE_CHECKING:
    from jaxtune.api import Run, config_of, train
    from jaxtune.config.schema import Config

__all__ = ["Config", "Run", "UserError", "config_of", "train"]


def __getattr__(name: str) -> Any:
    """Import public names on first use, because their modules take seconds to import."""
    if name == "__version__":
        installed = importlib.import_module("importlib.metadata").distributions(name="jaxtune")
        return next((package.version for package in installed), "unknown")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("jaxtune.config.schema" if name == "Config" else "jaxtune.api"), name)


def __dir__() -> list[str]:
    """Return the names that a shell completes."""
    return sorted(__all__)
