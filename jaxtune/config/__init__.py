"""The one typed schema of a run, and how a recipe becomes it."""

from jaxtune.config.loading import dataset, from_json, load_recipe, new_config, resolve, to_json
from jaxtune.config.schema import Config

__all__ = ["Config", "dataset", "from_json", "load_recipe", "new_config", "resolve", "to_json"]
