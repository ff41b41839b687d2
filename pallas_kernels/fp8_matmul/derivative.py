"""Functions of FP8 arrays that must not be differentiated: jax would do it, but round the gradients to FP8."""

from collections.abc import Callable
from typing import Any

import jax


def without_derivative(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of arrays so that differentiating it raises TypeError."""

    def refuse(primals, tangents):
        raise TypeError(f"{name} has no derivative: call it inside a jax.custom_vjp that defines the backward pass")

    guarded = jax.custom_jvp(function)
    guarded.defjvp(refuse)
    return guarded
