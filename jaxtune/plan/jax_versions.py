"""Which versions of jax compile slower steps than another, by predictions for an H100 that are stored in the package.

benchmarks/predicted_speeds.py --versions writes them, once with each version.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_name("jax_versions.json")
CLOSE = 0.97  # a version within this factor of the fastest is not slower


def say_slower(version: str, file: Path = FILE) -> str | None:
    """Say for which recipes this version of jax is slower than another; None if it is not, or was not predicted."""
    speeds = {name: row["tokens_per_second"] for name, row in json.loads(file.read_text()).items()}
    own = next((rates for name, rates in speeds.items() if _minor(name) == _minor(version)), None)
    slower: dict[str, list[str]] = {}  # by the fastest version
    for recipe, rate in (own or {}).items():
        best = max((name for name in speeds if recipe in speeds[name]), key=lambda name: speeds[name][recipe])
        if rate < CLOSE * speeds[best][recipe]:
            slower.setdefault(best, []).append(f"{recipe} by {1 - rate / speeds[best][recipe]:.0%}")
    if not slower:
        return None
    recipes = "; ".join(f"than jax {best} in {', '.join(recipes)}" for best, recipes in slower.items())
    return f"jax {version} is predicted to be slower on an H100 {recipes}"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
