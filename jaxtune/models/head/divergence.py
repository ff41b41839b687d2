"""Divergence between the decoder's distribution of the next token and a teacher's, together with the cross-entropy.

A teacher's distribution has k + 1 outcomes: its k likeliest tokens, and any other token. The divergence of two such
distributions is a lower bound of the divergence over the whole vocabulary, and equals it if k is the whole vocabulary.

Shape letters: b rows of the batch, s positions in a row, t tokens (b * s on a device), d features of the hidden states,
v rows of the head, k tokens of the teacher, n outcomes (k + 1).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.decoder import Decoder
from jaxtune.models.pipeline import Batch
from jaxtune.parallel.layout import P, by_token, gather, gathered_entry
from pallas_kernels import cost
from pallas_kernels.manual_axes import vary_over, varying_axes

LOWEST = np.finfo(np.float32).min  # not -inf, whose difference with itself is NaN
NEVER = -1e4  # the log-probability of an outcome that has no token; its exponential is 0, its differences are finite


@dataclass(frozen=True)
class Divergence:
    """Which divergence between a teacher p and a student q is computed.

    Attributes:
        kind: forward_kl: KL(p||q); reverse_kl: KL(q||p); js: beta KL(p||m) + (1 - beta) KL(q||m) for the mixture
            m = beta p + (1 - beta) q, the generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649).
        beta: weight of js, above 0 and below 1.
        temperature: divides the logits of both before their softmax.
    """

    kind: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0


@dataclass(frozen=True)
class Head:
    """How hidden states become logits.

    Attributes:
        vocabulary: number of tokens; later rows of the head are padding.
        axis: mesh axes over which the rows of the head are sharded; None: not sharded.
        soft_cap: bounds the logits to cap * tanh(logits / cap).
    """

    vocabulary: int
    axis: Any = None
    soft_cap: float | None = None


def score_with_divergence(
    decoder: Decoder,
    states: Float[Array, "b s d"],
    head: Float[Array, "v d"],
    batch: Batch,
    divergence: Divergence,
    z_loss: float,
    head_gradient: bool,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return (-log_prob plus the z-loss, divergence) of each target; 0 at positions whose loss_weight is 0.

    Both are computed from the same logits, a tile of tokens at a time.
    """
    how = Head(decoder.spec.vocabulary, gathered_entry("vocabulary"), decoder.spec.logit_cap)

    def kernel(hidden, head, targets, weight, tokens, log_probs):
        hidden, tokens, log_probs = (x.reshape(-1, x.shape[-1]) for x in (hidden, tokens, log_probs))  # (t, ...)
        keep = weight.reshape(-1) != 0
        losses = linear_divergence(
            *(hidden, head, targets.reshape(-1), tokens, log_probs, keep),
            *(how, divergence, z_loss, head_gradient),
        )
        return tuple(x.reshape(targets.shape) for x in losses)

    specs = (
        by_token(None),
        P(gathered_entry("vocabulary"), None),
        by_token(),
        by_token(),
        by_token(None),
        by_token(None),
    )
    columns = (batch[name] for name in ("targets", "loss_weight", "teacher_tokens", "teacher_log_probs"))
    mapped: Any = jax.shard_map(kernel, in_specs=specs, out_specs=(by_token(), by_token()))
    return mapped(states, head, *columns)


