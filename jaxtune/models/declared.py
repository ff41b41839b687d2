"""How a module declares a parameter: shape, layout, random values and what it is, without any value."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Init = Callable[[Array, tuple[int, ...], Any], Array]
# linear: a matrix (out, in) that activations are multiplied by, which can be quantized, adapted and orthogonalised.
# gate: one whose few outputs multiply activations, and router: one that chooses experts, which stay as they are.
# convolution: a kernel of each channel. correction: what is added to a router's scores to balance them: no gradient
# reaches it, but the load may move it. table: rows that are looked up, and the head. score: a classifier's head.
# vector: a bias, the weight of a norm. adapter: what is trained beside a linear layer.
Kind = Literal["linear", "gate", "convolution", "router", "correction", "table", "score", "vector", "adapter"]


def declared(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Init,
    kind: Kind,
    float32: bool = False,
    frozen: bool = False,
) -> Any:
    """A parameter with a logical name for each dimension; `decoder.bind` puts a value in its place.

    float32: that is what it is stored as, whatever the model's dtype. frozen: of an adapter, no step changes it.
    """
    variable = nnx.LoRAParam if kind == "adapter" else nnx.Param
    metadata = {"axes": axes, "init": init, "kind": kind, "float32": float32, "frozen": frozen}
    return variable(jax.ShapeDtypeStruct(shape, jnp.float32), **metadata)
