"""LLM training and fine-tuning in JAX for NVIDIA GPUs, from one GPU to many hosts.

From Python: `train`, which returns a `Run`, `config_of`, and the `UserError` that they raise.
"""

import logging
from typing import TYPE_CHECKING, Any

from jaxtune import interrupt

if interrupt.is_command():  # before anything that takes a second to import
    interrupt.leave_at_once()

import pallas_kernels  # noqa: F401 (so that jax's CUDA plugin is quiet without a GPU)
from jaxtune.errors import UserError

# transformers is here for tokenizers and configs, which is all that it has without PyTorch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtune.config.schema import Config
    from jaxtune.python import Run, config_of

    train: Callable[..., Run]

__all__ = ["Config", "Run", "UserError", "config_of", "train"]
_HOMES = {"Config": "config.schema", "Run": "python", "config_of": "python"}


def __getattr__(name: str) -> Any:
    """What takes seconds to import is imported on first use."""
    import importlib

    if name == "train":
        return importlib.import_module("jaxtune.train")  # the module, which can be called
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"jaxtune.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Names that a shell completes."""
    return sorted(__all__)