def linear_divergence(
    hidden: Float[Array, "t d"],
    head: Float[Array, "v d"],
    targets: Int[Array, " t"],
    tokens: Int[Array, "t k"],
    log_probs: Float[Array, "t k+1"],
    keep: Bool[Array, " t"],
    how: Head,
    divergence: Divergence,
    z_loss: float = 0.0,
    head_gradient: bool = True,
    tile: int | None = None,
) -> tuple[Float[Array, " t"], Float[Array, " t"]]:
    """Return (cross-entropy plus z_loss * logsumexp(logits)^2, divergence) of each token, in nats, float32.

    log_probs: log-probabilities of the teacher's `tokens`, then of any other token. keep: tokens that are not kept have
    losses of 0, and their logits are not computed. tile: the largest number of tokens whose logits are in memory
    together.
    """
    count = len(hidden)
    vocabulary_axes = frozenset(jax.tree.leaves(how.axis))
    axes = varying_axes(hidden, targets, tokens, log_probs, keep) | (varying_axes(head) - vocabulary_axes)
    head, hidden, targets, tokens, log_probs, keep = vary_over(axes, head, hidden, targets, tokens, log_probs, keep)
    tiles, size = _tiles(count, tile or _tokens_at_once(len(head)))
    # Kept tokens come first; slots after them are empty. Shapes do not depend on the number of kept tokens.
    kept = jnp.sum(keep)
    order = jnp.pad(jnp.argsort(~keep, stable=True), (0, tiles * size - count))
    slots = jnp.where(jnp.arange(tiles * size) < kept, order, count)

    def in_tiles(x: Array) -> Array:
        return x.at[slots].get(mode="fill", fill_value=0).reshape(tiles, size, *x.shape[1:])

    columns = tuple(map(in_tiles, (targets, tokens, log_probs)))
    losses: Any = _tile_losses(
        in_tiles(hidden), head, columns, -(-kept // size), (how, divergence, z_loss), head_gradient
    )
    in_order = [jnp.zeros_like(targets, jnp.float32).at[slots].set(x.reshape(-1), mode="drop") for x in losses]
    return in_order[0], in_order[1]


def likeliest(
    decoder: Decoder, states: Float[Array, "b s d"], dtype: jnp.dtype, count: int, vocabulary: int, temperature: float
) -> tuple[Int[Array, "b s k"], Float[Array, "b s k+1"]]:
    """Return the `count` likeliest next tokens, and the log-probabilities of these and, last, of any other token.

    Probabilities are the softmax of the logits divided by `temperature`, over the first `vocabulary` tokens.
    """
    how = Head(vocabulary, gathered_entry("vocabulary"), decoder.spec.logit_cap)

    def kernel(hidden, head):
        flat = hidden.reshape(-1, hidden.shape[-1])
        tiles, size = _tiles(len(flat), _tokens_at_once(len(head)))

        def of_tile(hidden: Array) -> tuple[Array, Array]:
            logits = _temper(_logits(hidden, head), temperature, how)
            best, tokens = jax.lax.top_k(logits, min(count, len(head)))  # (t, k), of this device's rows of the head
            tokens += _first(logits, how)  # numbers in the whole vocabulary
            if how.axis is not None:
                best, tokens = (jax.lax.all_gather(x, how.axis, axis=1, tiled=True) for x in (best, tokens))
                # Each device has the likeliest tokens of its part of the vocabulary: choose among all of these.
                _, chosen = jax.lax.top_k(best, count)
                tokens = jnp.take_along_axis(tokens, chosen, axis=1)
            return tokens, outcomes(logits, tokens, how)

        padded = jnp.pad(flat, ((0, tiles * size - len(flat)), (0, 0)))
        tiled = jax.lax.map(of_tile, padded.reshape(tiles, size, -1))
        return tuple(x.reshape(tiles * size, -1)[: len(flat)].reshape(*hidden.shape[:2], -1) for x in tiled)

    # check_vma=False: the result is all-gathered and so equal on all devices, which jax cannot infer.
    specs = by_token(None), P(gathered_entry("vocabulary"), None)
    mapped = jax.shard_map(kernel, in_specs=specs, out_specs=(by_token(None), by_token(None)), check_vma=False)
    return mapped(states, gather(decoder.head_weight.astype(dtype)))


def outcomes(logits: Float[Array, "t v"], tokens: Int[Array, "t k"], how: Head) -> Float[Array, "t k+1"]:
    """Return the log-probabilities of the given tokens and, last, of any other token.

    The last one is a logsumexp of the other tokens' logits: 1 minus the sum of probabilities would be rounding error.
    """
    total = _logsumexp(logits, how)
    size = logits.shape[1]
    place = tokens - _first(logits, how)
    is_local = (place >= 0) & (place < size)
    listed = _over(
        jax.lax.psum, jnp.where(is_local, jnp.take_along_axis(logits, jnp.clip(place, 0, size - 1), axis=1), 0), how
    )
    # Mask the given tokens. Indices of tokens on other devices are past the end, which mode="drop" ignores.
    rows = jnp.arange(len(logits))[:, None]
    unlisted = logits.at[rows, jnp.where(is_local, place, size)].set(LOWEST, mode="drop")
    rest = jnp.maximum(_logsumexp(unlisted, how) - total, NEVER)
    return jnp.concatenate([listed - total[:, None], rest[:, None]], axis=1)


def compute_divergence(
    teacher: Float[Array, "t n"], student: Float[Array, "t n"], divergence: Divergence
) -> Float[Array, " t"]:
    """Return the divergence of two distributions, given as log-probabilities."""
    match divergence.kind:
        case "forward_kl":
            return _kl(teacher, student)
        case "reverse_kl":
            return _kl(student, teacher)
        case "js":
            beta = divergence.beta
            mixture = jnp.logaddexp(teacher + np.log(beta), student + np.log1p(-beta))  # log m
            return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Float[Array, "t n"], q: Float[Array, "t n"]) -> Float[Array, " t"]:
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


