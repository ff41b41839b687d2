"""The optimizer of a run, from optax: gradients to updates that are still to be multiplied by the learning rate."""

import re
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax
from jaxtyping import Array

if TYPE_CHECKING:
    from jaxtune.config.schema import Optim


def build(optim: "Optim", hf_names: dict[str, tuple[str, ...]]) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) without its learning rate.

    hf_names: the Hugging Face names of each trained parameter, one a stacked layer; those that optim.no_decay
    matches have no weight decay.
    """
    decays = {
        name: np.asarray([optim.weight_decay * (re.search(optim.no_decay, hf) is None) for hf in names], np.float32)
        for name, names in hf_names.items()
    }
    adam = optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.epsilon)

    def init(params):  # moments in float32 whatever is trained: in bfloat16 a decay of 0.999 is 1
        return adam.init({name: parameter.astype("float32") for name, parameter in params.items()})

    return optax.chain(optax.GradientTransformation(init, adam.update), _add_decay(decays))


def _add_decay(decays: dict[str, np.ndarray]) -> optax.GradientTransformation:
    """Like optax.add_decayed_weights, with a rate for each layer of a stacked parameter."""

    def update(updates, state, params=None):
        assert params is not None

        def one(name: str, update: Array, parameter: Array) -> Array:
            rates = decays[name]
            if not rates.any():
                return update
            rate = rates[0] if (rates == rates[0]).all() else rates.reshape(-1, *(1,) * (parameter.ndim - 1))
            return update + rate * parameter.astype(update.dtype)

        return {name: one(name, update, params[name]) for name, update in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_factor(norm: Array, max_norm: float) -> Array:
    """What to multiply gradients by so that their global norm is at most max_norm; 0 never clips."""
    return jax.numpy.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else jax.numpy.ones_like(norm)
