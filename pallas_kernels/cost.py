"""What code says of its own cost to a reader of the compiled program, where XLA cannot know it.

XLA knows neither what happens in a kernel, nor what memory a foreign one takes for itself, nor how often a loop runs
that ends by a value. All are said in jax's name stack, which the compiled program keeps.
"""

import re
from contextlib import AbstractContextManager

import jax


def flops(count: float) -> AbstractContextManager[object]:
    """Around a kernel's call: the floating-point operations of its matrix products, at most."""
    return jax.named_scope(f"flops={count:.6g}")


def scratch(most: float) -> AbstractContextManager[object]:
    """Around a call of a foreign kernel: the bytes that it takes for itself while it runs, at most."""
    return jax.named_scope(f"scratch={most:.0f}")


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


def scratch_said(program: str) -> int:
    """The most that `scratch` said in a whole program, by its text: kernels run one after the other."""
    return max(map(int, re.findall(r"\bscratch=(\d+)", program)), default=0)


def _last(pattern: str, text: str) -> float | None:
    found = re.findall(pattern, text)
    return float(found[-1]) if found else None
