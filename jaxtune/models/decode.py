"""Decoding with a key-value cache: the same decoder, attending to what it has already seen."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.attention import attend_cached
from jaxtune.models.decoder import Decoder
from jaxtune.models.spec import ModelSpec, stacks
from jaxtune.parallel.layout import TOKENS, P


def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Zeros for `length` keys and values a layer, in the decoder's stacks."""

    def layers(repeats: int) -> tuple[Array, Array]:
        shape = (repeats, batch, length, spec.kv_heads, spec.head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    return tuple(tuple(layers(stack.repeats) for _ in stack.period) for stack in stacks(spec.layers))


def next_logits(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    cache: Any,
    index: Int[Array, ""],
    last: Int[Array, ""],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "b v"], Any]:
    """Logits after tokens[:, last], the tokens standing at `index` and following; and the cache with them in it.

    Tokens after `last` are padding: nothing sees them before they are overwritten.
    """
    tokens = jax.reshard(tokens, TOKENS)
    positions = jax.reshard(index + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), TOKENS)
    hidden, cache = decoder(tokens, positions, attend_cached(index), dtype=dtype, cache=cache)
    at_last = jax.lax.dynamic_index_in_dim(jax.reshard(hidden, P()), last, axis=1, keepdims=False)
    head = jax.reshard(decoder.head_weight.astype(dtype), P())
    logits = jnp.einsum("bd,vd->bv", at_last, head, preferred_element_type=jnp.float32, out_sharding=P())
    return logits[:, : decoder.spec.vocabulary], cache


def sample(logits: Float[Array, "b v"], key: Array, temperature: float, top_p: float) -> Int[Array, " b"]:
    """The likeliest token at temperature 0, else one of the nucleus of probability top_p (Holtzman et al. 2020)."""
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1)
    ordered = jnp.sort(logits / temperature, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    inside = (before < top_p) | (before == 0.0)  # the likeliest always is
    lowest = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(logits / temperature >= lowest, logits / temperature, -jnp.inf))
