"""Declaration of a parameter by its module: shape, layout, initialisation and kind, without a value."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Init = Callable[[Array, tuple[int, ...], Any], Array]
# linear: the matrix (out, in) of a linear layer, which can be quantized, adapted and orthogonalised.
# gate: a matrix whose few outputs multiply activations; never quantized, adapted or orthogonalised.
# router: the matrix that scores experts; treated like a gate.
# convolution: a kernel for each channel, or of a patch embedding.
# constant: a number in the files that multiplies activations, and that nothing trains.
# correction: added to a router's scores to balance the load; it gets no gradient, but the load may update it.
# position: the learned embeddings of positions in an image.
# table: the embedding, or the head of a language model. score: the head of a classifier.
# vector: a bias, or the weight of a norm.
# adapter: a parameter of an adapter on a linear layer.
Kind = Literal[
    "linear",
    "gate",
    "convolution",
    "router",
    "constant",
    "correction",
    "position",
    "table",
    "score",
    "vector",
    "adapter",
]


def declare_parameter(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Init,
    kind: Kind,
    float32: bool = False,
    frozen: bool = False,
) -> Any:
    """Declare a parameter with a logical name for each dimension; `decoder.bind` later puts in its value.

    float32: whether it is stored in float32 regardless of the model's dtype. frozen: whether an adapter's parameter is
    never updated.
    """
    variable = nnx.LoRAParam if kind == "adapter" else nnx.Param
    metadata = {"axes": axes, "init": init, "kind": kind, "float32": float32, "frozen": frozen}
    return variable(jax.ShapeDtypeStruct(shape, jnp.float32), **metadata)


class Declaration(NamedTuple):
    """A parameter as its module declares it, without the leading axes of layers and experts."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    kind: Kind
    float32: bool
    frozen: bool


def declarations(module: nnx.Module) -> dict[str, Declaration]:
    """Return the parameters that a module declares, by dotted name."""
    return {
        ".".join(map(str, path)): Declaration(
            variable.get_value().shape, *(variable.get_metadata(name) for name in Declaration._fields[1:])
        )
        for path, variable in nnx.to_flat_state(nnx.state(module))
    }
