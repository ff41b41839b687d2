"""Annotations of cost that XLA cannot know, for readers of the compiled program.

XLA does not know the operations inside a kernel and how many of them depend on values, the memory that a foreign kernel
allocates, the trip count of a loop that ends on a computed value, or how often a conditional takes a branch. The
annotations are in jax's name stack, which the compiled program keeps.
"""

import re
from contextlib import AbstractContextManager

import jax


def flops(count: float) -> AbstractContextManager[object]:
    """Annotate a kernel's call with the floating-point operations of its matrix products, at most."""
    return jax.named_scope(f"flops={count:.6g}")


def filled(fraction: float) -> AbstractContextManager[object]:
    """Annotate calls of kernels that skip empty blocks of rows with the expected fraction of the blocks with rows."""
    return jax.named_scope(f"filled={fraction:.4f}")


def scratch(most: float) -> AbstractContextManager[object]:
    """Annotate a foreign kernel's call with the bytes that it allocates itself while it runs, at most."""
    return jax.named_scope(f"scratch={most:.0f}")


def iterations(most: int) -> AbstractContextManager[object]:
    """Annotate a loop with the largest number of iterations it can run."""
    return jax.named_scope(f"iterations={most}")


def taken(times: int, of: int) -> AbstractContextManager[object]:
    """Annotate a conditional with the number of executions in which it takes its longest branch on any device."""
    return jax.named_scope(f"taken={times}_of_{of}")


def read_flops(operation: str) -> float | None:
    """Read `flops` times `filled` from the name stack of an instruction; None if it has no annotation of `flops`."""
    count, fraction = _last(r"flops=([\d.e+]+)", operation), _last(r"filled=([\d.]+)", operation)
    return None if count is None else count * (1.0 if fraction is None else fraction)


def read_iterations(operation: str) -> int | None:
    """Read the annotation of `iterations` from the name stack of a loop; None if it has none."""
    count = _last(r"iterations=(\d+)", operation)
    return None if count is None else int(count)


def read_taken(operation: str) -> float:
    """Read `taken` from the name stack of a conditional, as a fraction; 1 if it is not directly around it."""
    found = re.search(r"taken=(\d+)_of_(\d+)/cond$", operation)
    return int(found[1]) / int(found[2]) if found else 1.0


def read_scratch(program: str) -> int:
    """Return the largest annotation of `scratch` in a program's text, because kernels run one after another."""
    return max(map(int, re.findall(r"\bscratch=(\d+)", program)), default=0)


def _last(pattern: str, text: str) -> float | None:
    matches = re.findall(pattern, text)
    return float(matches[-1]) if matches else None
