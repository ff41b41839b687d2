"""What adapters begin as where that depends on the weights beside them: PiSSA, OLoRA, the magnitudes of DoRA."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtune.config.schema import Config
from jaxtune.lora.lora import FROM_WEIGHT
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import abstract
from jaxtune.weights.elements import gather_element
from jaxtune.weights.model import Model

log = logging.getLogger("jaxtune")


def begin_adapters(
    model: Model, config: Config, trained: Parameters, frozen: Parameters
) -> tuple[Parameters, Parameters]:
    """(trained, frozen) with adapters as their methods begin them beside the weights, if they are not from a file.

    A layer at a time, on every device.
    """
    if config.lora.path is not None:
        return trained, frozen
    if config.lora.init in FROM_WEIGHT:
        log.info("lora.init=%r: decomposing the weights beside adapters", config.lora.init)
    found = {**trained, **frozen}
    for names in model.beside_adapters:
        if model.parameters[names[0]].treatment.adapter.from_weight:
            found |= _of_module(model, names, found)
    return {name: found[name] for name in trained}, {name: found[name] for name in frozen}


def _of_module(model: Model, names: list[str], values: Parameters) -> Parameters:
    """The adapter of one module in all layers of a stack, by the values of its weights and what was drawn."""
    first = model.parameters[names[0]]
    adapter, of_parts = first.treatment.adapter, [model.adapter_of(name) for name in names]
    rows, layers = [model.parameters[name].matrix[0] for name in names], []
    for index, _ in first.elements():
        weight = jnp.concatenate([gather_element(values[name], index).astype(jnp.float32) for name in names])
        drawn = {
            part: _joined([gather_element(values[of[part]], index) for of in of_parts], part, adapter)
            for part in of_parts[0]
        }
        layers.append(_begin(adapter, weight, drawn))
    found = {}
    for number, of_part in enumerate(of_parts):
        own = slice(sum(rows[:number]), sum(rows[: number + 1]))
        for part, name in of_part.items():
            parameter = model.parameters[name]
            each = [layer[part] if part in adapter.shared else layer[part][own] for layer in layers]
            value = jnp.stack(each) if parameter.lead else each[0]
            sharded = jax.reshard(value.astype(parameter.dtype), parameter.sharding.spec)
            found[name] = jax.device_put(sharded, abstract({name: parameter})[name].sharding)
    return found


def _joined(parts: list[Array], part: str, adapter: Any) -> Array:
    """The rows of all parts; of what they share, that of the first."""
    return parts[0] if part in adapter.shared else jnp.concatenate(parts)


@partial(jax.jit, static_argnums=0)
def _begin(adapter: Any, weight: Array, drawn: Mapping[str, Array]) -> dict[str, Array]:
    return adapter.begin(weight, drawn)
