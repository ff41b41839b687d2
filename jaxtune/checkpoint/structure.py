"""Name the leaves of a state, and check that a checkpoint has the same ones."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxtune.errors import UserError


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path ('params/layers/0/weight'), so that Orbax sees a flat dict and errors name a leaf."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have one path, as {'a/b': x, 'a': {'b': y}} would have")
    return named


def check(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError naming a leaf that only one of `saved` and `wanted` has, or that differs in shape or dtype."""
    differences = [f"{name} is not in it" for name in wanted.keys() - saved.keys()]
    differences += [f"{name} is not in this run" for name in saved.keys() - wanted.keys()]
    for name in wanted.keys() & saved.keys():
        of_wanted, of_saved = (f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in (wanted[name], saved[name]))
        if of_wanted != of_saved:
            differences.append(f"{name} is {of_saved} in it and {of_wanted} in this run")
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise UserError(f"{path} is a checkpoint of another model or optimizer: {min(differences)}{more}")
