"""Tokens in the rows of a grouped product, a row for each expert that a token goes to, and back; on one device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.manual_axes import vary_over, varying_axes


@jax.custom_vjp
def to_rows(x: Float[Array, "b s d"], token_of: Int[Array, " m"], row_of: Int[Array, " a"]) -> Float[Array, "m d"]:
    """The token of each row, zeros where there is none.

    token_of: of each row, a number of tokens or more where there is none. row_of: of each item, a number of rows or
    more where it has none; those of a token follow one another.
    """
    return jnp.take(x.reshape(-1, x.shape[-1]), token_of, axis=0, mode="fill", fill_value=0)


def _to_rows_backward(residuals: tuple, dy: Array) -> tuple[Array, None, None]:
    # A sum over the rows of each token, in their order: the transpose of a gather would add in any order.
    shape, row_of = residuals
    return _rows_of_tokens(dy, row_of, shape).sum(2, dtype=jnp.float32).astype(dy.dtype), None, None


to_rows.defvjp(lambda x, token_of, row_of: (to_rows(x, token_of, row_of), (x.shape[:2], row_of)), _to_rows_backward)


def from_rows(
    y: Float[Array, "m d"], item_of: Int[Array, " m"], row_of: Int[Array, " a"], weights: Float[Array, "b s k"]
) -> Float[Array, "b s d"]:
    """The weighted sum over the rows of each token, float32."""
    return _from_rows(*vary_over(varying_axes(y), y, item_of, row_of, weights))


@jax.custom_vjp
def _from_rows(y: Array, item_of: Array, row_of: Array, weights: Array) -> Array:
    # Not an einsum, nor below: XLA makes one loop of the gather, the product and the sum, but not of a batched product.
    return (_rows_of_tokens(y, row_of, weights.shape[:2]) * weights[..., None]).sum(2)


def _from_rows_backward(residuals: tuple, d_out: Array) -> tuple[Array, None, None, Array]:
    y, item_of, row_of, weights = residuals
    d_weights = (_rows_of_tokens(y, row_of, weights.shape[:2]) * d_out[:, :, None]).sum(-1)
    of_rows = jnp.take(weights.reshape(-1), item_of, mode="fill", fill_value=0)[:, None]
    d_rows = to_rows(d_out, item_of // weights.shape[2], row_of) * of_rows
    return d_rows.astype(y.dtype), None, None, d_weights


_from_rows.defvjp(lambda *arguments: (_from_rows(*arguments), arguments), _from_rows_backward)


def _rows_of_tokens(rows: Float[Array, "m d"], row_of: Int[Array, " a"], tokens: tuple[int, ...]) -> Array:
    """The rows of each token (b, s, k, d), float32."""
    found = jnp.take(rows, row_of, axis=0, mode="fill", fill_value=0)
    return found.reshape(*tokens, -1, rows.shape[1]).astype(jnp.float32)
