"""Tokens to the rows of a grouped product, a row for each chosen expert of a token, and back; on one device.

Shape letters: b rows of the batch, s positions in a row, d features, k chosen experts of a token, a items (pairs of a
token and one of its experts, b * s * k), m rows of the grouped product.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.manual_axes import vary_over, varying_axes


@jax.custom_vjp
def to_rows(x: Float[Array, "b s d"], token_of: Int[Array, " m"], row_of: Int[Array, " a"]) -> Float[Array, "m d"]:
    """Return the token of each row, and zeros in rows without a token.

    token_of: the token of each row; an index past the last token if the row has none. row_of: the row of each item; an
    index past the last row if it has none. The items of a token are consecutive.
    """
    return jnp.take(x.reshape(-1, x.shape[-1]), token_of, axis=0, mode="fill", fill_value=0)


def _to_rows_backward(residuals: tuple, dy: Array) -> tuple[Array, None, None]:
    # Gathers the rows of each token and sums them in a fixed order. The transpose of the forward gather would be a
    # scatter-add, which adds in any order.
    shape, row_of = residuals
    return _rows_of_tokens(dy, row_of, shape).sum(2, dtype=jnp.float32).astype(dy.dtype), None, None


to_rows.defvjp(lambda x, token_of, row_of: (to_rows(x, token_of, row_of), (x.shape[:2], row_of)), _to_rows_backward)


def from_rows(
    y: Float[Array, "m d"], item_of: Int[Array, " m"], row_of: Int[Array, " a"], weights: Float[Array, "b s k"]
) -> Float[Array, "b s d"]:
    """Return the weighted sum over the rows of each token, float32."""
    return _from_rows(*vary_over(varying_axes(y), y, item_of, row_of, weights))


@jax.custom_vjp
def _from_rows(y: Array, item_of: Array, row_of: Array, weights: Array) -> Array:
    # Not an einsum (nor in the backward pass): XLA fuses the gather, the product and the sum into one loop, but it does
    # not fuse a batched matrix product.
    return (_rows_of_tokens(y, row_of, weights.shape[:2]) * weights[..., None]).sum(2)


def _from_rows_backward(residuals: tuple, d_out: Array) -> tuple[Array, None, None, Array]:
    y, item_of, row_of, weights = residuals
    d_weights = (_rows_of_tokens(y, row_of, weights.shape[:2]) * d_out[:, :, None]).sum(-1)
    # Rows without an item get weight 0, and with it a gradient of 0.
    of_rows = jnp.take(weights.reshape(-1), item_of, mode="fill", fill_value=0)[:, None]
    d_rows = to_rows(d_out, item_of // weights.shape[2], row_of) * of_rows
    return d_rows.astype(y.dtype), None, None, d_weights


_from_rows.defvjp(lambda *arguments: (_from_rows(*arguments), arguments), _from_rows_backward)


def _rows_of_tokens(rows: Float[Array, "m d"], row_of: Int[Array, " a"], tokens: tuple[int, ...]) -> Array:
    """Return the rows of each token (b, s, k, d), float32."""
    by_item = jnp.take(rows, row_of, axis=0, mode="fill", fill_value=0)
    return by_item.reshape(*tokens, -1, rows.shape[1]).astype(jnp.float32)
