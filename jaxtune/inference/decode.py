"""Decoding with a key-value cache: the same decoder, with attention to cached keys and values.

Shape letters: b rows that are decoded together, s new tokens of a row, v tokens of the vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxtune.models.decoder import Decoder, inputs_of
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import logits
from jaxtune.models.layers import recurrence, short_conv
from jaxtune.models.layers.attend import attend_cached
from jaxtune.models.layers.attention import Inputs
from jaxtune.models.structure.mixers import DeltaNet, Heads, Hybrid, Mamba2, Mixer, ShortConv
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import P, Rules, by_head, by_token
from jaxtune.parallel.sequence import heads_on_devices


class Sampling(NamedTuple):
    """How a token is chosen: options of transformers' GenerationConfig, applied in the same order as there.

    Attributes:
        temperature: divides the logits; 0 chooses the likeliest token.
        top_k: keep only the k likeliest tokens; None: keep all.
        top_p: keep only the likeliest tokens, as few as have at least this probability together (Holtzman et al. 2020).
        min_p: keep only tokens with at least this share of the likeliest token's probability (arXiv:2407.01082).
        repetition_penalty: logits of tokens that already occur, also in the prompt, are divided by this if positive and
            multiplied by it if negative (arXiv:1909.05858).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class NextTokens(NamedTuple):
    """The next token of each row.

    Attributes:
        tokens: the tokens.
        log_probs: log-probability of each in nats, by the model at this temperature, of all tokens: without a
            repetition penalty, and before any token is left out (`mask_logits`). At temperature 0, as at 1.
        entropies: of the same distributions, in nats.
        routed_experts: the experts, in each mixture, of the tokens that were read for it: of the padded prompt, or of
            the token before; None: not recorded.
        rows: the prompt of each row of these arrays but the tokens, which are in the order of the prompts; None: all
            are.
    """

    tokens: Int[Array | np.ndarray, " b"]
    log_probs: Float[Array | np.ndarray, " b"]
    entropies: Float[Array | np.ndarray, " b"]
    routed_experts: Int[Array | np.ndarray, "b s mixtures k"] | None = None
    rows: Int[np.ndarray, " b"] | None = None


class Decoding(NamedTuple):
    """The state of rows that are decoded together.

    Attributes:
        cache: the caches of all layers.
        index: number of positions so far, including padding.
        start: position of each row's first token; positions before it are padding.
        seen: which tokens already occur in each row; None without a repetition penalty.
        rope_offset: the rotary position of a row's next token less its place among the row's tokens: below 0 after an
            image (`rope_deltas` of transformers). None: they are equal.
    """

    cache: Any
    index: Int[Array, ""]
    start: Int[Array, " b"]
    seen: Bool[Array, "b v"] | None
    rope_offset: Int[Array, " b"] | None = None


def rules_of_decoding(rules: Rules) -> Rules:
    """Return the layout rules for decoding: axes that shard positions shard rows, because positions come one by one."""
    return dataclasses.replace(rules, batch=(*rules.batch, *rules.positions), positions=(), context=(), residual=())


