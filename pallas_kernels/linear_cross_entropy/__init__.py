"""Cross-entropy of a linear head that never stores the logits of the whole batch: the public op."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import gpus
from pallas_kernels.linear_cross_entropy import xla
from pallas_kernels.linear_cross_entropy.xla import LossOptions
from pallas_kernels.manual_axes import vary_over, varying_axes

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Float[Array, "t d"],
    head: Float[Array, "v d"],
    targets: Int[Array, " t"],
    weight: Float[Array, " t"] | Bool[Array, " t"] | None = None,
    *,
    vocabulary: int,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    head_gradient: bool = True,
    summed: bool = False,
    vocabulary_axis: str | tuple[str, ...] | None = None,
    tile: int | None = None,
) -> Float[Array, " t"] | Float[Array, ""]:
    """Return the loss of every token in nats, float32: weight * (-log softmax(hidden head^T)[target] + ...).

    Shapes: t tokens, d hidden size, v rows of the head. Products are computed in the inputs' dtype and accumulated in
    float32. Rows of the head at `vocabulary` and beyond are padding (finite) and are ignored. A target outside the
    vocabulary makes its loss NaN, unless its weight is 0.

    `weight`: numbers or a mask. Tokens of weight 0 are dropped before the head: no logits are computed for them (except
    to fill the last tile), their loss and gradients are 0, and the values of their hidden states and targets (NaN,
    -100) have no effect. The gradient of a weight is its token's loss, and 0 for a dropped token.
    `soft_cap`: logits become soft_cap * tanh(logits / soft_cap) (Gemma 2, arXiv:2408.00118).
    `z_loss`: adds z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311).
    `label_smoothing`: fraction of the target's probability that is spread uniformly over the vocabulary, as in
    torch.nn.functional.cross_entropy.
    `head_gradient=False`: the head gets a zero gradient that costs nothing. The forward pass then computes the gradient
    of the hidden states, and the backward pass only scales it.
    `summed`: return the sum of the losses, a scalar. A trained head then costs three products of its size instead of
    four: the forward pass computes both gradients, and the backward pass only scales them. Not in float16, whose
    gradients have to be scaled before they are rounded.
    `vocabulary_axis`: inside a shard_map, the mesh axis, or axes, over which the head's rows are sharded; targets stay
    global, and every device along that axis must have the same tokens.
    `tile`: the largest number of tokens whose logits are in memory at a time; rounded up to a multiple of 8 for the
    matrix units (default: from the sizes and the platform).

    Raises ValueError if the tokens are known to differ over `vocabulary_axis`: devices that drop different tokens
    would wait for each other forever.
    """
    tokens = len(hidden)
    if not tokens:
        return jnp.zeros(() if summed else 0, jnp.float32)
    by_token = varying_axes(hidden, targets, weight)
    vocabulary_axes = frozenset(jax.tree.leaves(vocabulary_axis))
    if vocabulary_axes & by_token:
        raise ValueError(f"tokens must be the same on all devices of the vocabulary's axis {vocabulary_axis!r}")
    axes = by_token | (varying_axes(head) - vocabulary_axes)
    head, hidden, targets, weight = vary_over(axes, head, hidden, targets, weight)
    platform = gpus.current_device().platform
    loss = LossOptions(vocabulary, vocabulary_axis, soft_cap, z_loss, label_smoothing, one_pass=platform == "gpu")
    tiles = -(-tokens // (tile or xla.tokens_at_once(head, head_gradient, platform)))
    # Tiles have equal size and the last one is padded, because the largest divisor of the token count may be 1.
    size = -(-tokens // (8 * tiles)) * 8
    rows, filled = _rows_of_slots(weight, tokens, tiles * size)

    def in_tiles(x: Array) -> Array:
        taken = x.at[rows].get(mode="fill", fill_value=0, unique_indices=True)
        return taken.reshape(tiles, size, *x.shape[1:])

    needed = -(-filled // size)
    if summed and head_gradient and head.dtype != jnp.float16:
        weight = jnp.ones_like(targets, jnp.float32) if weight is None else weight.astype(jnp.float32)
        return xla.tiled_sum(in_tiles(hidden), head, in_tiles(targets), in_tiles(weight), needed, loss)
    in_slots: Array = xla.tiled_loss(in_tiles(hidden), head, in_tiles(targets), needed, loss, head_gradient)
    losses = jnp.zeros_like(targets, jnp.float32).at[rows].set(in_slots.reshape(-1), mode="drop", unique_indices=True)
    # Losses of dropped tokens are 0 already, so a boolean mask need not be multiplied.
    losses = losses if weight is None or weight.dtype == bool else losses * weight.astype(jnp.float32)
    return jnp.sum(losses) if summed else losses


def _rows_of_slots(weight: Array | None, tokens: int, slots: int) -> tuple[Int[Array, " slots"], int | Array]:
    """Return the token of each slot of the tiles, tokens with weight first, and the number of tokens with weight.

    Each empty slot has its own row out of range, because gathers and scatters assume unique rows.
    """
    slot = jnp.arange(slots)
    if weight is None:
        return slot, tokens
    keep = weight != 0
    count = jnp.sum(keep)
    order = jnp.pad(jnp.argsort(~keep, stable=True), (0, slots - tokens))
    return jnp.where(slot < count, order, tokens + slot), count