# ---- tiles: a custom derivative recomputes their logits in the backward pass ----


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _tile_losses(hidden, head, columns, needed, what, head_gradient):
    """Return both losses of the first `needed` tiles, (tiles, size) each, float32; 0 in the others."""

    def tile(i, losses):
        of_tile = _losses(_logits(hidden[i], head), [column[i] for column in columns], *what)
        return tuple(all.at[i].set(loss) for all, loss in zip(losses, of_tile))

    zeros = jnp.zeros_like(columns[0], jnp.float32)
    return _over_tiles(needed, tile, (zeros, zeros), hidden)


def _over_tiles(needed, tile, start, hidden):
    # `needed` is a traced number, so that tiles without kept tokens are skipped at run time.
    with cost.iterations(len(hidden)):
        return jax.lax.fori_loop(0, needed, tile, start)


def _forward(hidden, head, columns, needed, what, head_gradient):
    return _tile_losses(hidden, head, columns, needed, what, head_gradient), (hidden, head, columns, needed)


def _backward(what, head_gradient, residuals, d_losses):
    hidden, head, columns, needed = residuals
    how = what[0]

    def tile(i, gradients):
        d_hidden, *d_head = gradients
        losses = partial(
            _losses, columns=[column[i] for column in columns], how=how, divergence=what[1], z_loss=what[2]
        )
        _, transposed = jax.vjp(losses, _logits(hidden[i], head))
        d_logits = transposed(tuple(d[i] for d in d_losses))[0].astype(head.dtype)
        # Each device has a part of the vocabulary: the gradient of hidden states is a sum over devices.
        partial_sum = jnp.dot(d_logits, head, preferred_element_type=jnp.float32)
        d_hidden = d_hidden.at[i].set(_over(jax.lax.psum, partial_sum, how).astype(hidden.dtype))
        # Summed over tiles in float32, whatever the head's dtype.
        return d_hidden, *(d + jnp.dot(d_logits.T, hidden[i], preferred_element_type=jnp.float32) for d in d_head)

    start = jnp.zeros_like(hidden), *([jnp.zeros_like(head, jnp.float32)] if head_gradient else [])
    d_hidden, *d_head = _over_tiles(needed, tile, start, hidden)
    return d_hidden, d_head[0].astype(head.dtype) if d_head else None, None, None


_tile_losses.defvjp(_forward, _backward)


def _losses(logits, columns, how, divergence, z_loss):
    """Return (cross-entropy with its z-loss, divergence) of a tile, from its logits before the cap."""
    targets, tokens, log_probs = columns
    plain = _temper(logits, 1.0, how)
    total = _logsumexp(plain, how)
    place = targets - _first(logits, how)
    is_local = (place >= 0) & (place < logits.shape[1])
    at_target = jnp.take_along_axis(plain, jnp.clip(place, 0, logits.shape[1] - 1)[:, None], axis=1)[:, 0]
    target_logit = _over(jax.lax.psum, jnp.where(is_local, at_target, 0), how)
    student = outcomes(_temper(logits, divergence.temperature, how), tokens, how)
    return total - target_logit + z_loss * total**2, compute_divergence(log_probs, student, divergence)


def _logits(hidden, head):
    """Return logits (t, v) in float32, before the cap."""
    return jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)


def _temper(logits, temperature, how):
    """Return capped logits divided by the temperature, with padding rows of the head masked."""
    capped = logits if how.soft_cap is None else how.soft_cap * jnp.tanh(logits / how.soft_cap)
    return jnp.where(_first(logits, how) + jnp.arange(logits.shape[1]) < how.vocabulary, capped / temperature, LOWEST)


def _first(logits, how):
    """Return the index in the vocabulary of this device's first logit."""
    return 0 if how.axis is None else jax.lax.axis_index(how.axis) * logits.shape[1]


def _logsumexp(logits, how):
    # The shift needs no gradient, and pmax has no derivative.
    top = _over(jax.lax.pmax, jax.lax.stop_gradient(jnp.max(logits, axis=-1)), how)
    return top + jnp.log(_over(jax.lax.psum, jnp.sum(jnp.exp(logits - top[:, None]), axis=-1), how))


def _over(reduce, x, how):
    return x if how.axis is None else reduce(x, how.axis)


def _tokens_at_once(vocabulary: int) -> int:
    """Return the number of tokens of a tile: 2^26 float32 logits, 256 MiB, of which several copies are in memory."""
    return max(512, 2**26 // vocabulary)


def _tiles(tokens: int, most: int) -> tuple[int, int]:
    """Return (number, size) of equal tiles for `tokens` tokens; the size is a multiple of 8."""
    tiles = max(1, -(-tokens // most))
    return tiles, -(-tokens // (8 * tiles)) * 8
