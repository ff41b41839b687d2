"""Token-tiled cross-entropy in plain XLA: the full vocabulary for a tile of tokens, then the next tile.

The forward pass already computes the gradients (as in Liger, Hsu et al. 2024) where the backward pass only scales them:
of the hidden states with a frozen head, and of both with a trained head if only the sum of the losses has a gradient.
Otherwise the head's gradient depends on the gradient of every loss, so that the backward pass recomputes a tile's
logits, and its softmax from the saved log-sum-exp.

Shapes: t tokens of a tile, d hidden size, v rows of the head.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import cost

LOWEST = np.finfo(np.float32).min  # not -inf, because -inf minus -inf is NaN


@dataclass(frozen=True)
class LossOptions:
    """The static arguments of `linear_cross_entropy`.

    Attributes:
        vocabulary: number of rows of the whole head that are not padding.
        axis: mesh axis, or axes, over which the head's rows are sharded.
        soft_cap: bound of the logits.
        z_loss: factor of the squared log-sum-exp.
        label_smoothing: fraction of the target's probability that is spread over the vocabulary.
        one_pass: the log-sum-exp reads the logits once.
    """

    vocabulary: int
    axis: str | tuple[str, ...] | None = None
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    one_pass: bool = False


def tokens_at_once(head: Array, head_gradient: bool, platform: str) -> int:
    """Return the number of tokens of a tile, for a head (v, d).

    On a CPU, 512 tokens were fastest for a frozen head (of 128 to 4096 tried; v from 512 to 32,000), and waste little
    if tokens are dropped. A trained head was faster with few tiles, of up to 64 MiB of float32 logits. A GPU needs a
    thousand tokens or more to fill its multiprocessors, so the logits may take 1 GiB. Each tile of a trained head also
    reads and writes the head's float32 gradient, (v, d): with d or more tokens, this moves no more bytes than the
    tile's logits.
    """
    vocabulary, width = head.shape
    if platform != "gpu":
        return max(512, 2**24 // vocabulary) if head_gradient else 512
    return max(1024, 2**28 // vocabulary, width if head_gradient else 0)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def tiled_loss(
    hidden: Float[Array, "tiles size d"],
    head: Float[Array, "v d"],
    targets: Int[Array, "tiles size"],
    needed: int | Int[Array, ""],
    loss: LossOptions,
    head_gradient: bool,
) -> Float[Array, "tiles size"]:
    """Return the losses of the first `needed` tiles in float32, and zeros for other tiles, which are not computed."""

    def tile(i, losses):
        logits = _logits(hidden[i], head)
        return losses.at[i].set(_losses(logits, targets[i], loss)[0])

    return _over_tiles(needed, tile, jnp.zeros_like(targets, jnp.float32), hidden)


def _over_tiles(needed, tile, start, hidden):
    """Run tile(i, carry) for the first `needed` tiles. That number is traced, so the cost is of all tiles."""
    with cost.iterations(len(hidden)):
        return jax.lax.fori_loop(0, needed, tile, start)


def _forward(hidden, head, targets, needed, loss, head_gradient):
    """Return losses and residuals.

    Residuals are the inputs and the log-sum-exps, or for a frozen head the finished gradient of `hidden`.
    """
    if not head_gradient:
        return _losses_and_gradients(hidden, head, targets, None, needed, loss)

    def tile(i, results):
        losses, lses = results
        tile_losses, lse = _losses(_logits(hidden[i], head), targets[i], loss)
        return losses.at[i].set(tile_losses), lses.at[i].set(lse)

    zeros = jnp.zeros_like(targets, jnp.float32)
    losses, lses = _over_tiles(needed, tile, (zeros, zeros), hidden)
    return losses, (hidden, head, targets, needed, lses)


def _losses_and_gradients(hidden, head, targets, weight, needed, loss):
    """Return the losses, and the gradients of their sum: of `hidden`, and with a weight also of `head` in float32.

    The sum weights the losses by `weight`; None: by 1.
    """

    def tile(i, results):
        losses, d_hidden, *d_head = results
        logits = _logits(hidden[i], head)
        tile_losses, lse = _losses(logits, targets[i], loss)
        d_logits = _logits_gradient(jax.lax.optimization_barrier(logits), lse, targets[i], loss)
        d_logits = (d_logits if weight is None else d_logits * weight[i, :, None]).astype(head.dtype)
        d_hidden = d_hidden.at[i].set(_hidden_gradient(d_logits, head, loss, hidden.dtype))
        return losses.at[i].set(tile_losses), d_hidden, *(d + _head_gradient(d_logits, hidden[i]) for d in d_head)

    start = [jnp.zeros_like(targets, jnp.float32), jnp.zeros_like(hidden)]
    if weight is not None:
        start.append(jnp.zeros_like(head, dtype=jnp.float32))
    losses, *gradients = _over_tiles(needed, tile, tuple(start), hidden)
    return losses, gradients


def _backward(loss, head_gradient, residuals, d_losses):
    if not head_gradient:  # the residual is the gradient of `hidden` for losses with a gradient of 1
        (d_hidden,) = residuals
        return (d_hidden * d_losses[..., None]).astype(d_hidden.dtype), None, None, None
    hidden, head, targets, needed, lses = residuals

    def tile(i, gradients):
        d_hidden, d_head = gradients
        d_logits = _logits_gradient(_logits(hidden[i], head), lses[i], targets[i], loss) * d_losses[i, :, None]
        d_logits = d_logits.astype(head.dtype)
        d_head += _head_gradient(d_logits, hidden[i])
        return d_hidden.at[i].set(_hidden_gradient(d_logits, head, loss, hidden.dtype)), d_head

    start = jnp.zeros_like(hidden), jnp.zeros_like(head, dtype=jnp.float32)
    d_hidden, d_head = _over_tiles(needed, tile, start, hidden)
    return d_hidden, d_head.astype(head.dtype), None, None


tiled_loss.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def tiled_sum(
    hidden: Float[Array, "tiles size d"],
    head: Float[Array, "v d"],
    targets: Int[Array, "tiles size"],
    weight: Float[Array, "tiles size"],
    needed: int | Int[Array, ""],
    loss: LossOptions,
) -> Float[Array, ""]:
    """Return the sum of weight * loss over the first `needed` tiles, for a trained head."""
    losses: Array = tiled_loss(hidden, head, targets, needed, loss, True)
    return jnp.sum(losses * weight)


def _sum_forward(hidden, head, targets, weight, needed, loss):
    losses, gradients = _losses_and_gradients(hidden, head, targets, weight, needed, loss)
    return jnp.sum(losses * weight), (*gradients, losses, head)


def _sum_backward(loss, residuals, d_sum):
    d_hidden, d_head, losses, head = residuals  # the head only for its dtype
    return (d_hidden * d_sum).astype(d_hidden.dtype), (d_head * d_sum).astype(head.dtype), None, losses * d_sum, None


tiled_sum.defvjp(_sum_forward, _sum_backward)


def _logits(hidden, head):
    """Return the logits before the soft cap, (t, v): the only array of this size that is written in float32."""
    return jnp.dot(hidden, head.T, preferred_element_type=jnp.float32)


def _cap(logits, loss):
    return logits if loss.soft_cap is None else loss.soft_cap * jnp.tanh(logits / loss.soft_cap)


def _columns(logits, loss):
    """Return the vocabulary index of each column of this device's logits."""
    size = logits.shape[1]
    return jnp.arange(size) + (0 if loss.axis is None else jax.lax.axis_index(loss.axis) * size)


