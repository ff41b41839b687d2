"""Decoding with a key-value cache: the same decoder, attending to what it has already seen."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxtune.models.decoder import Decoder, inputs_of
from jaxtune.models.forward_options import Call
from jaxtune.models.layers.attend import attend_cached
from jaxtune.models.layers.delta_net import memory
from jaxtune.models.score import logits
from jaxtune.models.spec import DeltaNet, Heads, ModelSpec
from jaxtune.parallel.layout import P, Rules, by_head, by_token
from jaxtune.parallel.sequence import heads_on_devices


class Sampling(NamedTuple):
    """How a token is chosen: options of transformers' GenerationConfig, applied in the order in which it does.

    temperature: 0 takes the likeliest token. top_k: only so many of the likeliest. top_p: only the likeliest, whose
    probability together is at least this (Holtzman et al. 2020). min_p: only those that have this share of the
    likeliest one's probability (arXiv:2407.01082). repetition_penalty: tokens that were there, in the prompt too, have
    their logit divided by this if it is positive, else multiplied (arXiv:1909.05858).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Decoding(NamedTuple):
    """Rows that are decoded together, after `index` tokens and padding.

    cache: of each layer. start: where the first token of each row stands; what is before is padding. seen: tokens
    that were there, where a penalty asks for it.
    """

    cache: Any
    index: Int[Array, ""]
    start: Int[Array, " b"]
    seen: Bool[Array, "b v"] | None


def rules_of_decoding(rules: Rules) -> Rules:
    """The rules by which rows are decoded: axes that shard positions shard rows, as there is one position at a time."""
    return dataclasses.replace(rules, batch=(*rules.batch, *rules.positions), positions=(), context=(), residual=())


def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Zeros for `length` keys and values a layer, or for its state, in the decoder's stacks."""
    rows, _, heads, _ = by_head()

    def zeros(repeats: int, mixer: Heads | DeltaNet) -> Any:
        if isinstance(mixer, DeltaNet):
            shapes, place = memory(mixer, batch, dtype), P(None, rows)
        else:
            one = jax.ShapeDtypeStruct((batch, length, heads_on_devices(mixer.kv_heads), mixer.head_dim), dtype)
            shapes, place = (one, one), P(None, rows, None, heads, None)
        return jax.tree.map(lambda leaf: jax.reshard(jnp.zeros((repeats, *leaf.shape), leaf.dtype), place), shapes)

    return tuple(tuple(zeros(stack.repeats, layer.mixer) for layer in stack.period) for stack in spec.stacks)


def begin(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    start: Int[Array, " b"],
    keys: Key[Array, " b"],
    sampling: Sampling,
    length: int,
    dtype: jnp.dtype,
) -> tuple[Int[Array, " b"], Decoding]:
    """The first token after prompts that end together, padded on the left; room for `length` tokens with these."""
    seen = None
    if sampling.repetition_penalty != 1:
        there = jnp.arange(tokens.shape[1]) >= start[:, None]
        rows = jnp.arange(len(tokens))[:, None]
        seen = jnp.zeros((len(tokens), decoder.spec.vocabulary), bool).at[rows, tokens].max(there)
    cache = empty_cache(decoder.spec, len(tokens), length, dtype)
    return advance(decoder, tokens, Decoding(cache, jnp.zeros((), jnp.int32), start, seen), keys, sampling, dtype)


def advance(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    decoding: Decoding,
    keys: Key[Array, " b"],
    sampling: Sampling,
    dtype: jnp.dtype,
) -> tuple[Int[Array, " b"], Decoding]:
    """The token after these, which follow what was decoded, on every device; `keys`: of each row's random numbers."""
    index, start = decoding.index, decoding.start
    at = index + jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    valid, end = at >= start[:, None], index + tokens.shape[1]
    # Padding sees no key.
    key_start = jnp.where(valid, start[:, None], end)
    placed = (jax.reshard(x, by_token()) for x in (tokens, jnp.maximum(at - start[:, None], 0), key_start, valid))
    tokens, positions, key_start, valid = placed
    inputs = inputs_of(decoder.spec, positions, attend_cached(index, key_start), valid)
    hidden, cache, _ = decoder(tokens, inputs, Call(dtype), decoding.cache)
    rows = P(by_token()[0])
    found, seen = logits(decoder, hidden[:, -1], dtype), decoding.seen
    arguments = jax.tree.map(lambda array: jax.reshard(array, rows), (found, keys, seen))
    chosen = jax.shard_map(partial(choose, sampling=sampling), in_specs=rows, out_specs=rows)(*arguments)
    chosen = jax.reshard(chosen, P())
    if seen is not None:
        seen = seen.at[jnp.arange(len(chosen)), chosen].set(True)
    return chosen, Decoding(cache, end, start, seen)


def choose(
    logits: Float[Array, "b v"], keys: Key[Array, " b"], seen: Bool[Array, "b v"] | None, sampling: Sampling
) -> Int[Array, " b"]:
    """A token of each row."""
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = kept(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def kept(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """The logits with -inf at tokens that are not to be chosen."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        inside = (before < top_p) | (before == 0)  # the likeliest always is
        least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
