"""The reference of an objective, if a run has to keep its values: it is not the model without its adapters."""

import jax

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.objectives.preference import preference
from jaxtune.precision.recipes import recipe_of
from jaxtune.weights.model import Model


def is_kept(config: Config) -> bool:
    """Whether a run's state holds reference values.

    A new adapter changes nothing before the first step, so the reference is the base model, unless biases or modules of
    the model are trained too.
    """
    lora = config.lora
    new = lora.enabled and lora.path is None and lora.bias == "none" and not lora.modules_to_save
    if config.rollout.rewards:
        return bool(config.grpo.beta) and not new  # beta = 0: the KL term is left out
    options = config.preference
    if options.loss is None or not preference(options).reference:
        return False
    return not new or options.reference != "start" or options.reference_update_steps is not None


def abstract_reference(model: Model, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of the reference values; {} if none are kept. Dtypes are as in the forward pass.

    Raises UserError if trained parameters are offloaded to the host.
    """
    if not is_kept(config):
        return {}
    if any(parameter.on_host for parameter in model.trained.values()):
        raise UserError(
            "memory.offload_master: the reference of preference.loss, or of grpo.beta, would stay on the device; train "
            "adapters (lora.enabled), which need no copy, or set preference.precompute_reference=True"
        )
    reference, dtype = {}, recipe_of(config.precision, None).dtype
    for name, parameter in model.trained.items():
        # A forward pass casts linear weights and tables to the compute dtype, so a copy in that dtype is as good.
        wide = parameter.float32 or parameter.treatment.float32 or parameter.kind not in ("linear", "table")
        kept_dtype = parameter.dtype if wide else dtype
        reference[name] = jax.ShapeDtypeStruct(parameter.shape, kept_dtype, sharding=parameter.sharding)
    return reference
