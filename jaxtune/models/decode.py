"""Decoding with a key-value cache: the same decoder, attending to what it has already seen."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.attend import attend_cached
from jaxtune.models.call import Call
from jaxtune.models.decoder import Decoder, inputs_of
from jaxtune.models.delta_net import memory
from jaxtune.models.score import logits
from jaxtune.models.spec import DeltaNet, Heads, ModelSpec
from jaxtune.parallel.layout import P, by_token


def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Zeros for `length` keys and values a layer, or for its state, in the decoder's stacks."""

    def zeros(repeats: int, mixer: Heads | DeltaNet) -> Any:
        if isinstance(mixer, DeltaNet):
            return jax.tree.map(lambda leaf: jnp.zeros((repeats, *leaf.shape), leaf.dtype), memory(mixer, batch, dtype))
        shape = (repeats, batch, length, mixer.kv_heads, mixer.head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    return tuple(tuple(zeros(stack.repeats, layer.mixer) for layer in stack.period) for stack in spec.stacks)


def next_logits(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    cache: Any,
    index: Int[Array, ""],
    last: Int[Array, ""],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "b v"], Any]:
    """Logits after tokens[:, last], and the cache with the keys and values of the tokens, at `index` and following.

    Tokens after `last` are padding: no query sees their keys before they are overwritten, and no state changes.
    """
    tokens = jax.reshard(tokens, by_token())
    positions = jax.reshard(index + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), by_token())
    valid = jax.reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]) <= last, tokens.shape), by_token())
    inputs = inputs_of(decoder.spec, positions, attend_cached(index), valid)
    hidden, cache, _ = decoder(tokens, inputs, Call(dtype), cache)
    at_last = jax.lax.dynamic_index_in_dim(jax.reshard(hidden, P()), last, axis=1, keepdims=False)
    return logits(decoder, at_last, dtype), cache


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
