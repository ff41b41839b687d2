"""The parameters a decoder declares: names, shapes, layout, Hugging Face names, and random values."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxtune.models.declared import Init
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.dropout import named_key
from jaxtune.models.spec import Layer, ModelSpec, stacks
from jaxtune.parallel.layout import sharding
from jaxtune.parallel.mesh import misfit


@dataclass(frozen=True)
class Parameter:
    """One leaf of the flat parameter dict."""

    shape: tuple[int, ...]  # with the leading axis of a stack
    axes: tuple[str | None, ...]  # logical name of each dimension
    init: Init
    is_adapter: bool
    local: str  # name inside its layer, "mlp.down.weight", or the whole name outside the layers
    layers: tuple[int, ...]  # the layers stacked here; empty outside the layers
    trained: bool
    quantized: bool
    low_precision: bool

    @property
    def sharding(self) -> jax.NamedSharding:
        """Where it lives on the current mesh."""
        return sharding(*self.axes)


def declare(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, Parameter]]:
    """The decoder's graph, for `bind`, and every parameter by its dotted name.

    With adapters in the spec only they are trained; otherwise all that is not frozen is.
    """
    graph, state = nnx.split(Decoder(spec))
    grouped = stacks(spec.layers)

    def parameter(path: tuple[Any, ...], variable: Any) -> Parameter:
        shape, axes = variable.get_value().shape, variable.get_metadata("axes")
        local, layers, frozen, layer = ".".join(map(str, path)), (), spec.frozen, Layer()
        if path[0] == "stacks":  # stacks, number of the stack, blocks, position in its period, name in the layer
            stack, position = grouped[path[1]], path[3]
            local, layers = ".".join(map(str, path[4:])), tuple(stack.layer_numbers(position))
            shape, axes = (len(layers), *shape), ("layers", *axes)
            layer = stack.period[position]
            frozen = layer.frozen
        is_adapter = isinstance(variable, nnx.LoRAParam)
        trained = is_adapter if spec.adapter else local not in frozen
        init = variable.get_metadata("init")
        quantized, low_precision = local in layer.quantized, local in layer.low_precision
        return Parameter(shape, axes, init, is_adapter, local, layers, trained, quantized, low_precision)

    return graph, {".".join(map(str, path)): parameter(path, variable) for path, variable in nnx.to_flat_state(state)}


def randomize(parameters: dict[str, Parameter], dtypes: dict[str, jnp.dtype], seed: int) -> Parameters:
    """Random values straight into their shards: a function of seed, name and layer, not of the mesh or the stacks."""

    def make(parameter: Parameter, dtype: jnp.dtype) -> Array:
        key = named_key(jax.random.key(seed), parameter.local)
        if not parameter.layers:
            return parameter.init(key, parameter.shape, jnp.float32).astype(dtype)
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.asarray(parameter.layers))
        return jax.vmap(lambda key: parameter.init(key, parameter.shape[1:], jnp.float32).astype(dtype))(keys)

    def make_all():
        return {name: make(parameter, dtypes[name]) for name, parameter in parameters.items()}

    return jax.jit(make_all, out_shardings={name: p.sharding for name, p in parameters.items()})()


def undivided(spec: ModelSpec, parameters: dict[str, Parameter], mesh: jax.sharding.Mesh) -> list[str]:
    """Complaints about dimensions that the mesh does not divide, each with the sizes that would."""
    sizes = {("heads", spec.heads), ("kv_heads", spec.kv_heads)}  # a head is never split
    sizes |= {(name, size) for p in parameters.values() for name, size in zip(p.axes, p.shape) if name is not None}
    complaints = (misfit(mesh, name, size, f"{name}={size}") for name, size in sorted(sizes))
    return [complaint for complaint in complaints if complaint]