def empty_cache(spec: ModelSpec, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return zeroed caches in the structure of the stacks: `length` keys and values, or the memory of another mixer."""
    rows, _, heads, _ = by_head()

    def zeros(repeats: int, mixer: Mixer | None) -> Any:
        if isinstance(mixer, Hybrid):
            return zeros(repeats, mixer.attention), zeros(repeats, mixer.mamba)
        if mixer is None or (isinstance(mixer, Heads) and mixer.takes is not None):
            return None
        if isinstance(mixer, DeltaNet | Mamba2):
            shapes, spec = recurrence.memory(mixer, batch, dtype), P(None, rows)
        elif isinstance(mixer, ShortConv):
            shapes, spec = short_conv.memory(mixer, batch, dtype), P(None, rows, None, heads)
        else:
            # If devices divide more heads than there are, attention repeats heads, and the cache has the copies too.
            one = jax.ShapeDtypeStruct((batch, length, heads_on_devices(mixer.kv_heads), mixer.head_dim), dtype)
            shapes, spec = (one, one), P(None, rows, None, heads, None)
        return jax.tree.map(lambda leaf: jax.reshard(jnp.zeros((repeats, *leaf.shape), leaf.dtype), spec), shapes)

    return tuple(tuple(zeros(stack.repeats, layer.mixer) for layer in stack.period) for stack in spec.stacks)


def begin(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    start: Int[Array, " b"],
    keys: Key[Array, " b"],
    sampling: Sampling,
    length: int,
    call: ForwardOptions,
    images: Mapping[str, Array] | None = None,
) -> tuple[NextTokens, Decoding]:
    """Return the first token after prompts, padded on the left, and the state, with room for `length` positions.

    images: the columns of the prompts' images, `columns.image_columns`; None: there are none.
    """
    seen = rope_offset = None
    if images is not None and "rope_positions" in images:
        # The next token follows the largest position along any axis. Padding has 0.
        rope_offset = jnp.max(images["rope_positions"], axis=(1, 2)) + 1 - (tokens.shape[1] - start)
    if sampling.repetition_penalty != 1:
        # Padding marks nothing, and max keeps a mark that another position of the same token has set.
        there = jnp.arange(tokens.shape[1]) >= start[:, None]
        rows = jnp.arange(len(tokens))[:, None]
        seen = jnp.zeros((len(tokens), decoder.spec.vocabulary), bool).at[rows, tokens].max(there)
    cache = empty_cache(decoder.spec, len(tokens), length, call.dtype)
    decoding = Decoding(cache, jnp.zeros((), jnp.int32), start, seen, rope_offset)
    return advance(decoder, tokens, decoding, keys, sampling, call, images)


def advance(
    decoder: Decoder,
    tokens: Int[Array, "b s"],
    decoding: Decoding,
    keys: Key[Array, " b"],
    sampling: Sampling,
    call: ForwardOptions,
    images: Mapping[str, Array] | None = None,
) -> tuple[NextTokens, Decoding]:
    """Return the token after `tokens`, on every device, and the next state; `keys`: random keys of the rows.

    images: as in `begin`; only prompts have images.
    """
    index, start = decoding.index, decoding.start
    numbers = index + jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    valid, end = numbers >= start[:, None], index + tokens.shape[1]
    # Padding sees no keys: its first key is past the last one.
    key_start = jnp.where(valid, start[:, None], end)
    # Positions count from a row's first token, so that rotary embedding does not depend on the padding.
    placed = (jax.reshard(x, by_token()) for x in (tokens, jnp.maximum(numbers - start[:, None], 0), key_start, valid))
    tokens, positions, key_start, valid = placed
    inputs = _inputs(decoder, positions, key_start, valid, decoding, images)
    if images is not None:
        assert decoder.vision is not None
        inputs = inputs._replace(images=decoder.vision(images, call))
    hidden, cache, recorded = decoder(tokens, inputs, call, decoding.cache)
    rows = P(by_token()[0])
    # Prompts are padded on the left, so the last position is the last token of every row.
    next_logits, seen = logits(decoder, hidden[:, -1], call.dtype), decoding.seen
    arguments = jax.tree.map(lambda array: jax.reshard(array, rows), (next_logits, keys, seen))
    # Each device has whole vocabularies of some rows: a sort along a sharded axis would communicate.
    never = None if decoder.spec.vision is None else decoder.spec.vision.layout.token
    of_device = partial(choose, sampling=sampling, never=never)
    chosen = jax.shard_map(of_device, in_specs=rows, out_specs=rows)(*arguments)
    if call.record_routing:
        # (mixtures, b, s, k) -> (b, s, mixtures, k); int16 takes half of the copy to the host.
        chosen = chosen._replace(routed_experts=jnp.moveaxis(recorded["routed_experts"].astype(jnp.int16), 0, 2))
    chosen = jax.reshard(chosen, P())
    if seen is not None:
        seen = seen.at[jnp.arange(len(chosen.tokens)), chosen.tokens].set(True)
    return chosen, Decoding(cache, end, start, seen, decoding.rope_offset)


def _inputs(
    decoder: Decoder,
    positions: Int[Array, "b s"],
    key_start: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    decoding: Decoding,
    images: Mapping[str, Array] | None,
) -> Inputs:
    """Return the inputs that all layers share, with the rotary positions and ends of keys that images give."""
    key_end = rope_positions = None
    if images is not None:
        rope_positions, key_end = images.get("rope_positions"), images.get("key_end")
        if rope_positions is not None:
            rope_positions = jax.reshard(rope_positions, by_token(None))
    elif decoding.rope_offset is not None:
        rope_positions = positions + jax.reshard(decoding.rope_offset[:, None], by_token())  # along all axes
    attend = attend_cached(decoding.index, key_start, key_end)
    return inputs_of(decoder.spec, positions, attend, valid, rope_positions=rope_positions)


def keep_rows(
    tokens: Int[Array, " b"], decoding: Decoding, places: Int[np.ndarray, " k"]
) -> tuple[Int[Array, " k"], Decoding]:
    """Return the tokens and the state of the rows at these places: device by device, equally many of each device's.

    The caches of `decoding` are deleted one by one, so that at no time there are two of all.
    """

    def keep(array: Array) -> Array:
        kept = _rows_of_cache(array, places)
        array.delete()
        return kept

    of_rows = tokens, decoding.start, decoding.seen, decoding.rope_offset
    tokens, start, seen, rope_offset = jax.tree.map(lambda array: array[places], of_rows)
    return tokens, Decoding(jax.tree.map(keep, decoding.cache), decoding.index, start, seen, rope_offset)


@jax.jit
def _rows_of_cache(cache: Array, places: Int[Array, " k"]) -> Array:
    """Return rows of an array (repeats, rows, ...); places: as in `keep_rows`."""
    spec = jax.typeof(cache).sharding.spec
    by_row = P(spec[1])

    def take(cache: Array, places: Array) -> Array:  # each device has its own
        return cache[:, places % cache.shape[1]]

    return jax.shard_map(take, in_specs=(spec, by_row), out_specs=spec)(cache, jax.reshard(places, by_row))


def choose(
    logits: Float[Array, "b v"],
    keys: Key[Array, " b"],
    seen: Bool[Array, "b v"] | None,
    sampling: Sampling,
    never: int | None = None,
) -> NextTokens:
    """Choose a token for each row; never: the image token, which means nothing in an answer, as it has no image."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32) / (sampling.temperature or 1.0))
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if never is not None:
        logits = logits.at[:, never].set(-jnp.inf)
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        logits = mask_logits(logits / sampling.temperature, sampling)
        # A key for each row, so that a completion does not depend on the other rows.
        tokens = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    of_tokens = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    return NextTokens(tokens, of_tokens, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))


def mask_logits(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
    """Set the logits of tokens that must not be chosen to -inf."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        # Probability of the likelier tokens: the token that crosses top_p is kept, as in transformers.
        before = jnp.cumsum(probability, axis=-1) - probability
        inside = (before < top_p) | (before == 0)  # the likeliest token is always kept
        least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if min_p:
        # p >= min_p * largest p, in logits.
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