def _losses(logits, targets, loss):
    """Return the loss (t,) and log-sum-exp (t,) of one tile."""
    columns = _columns(logits, loss)
    present = columns < loss.vocabulary
    capped = jnp.where(present, _cap(logits, loss), LOWEST)
    local_top, total = (_top_and_sum_in_one_pass if loss.one_pass else _top_and_sum)(capped)
    # With a sharded vocabulary, each device's sum is rescaled to the common maximum before the sums are added.
    top = _reduce_shards(jax.lax.pmax, local_top, loss)
    lse = top + jnp.log(_reduce_shards(jax.lax.psum, total * jnp.exp(local_top - top), loss))
    column = targets - columns[0]
    on_this_device = (column >= 0) & (column < columns.size)
    # Gather from `logits`, which are in memory, and cap afterwards: XLA would have to store `capped` to gather from it.
    at_target = jnp.take_along_axis(logits, jnp.clip(column, 0, columns.size - 1)[:, None], axis=-1)[:, 0]
    expected = _reduce_shards(jax.lax.psum, jnp.where(on_this_device, _cap(at_target, loss), 0), loss)
    # With a smoothed target, the expected logit mixes the target's logit and the mean over the vocabulary.
    if loss.label_smoothing:
        mean = _reduce_shards(jax.lax.psum, jnp.sum(jnp.where(present, capped, 0), axis=-1), loss) / loss.vocabulary
        expected += loss.label_smoothing * (mean - expected)
    losses = lse - expected + loss.z_loss * lse**2
    return jnp.where((targets >= 0) & (targets < loss.vocabulary), losses, jnp.nan), lse


