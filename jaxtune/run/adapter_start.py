"""What adapters begin as where that depends on the weights beside them: PiSSA, OLoRA, the magnitudes of DoRA."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.precision.linears import Frozen
from jaxtune.run.elements import gather_element
from jaxtune.run.model import Model


def begin_adapters(
    model: Model, config: Config, trained: Parameters, base: Parameters, frozen: Parameters
) -> tuple[Parameters, Parameters]:
    """(trained, base) of a state with adapters as their methods begin them beside the weights, if not read from files.

    A layer at a time, on every device. Raises UserError where a weight cannot be read, or has no such part.
    """
    if config.lora.path is not None:
        return trained, base
    modules: dict[str, list[str]] = {}  # the parts of one Hugging Face module, by what they share
    for name, parameter in model.frozen.items():
        adapter = parameter.treatment.adapter
        if parameter.kind == "linear" and adapter is not None and adapter.from_weight:
            modules.setdefault(model.adapter_of(name)["lora_a"], []).append(name)
    drawn, weights = {**trained, **base}, {**frozen, **base}
    found = {}
    for parts in modules.values():
        found |= _of_module(model, parts, drawn, weights)
    return {**trained, **_among(trained, found)}, {**base, **_among(base, found)}


def _among(names: Collection[str], found: Parameters) -> Parameters:
    return {name: value for name, value in found.items() if name in names}


def _of_module(model: Model, names: list[str], drawn: Parameters, weights: Parameters) -> Parameters:
    """Of the parts of one module in all layers of a stack."""
    first = model.parameters[names[0]]
    adapter, of_parts = first.treatment.adapter, [model.adapter_of(name) for name in names]
    if isinstance(first.storage, Frozen):
        raise UserError(
            f"lora.init and lora.use_dora need the weights as they are, and {first.places[0].name} is stored in the "
            "format of its products; take precision.recipe='bf16'"
        )
    rows = [model.parameters[name].matrix[0] for name in names]
    if adapter.rank > (least := min(sum(rows), first.matrix[1])):
        raise UserError(
            f"lora.rank={adapter.rank}: {first.places[0].name} has no more than {least} rows and columns of its own"
        )
    layers = []
    for index, _ in first.elements():
        weight = jnp.concatenate([gather_element(weights[name], index).astype(jnp.float32) for name in names])
        values = {
            part: _joined([gather_element(drawn[of[part]], index) for of in of_parts], part, adapter)
            for part in of_parts[0]
        }
        layers.append(_begin(adapter, weight, values))
    found = {}
    for number, of_part in enumerate(of_parts):
        own = slice(sum(rows[:number]), sum(rows[: number + 1]))
        for part, name in of_part.items():
            parameter = model.parameters[name]
            each = [layer[part] if part in adapter.shared else layer[part][own] for layer in layers]
            value = jnp.stack(each) if parameter.lead else each[0]
            found[name] = jax.reshard(value.astype(parameter.dtype), parameter.sharding.spec)
    return found


def _joined(parts: list[Array], part: str, adapter: Any) -> Array:
    """The rows of all parts; of what they share, that of the first."""
    return parts[0] if part in adapter.shared else jnp.concatenate(parts)


@partial(jax.jit, static_argnums=0)
def _begin(adapter: Any, weight: Array, values: Mapping[str, Array]) -> dict[str, Array]:
    return adapter.begin(weight, values)
