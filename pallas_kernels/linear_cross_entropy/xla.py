"""Token-tiled cross-entropy in plain XLA: the full vocabulary for a tile of tokens, then the next tile.

With a trained head the backward pass recomputes a tile's logits from the saved log-sum-exp. With a frozen head the
forward pass already leaves the gradient of the hidden states (as Liger does, Hsu et al. 2024), so no tile is
computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Float32 logits of one tile: 64 MiB, or this many tokens where the vocabulary is so large that the tile would be thin.
TILE_ELEMENTS, FEWEST_TOKENS = 2**24, 512


def linear_cross_entropy(
    hidden: Float[Array, "t d"],
    head: Float[Array, "v d"],
    targets: Int[Array, " t"],
    *,
    vocabulary: int,
    head_gradient: bool = True,
    vocabulary_axis: str | None = None,
    tile: int | None = None,
) -> Float[Array, " t"]:
    """-log softmax(hidden head^T)[target] per token, in float32.

    Rows of the head at `vocabulary` and beyond are padding and take no part. `head_gradient=False` gives the head a
    zero gradient that costs nothing. Inside a shard_map, `vocabulary_axis` names the mesh axis over which the head's
    rows are sharded; targets stay global. `tile` is the number of tokens at once (default: from the sizes).
    """
    most = tile or max(FEWEST_TOKENS, TILE_ELEMENTS // head.shape[0])
    tiles = -(-hidden.shape[0] // most)
    size = -(-hidden.shape[0] // tiles)
    pad = tiles * size - hidden.shape[0]
    hidden_tiles = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, size, hidden.shape[1])
    target_tiles = jnp.pad(targets, (0, pad)).reshape(tiles, size)
    loss: Array = _loss(hidden_tiles, head, target_tiles, vocabulary, head_gradient, vocabulary_axis)
    return loss.reshape(-1)[: hidden.shape[0]]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _loss(hidden, head, targets, vocabulary, head_gradient, axis):
    return jax.lax.map(lambda tile: _tile(head, vocabulary, axis, *tile)[0], (hidden, targets))


def _tile(head, vocabulary, axis, hidden, targets):
    """Loss (t,), log-sum-exp (t,), logits (t, v) and the targets' column mask (t, v) of one tile."""
    logits = jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)
    first = 0 if axis is None else jax.lax.axis_index(axis) * head.shape[0]
    column = first + jnp.arange(head.shape[0])
    logits = jnp.where(column < vocabulary, logits, -jnp.inf)
    is_target = column == targets[:, None]
    top = _over(jax.lax.pmax, jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axis)
    lse = top + jnp.log(_over(jax.lax.psum, jnp.sum(jnp.exp(logits - top[:, None]), axis=-1), axis))
    target_logit = _over(jax.lax.psum, jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1), axis)
    return lse - target_logit, lse, logits, is_target


def _over(reduce, x, axis):
    return x if axis is None else reduce(x, axis)


def _logits_gradient(logits, lse, is_target, dtype):
    return (jnp.exp(logits - lse[:, None]) - is_target).astype(dtype)


def _hidden_gradient(d_logits, head, axis):
    return _over(jax.lax.psum, jnp.dot(d_logits, head, preferred_element_type=jnp.float32), axis)


def _forward(hidden, head, targets, vocabulary, head_gradient, axis):
    def trained(tile):
        loss, lse, _, _ = _tile(head, vocabulary, axis, *tile)
        return loss, lse

    def frozen(tile):
        loss, lse, logits, is_target = _tile(head, vocabulary, axis, *tile)
        return loss, _hidden_gradient(_logits_gradient(logits, lse, is_target, head.dtype), head, axis).astype(
            hidden.dtype
        )

    if head_gradient:
        loss, lse = jax.lax.map(trained, (hidden, targets))
        return loss, (hidden, head, targets, lse)
    loss, d_hidden = jax.lax.map(frozen, (hidden, targets))
    return loss, (d_hidden,)


def _backward(vocabulary, head_gradient, axis, residuals, d_loss):
    if not head_gradient:
        (d_hidden,) = residuals
        return (d_hidden * d_loss[..., None]).astype(d_hidden.dtype), None, None
    hidden, head, targets, lse = residuals

    def tile(d_head, inputs):
        hidden, targets, lse, d_loss = inputs
        _, _, logits, is_target = _tile(head, vocabulary, axis, hidden, targets)
        d_logits = _logits_gradient(logits, lse, is_target, jnp.float32) * d_loss[:, None]
        d_logits = d_logits.astype(head.dtype)
        d_head += jax.lax.dot_general(d_logits, hidden, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return d_head, _hidden_gradient(d_logits, head, axis).astype(hidden.dtype)

    start = jnp.zeros_like(head, dtype=jnp.float32)
    d_head, d_hidden = jax.lax.scan(tile, start, (hidden, targets, lse, d_loss))
    return d_hidden, d_head.astype(head.dtype), None


_loss.defvjp(_forward, _backward)
