"""ReLoRA (Lialin et al. 2023, arXiv:2307.05695): periodically merges adapters into their base and reinitialises them.

The weights that adapters are merged into change in a step, so they are part of the state and of every checkpoint. The
last adapters are useless without these weights, so the whole model is exported.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.lora.lora import FROM_WEIGHT
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import Parameter, draw_parameter
from jaxtune.parallel.random import named_key
from jaxtune.weights.merged_weight import merged_weight
from jaxtune.weights.model import Model


def merge_targets(model: Model, config: Config) -> dict[str, Parameter]:
    """Return the frozen weights with adapters that lora.merge_interval changes; {} without it.

    Raises UserError if a weight cannot be changed in a step.
    """
    if not config.lora.merge_interval:
        return {}
    weights = {name: p for name, p in model.frozen.items() if p.kind == "linear" and p.treatment.adapter is not None}
    why = {
        "adapters of experts": any(len(p.lead) > 1 for p in weights.values()),
        "lora.use_dora": config.lora.use_dora,
        "lora.freeze_a": config.lora.freeze_a,
        f"lora.init={config.lora.init!r}": config.lora.init in FROM_WEIGHT,
        "memory.offload_quants": any(p.on_host for p in weights.values()),
        f"precision.recipe={config.precision.recipe!r}": model.linears is not None,
        "mesh.stage": "stages" in {axis for p in weights.values() for axis in p.axes},
        "an average (optim.ema_decay)": config.optim.ema_decay is not None,
        # Schedule-free's state holds another point of the weights, which would bring back the merged adapters.
        "optim.name='schedule_free' (but with lora.reset_on_merge)": config.optim.name == "schedule_free"
        and not config.lora.reset_on_merge,
        "a reference (preference.reference, grpo.beta)": config.preference.loss is not None,
        f"rollouts ({config.samples})": bool(config.samples),
    }
    if refused := [reason for reason, is_so in why.items() if is_so]:
        raise UserError(
            f"lora.merge_interval={config.lora.merge_interval}: not with {refused[0]}; leave out one of the two"
        )
    return weights


def make_merge(model: Model, base: Mapping[str, Parameter], seed: int) -> Callable[..., tuple[Parameters, Parameters]]:
    """Make a function (trained, base, step) -> (trained, base) with adapters merged into the base and reinitialised.

    A quantized base is quantized again. A is drawn from the seed, its name and the step. B is zero, so that only
    rounding changes the model.
    """
    fresh = {part: model.trained[part] for name in base for part in model.adapter_of(name).values()}

    @jax.named_scope("merge")
    def merge(trained: Parameters, base_values: Parameters, step: Int[Array, ""]) -> tuple[Parameters, Parameters]:
        merged = {}
        for name, parameter in base.items():
            parts = {part: trained[of] for part, of in model.adapter_of(name).items()}
            merged[name] = _merge(parameter, base_values[name], parts)
        key = jax.random.fold_in(named_key(jax.random.key(seed), "merge"), step)  # another A after each merge
        reinitialised = {
            name: jax.reshard(draw_parameter(parameter, key), jax.typeof(trained[name]).sharding.spec)
            for name, parameter in fresh.items()
        }
        return {**trained, **reinitialised}, merged

    return merge


def _merge(parameter: Parameter, weight: Any, parts: Mapping[str, Array]) -> Any:
    """Merge an adapter into a weight, or into a stack of layers, one layer at a time to save memory."""

    def one(layer: tuple[Any, Mapping[str, Array]]) -> Any:
        weight, parts = layer
        wide: Float[Array, "o i"] = merged_weight(parameter.treatment.adapter, weight, parts)
        merged = wide.astype(weight.dtype)
        return merged if parameter.storage is None else parameter.storage.make(merged, parameter.matrix_axes)

    return jax.lax.map(one, (weight, dict(parts))) if parameter.lead else one((weight, parts))  # (layers, o, i)
