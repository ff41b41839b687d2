"""Functions of FP8 arrays that must not be differentiated: jax would do it, with gradients rounded to FP8."""

from collections.abc import Callable
from typing import Any

import jax


def without_derivative(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays; TypeError when it is differentiated."""

    def refuse(primals, tangents):
        raise TypeError(f"{name} has no derivative: call it inside a jax.custom_vjp whose backward pass knows one")

    guarded = jax.custom_jvp(function)
    guarded.defjvp(refuse)
    return guarded