def _top_and_sum(logits):
    """Return the largest logit (t,), and the sum of exp(logit - largest) (t,)."""
    top = jnp.max(logits, axis=-1)
    return top, jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)


def _top_and_sum_in_one_pass(logits):
    """Return the same as `_top_and_sum` from one read of the logits, for a GPU, where reads take the time.

    See Milakov & Gimelshein 2018, arXiv:1805.02867.
    """

    def merge(one, other):
        # Rescale the sum with the smaller maximum to the larger one.
        (top, total), (other_top, other_total) = one, other
        shrink = jnp.exp(-jnp.abs(top - other_top))
        higher = top > other_top
        return jnp.maximum(top, other_top), jnp.where(
            higher, total + other_total * shrink, total * shrink + other_total
        )

    return jax.lax.reduce((logits, jnp.ones_like(logits)), (LOWEST, np.float32(0)), merge, (1,))


def _logits_gradient(logits, lse, targets, loss):
    """Return the gradient of the losses with respect to the logits before the cap, (t, v), float32."""
    columns = _columns(logits, loss)
    capped = _cap(logits, loss)
    # The gradient of the log-sum-exp is the softmax; from it the smoothed target distribution is subtracted.
    gradient = jnp.exp(capped - lse[:, None]) * (1 + 2 * loss.z_loss * lse[:, None])
    gradient -= jnp.where(columns == targets[:, None], 1 - loss.label_smoothing, 0)
    gradient -= loss.label_smoothing / loss.vocabulary
    # The derivative of the cap is 1 - tanh².
    if loss.soft_cap is not None:
        gradient *= 1 - (capped / loss.soft_cap) ** 2
    return jnp.where(columns < loss.vocabulary, gradient, 0)


def _hidden_gradient(d_logits, head, loss, dtype):
    """Return the gradient of a tile's hidden states, (t, d), summed over the devices that share the vocabulary."""
    return _reduce_shards(jax.lax.psum, jnp.dot(d_logits, head, preferred_element_type=jnp.float32), loss).astype(dtype)


def _head_gradient(d_logits, hidden):
    """Return the gradient of the head from one tile, (v, d), float32."""
    return jax.lax.dot_general(d_logits, hidden, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _reduce_shards(reduce, x, loss):
    """Reduce over the devices that share the vocabulary, if it is sharded."""
    return x if loss.axis is None else reduce(x, loss.axis)
