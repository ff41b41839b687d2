"""Which values a recipe has from another one: they give way to its own.

Recipes inherit by calling each other's get_config(), which may be in any file and under any name. So an option
remembers how many such calls were running when it was set.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict


class RecipeConfig(ConfigDict):
    """A ConfigDict that knows how deep in calls of get_config() each option was set: the deeper ones are inherited."""

    depths: dict[str, int]

    def __init__(self, values: Mapping[str, Any] | None = None, type_safe: bool = False):
        object.__setattr__(self, "depths", {})
        # Types are checked by `resolve`, all at once: ml_collections knows neither unions nor allowed values.
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
    """The number of get_config() calls that are running."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += frame.f_code.co_name == "get_config"
        frame = frame.f_back
    return depth


def inherited_keys(config: ConfigDict) -> frozenset[str]:
    """The keys of options that get_config() has from another get_config() that it calls, with those of list entries."""
    depths = dict(_depths(config, "", 0))
    own = min(depths.values(), default=0)
    return frozenset(key for key, depth in depths.items() if depth > own)


def every_key(config: ConfigDict) -> frozenset[str]:
    """The keys of all options of a config, with those of list entries."""
    return frozenset(key for key, _ in _depths(config, "", 0))


def _depths(config: Any, prefix: str, outer: int) -> Iterator[tuple[str, int]]:
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
