"""Initial values of adapters that are computed from the base's weights: PiSSA, OLoRA and the magnitudes of DoRA."""

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
    """Return (trained, frozen) with adapters initialised from their weights, unless lora.path loads the adapters.

    Computed one layer at a time, replicated on every device.
    """
    if config.lora.path is not None:
        return trained, frozen
    if config.lora.init in FROM_WEIGHT:
        log.info("lora.init=%r: decomposing the weights that have adapters", config.lora.init)
    values = {**trained, **frozen}
    for names in model.adapted_linears:
        if model.parameters[names[0]].treatment.adapter.from_weight:
            values |= _begin_module(model, names, values)
    return {name: values[name] for name in trained}, {name: values[name] for name in frozen}


def _begin_module(model: Model, names: list[str], values: Parameters) -> Parameters:
    """Return the adapter of one Hugging Face module in all layers of a stack, from its weights and drawn values.

    `names`: the module's weights, such as the q, k and v parts of a fused one. Their rows are concatenated, as in the
    module; parts such as A, which read its input, are shared by all of them.
    """
    first = model.parameters[names[0]]
    adapter, part_names = first.treatment.adapter, [model.adapter_of(name) for name in names]
    rows, layers = [model.parameters[name].matrix[0] for name in names], []
    # One layer at a time, so that only one weight is replicated in float32.
    for index, _ in first.elements():
        # (rows of all weights, in)
        weight = jnp.concatenate([gather_element(values[name], index).astype(jnp.float32) for name in names])
        drawn = {
            part: _join([gather_element(values[named[part]], index) for named in part_names], part, adapter)
            for part in part_names[0]
        }
        layers.append(_begin(adapter, weight, drawn))
    started = {}
    for number, named in enumerate(part_names):
        weight_rows = slice(sum(rows[:number]), sum(rows[: number + 1]))
        for part, name in named.items():
            parameter = model.parameters[name]
            each = [layer[part] if part in adapter.shared else layer[part][weight_rows] for layer in layers]
            value = jnp.stack(each) if parameter.lead else each[0]  # (layers, ...), as the base's weights are stacked
            sharded = jax.reshard(value.astype(parameter.dtype), parameter.sharding.spec)
            # device_put moves the adapter of an offloaded stack to the host.
            started[name] = jax.device_put(sharded, abstract({name: parameter})[name].sharding)
    return started


def _join(parts: list[Array], part: str, adapter: Any) -> Array:
    """Return the rows of all weights' parts, or the first one if the weights share the part."""
    return parts[0] if part in adapter.shared else jnp.concatenate(parts)


@partial(jax.jit, static_argnums=0)  # an adapter is frozen and hashable
def _begin(adapter: Any, weight: Array, drawn: Mapping[str, Array]) -> dict[str, Array]:
    return adapter.begin(weight, drawn)
