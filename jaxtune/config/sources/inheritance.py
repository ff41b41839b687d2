"""Track the values that a recipe inherits from another one, because its own values override them.

Recipes inherit by calling each other's get_config(), which may be in any file and imported under any name. Each option
therefore records how many such calls were running when it was set.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict


class RecipeConfig(ConfigDict):
    """A ConfigDict that records for each option the depth of get_config() calls that set it.

    Options set at a greater depth than the outermost call are inherited.

    Attributes:
        depths: The depth by option.
    """

    depths: dict[str, int]

    def __init__(self, values: Mapping[str, Any] | None = None, type_safe: bool = False):
        object.__setattr__(self, "depths", {})  # ConfigDict's own would make it an option
        # `resolve` checks all types together: ml_collections supports neither unions nor allowed values.
        super().__init__(type_safe=type_safe)
        for name, value in (values or {}).items():
            self[name] = RecipeConfig(value) if isinstance(value, dict) else value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.depths[key] = _recipe_depth()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.depths.update(state["depths"])


def _recipe_depth() -> int:
    """Count the running get_config() calls."""
    # By name, because a recipe's get_config() may be any function object, run by runpy or imported.
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += frame.f_code.co_name == "get_config"
        frame = frame.f_back
    return depth


def inherited_keys(config: ConfigDict) -> frozenset[str]:
    """Return keys that get_config() got from another get_config(), including keys of list entries."""
    depths = dict(_depths(config, "", 0))
    outermost = min(depths.values(), default=0)
    return frozenset(key for key, depth in depths.items() if depth > outermost)


def every_key(config: ConfigDict) -> frozenset[str]:
    """Return the keys of all options of a config, including keys of list entries."""
    return frozenset(key for key, _ in _depths(config, "", 0))


def _depths(config: Any, prefix: str, outer: int) -> Iterator[tuple[str, int]]:
    """Yield (key, depth) of each option; plain dicts have `outer`, the depth of their holder."""
    for name, value in config.items():
        key, depth = f"{prefix}{name}", config.depths[name] if isinstance(config, RecipeConfig) else outer
        sections = {key: value}
        if isinstance(value, list | tuple):
            sections |= {f"{key}[{i}]": entry for i, entry in enumerate(value)}
        inner = [(at, section) for at, section in sections.items() if isinstance(section, ConfigDict | dict)]
        for at, section in inner:
            yield from _depths(section, f"{at}.", depth)
        if not isinstance(value, ConfigDict | dict):
            yield key, depth
