"""Adaptive quantization noise (AQN of QeRL, Huang et al. 2025, arXiv:2510.11696), drawn in each step.

Noise on the weight of the norm before quantized layers acts as noise on all their weights, one factor per input
feature, so no quantized weight has to change. Evaluations and exports have no noise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.config.schema import Config
from jaxtune.models.decoder import Parameters
from jaxtune.parallel.random import named_key
from jaxtune.weights.model import Model


def make_noise(model: Model, config: Config) -> Callable[..., Parameters] | None:
    """Return a function (frozen parameters, key of the step, learning rate) -> parameters with noise; None without.

    There is no noise if quant.noise is 0, or if no weight is quantized. Its standard deviation is quant.noise at the
    peak of the learning rate and falls with the rate. (QeRL decays it exponentially from 1e-2 to 5e-4.)
    """
    deviation = config.quant.noise / config.optim.learning_rate  # times the rate of a step, below
    norms = [name for name, p in model.frozen.items() if p.local in ("attention_norm.weight", "mlp_norm.weight")]
    if not deviation or not model.quantized:
        return None

    def noisy(frozen: Parameters, key: Array, rate: Float[Array, ""]) -> Parameters:
        def one(name: str) -> Array:
            weight = frozen[name]
            drawn = jax.random.normal(named_key(key, name), weight.shape, jnp.float32)
            drawn = jax.reshard(drawn, jax.typeof(weight).sharding.spec)
            return (weight + deviation * rate * drawn).astype(weight.dtype)

        return {**frozen, **{name: one(name) for name in norms}}

    return noisy
