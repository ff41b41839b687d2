"""LLM training and fine-tuning in JAX for NVIDIA GPUs, from one GPU to many hosts.

From Python: `train`, which returns a `Run`, `config_of`, and the `UserError` that they raise.
"""

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
    from collections.abc import Callable

    from jaxtune.config.schema import Config
    from jaxtune.python import Run, config_of

    train: Callable[..., Run]

__all__ = ["Config", "Run", "UserError", "config_of", "train"]
_HOMES = {"Config": "config.schema", "Run": "python", "config_of": "python"}


def __getattr__(name: str) -> Any:
    """Import public names on first use, because their modules take seconds to import."""
    import importlib

    if name == "train":
        return importlib.import_module("jaxtune.train")  # the module itself is callable
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxtune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names that a shell completes."""
    return sorted(__all__)
