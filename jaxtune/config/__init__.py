"""The typed schema of a run, and the resolution of recipes to a Config.

`config.schema` imports only the standard library. The functions that recipes call need ml_collections and are imported
on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtune.config.loading import dataset, from_json, new_config, resolve, to_json
    from jaxtune.config.recipe import load_recipe, read_recipe

__all__ = ["dataset", "from_json", "load_recipe", "new_config", "read_recipe", "resolve", "to_json"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "recipe" if name in ("load_recipe", "read_recipe") else "loading"
    return getattr(importlib.import_module(f"jaxtune.config.{module}"), name)
