"""What code says of its own cost to a reader of the compiled program, where XLA cannot know it.

XLA knows neither what happens in a kernel nor how often a loop runs that ends by a value. Both are said in jax's name
stack, which the compiled program keeps.
"""

import re
from contextlib import AbstractContextManager

import jax


def flops(count: float) -> AbstractContextManager[object]:
    """Around a kernel's call: the floating-point operations of its matrix products, at most."""
    return jax.named_scope(f"flops={count:.6g}")


def iterations(most: int) -> AbstractContextManager[object]:
    """Around a loop: how often it runs at most."""
    return jax.named_scope(f"iterations={most}")


def flops_said(operation: str) -> float | None:
    """What `flops` said, by the name stack of an instruction; None: nothing."""
    return _last(r"flops=([\d.e+]+)", operation)


def iterations_said(operation: str) -> int | None:
    """What `iterations` said, by the name stack of a loop; None: nothing."""
    found = _last(r"iterations=(\d+)", operation)
    return None if found is None else int(found)


def _last(pattern: str, text: str) -> float | None:
    found = re.findall(pattern, text)
    return float(found[-1]) if found else None
