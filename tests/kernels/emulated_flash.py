"""FlashAttention's arithmetic in plain jax, for tests of the calls of two packages with its kernels.

It follows their C++: packed rows are (tokens, heads, head_dim) with a log-sum-exp of (heads, tokens); tokens outside
documents are not written; hidden keys have weight 0, but are multiplied.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from kernels.attention_cases import Case


class Mask(NamedTuple):
    """Arguments of the kernels; a negative number of keys to the left or right means that there is no bound."""

    scale: float
    causal: bool
    left: int
    right: int
    length: int  # the longest document


def forward(q, k, v, offsets, mask: Mask):
    """Return the output and the log-sum-exp: (b, h, s), or of packed rows (h, t)."""
    logits, written = _logits(q, k, offsets, mask)
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("bnghst,btnd->bsnghd", weights / total[..., None], _by_row(v, offsets))
    out = out.reshape(_by_row(q, offsets).shape)
    lse = (top + jnp.log(total)).reshape(out.shape[0], -1, out.shape[1])
    out = jnp.where(written[None, :, None, None], out, jnp.nan)
    lse = jnp.where(written, lse, jnp.nan)
    if offsets.size:
        out, lse = out[0], lse[0]
    return out.astype(q.dtype), lse


def backward(d_out, q, k, v, out, lse, offsets, mask: Mask):
    """Return the gradients of q, k and v."""
    logits, written = _logits(q, k, offsets, mask)
    wide, shape = partial(_by_row, offsets=offsets), logits.shape
    grouped = lambda x: wide(x).reshape(shape[0], shape[4], shape[1], shape[2], 1, -1)  # noqa: E731
    weights = jnp.exp(logits - lse.reshape(*shape[:-1])[..., None])
    delta = jnp.sum(grouped(d_out) * grouped(out), axis=-1).transpose(0, 2, 3, 4, 1)
    d_logits = weights * (jnp.einsum("bsnghd,btnd->bnghst", grouped(d_out), wide(v)) - delta[..., None]) * mask.scale
    dq = jnp.einsum("bnghst,btnd->bsnghd", d_logits, wide(k)).reshape(wide(q).shape)
    dk = jnp.einsum("bnghst,bsnghd->btnd", d_logits, grouped(q))
    dv = jnp.einsum("bnghst,bsnghd->btnd", weights, grouped(d_out))
    made = [jnp.where(written[None, :, None, None], x, jnp.nan).astype(q.dtype) for x in (dq, dk, dv)]
    return [x[0] for x in made] if offsets.size else made


def _by_row(x, offsets):
    """Convert to float32, and packed rows to one row of all tokens."""
    return (x[None] if offsets.size else x).astype(jnp.float32)


def _logits(q, k, offsets, mask: Mask):
    """Return logits (b, n, g, 1, s, t), -inf if hidden, and the tokens of documents."""
    q, k = _by_row(q, offsets), _by_row(k, offsets)
    token = jnp.arange(q.shape[1])
    left = -1 if mask.left >= mask.length - 1 else mask.left
    right = 0 if mask.causal else -1 if mask.right >= mask.length - 1 else mask.right
    seen = jnp.ones((token.size, token.size), bool)
    if right >= 0:
        seen &= token <= token[:, None] + right
    if left >= 0:
        seen &= token >= token[:, None] - left
    written = jnp.ones(token.size, bool)
    if offsets.size:
        document = jnp.searchsorted(offsets, token, side="right")
        seen &= document == document[:, None]
        written = token < offsets[-1]
    group = q.shape[2] // k.shape[2]
    grouped = q.reshape(q.shape[0], q.shape[1], k.shape[2], group, 1, q.shape[3])
    logits = jnp.einsum("bsnghd,btnd->bnghst", grouped, k) * mask.scale
    return jnp.where(seen, logits, -jnp.inf), written


PACKED = ((17, 1, 1, -3, 30, 1, 9), ())  # with padding between documents, and a row that is all padding
CASES = {
    "causal": Case(),
    "not causal": Case(causal=False),
    "heads of their own": Case(heads=(4, 4)),
    "one key head": Case(heads=(4, 1)),
    "one token": Case(1),
    "window of 2": Case(window=2),
    "window": Case(window=20),
    "window of the row": Case(window=72),
    "head dim 128, off every block": Case(131, head_dim=128, dtype="bfloat16"),
    "packed": Case(documents=PACKED),
    "packed, full rows": Case(documents=((72,), (40, 32))),
    "packed, one key head": Case(documents=PACKED, heads=(4, 1)),
    "packed, window": Case(documents=PACKED, window=20),
    "packed, window of 2": Case(documents=PACKED, window=2, heads=(2, 2)),
    "packed, long": Case(300, documents=((140, 1, 100), (300,)), window=60),
    "packed, bfloat16": Case(documents=PACKED, dtype="bfloat16", head_dim=128),
    "packed, float16": Case(documents=PACKED, dtype="float16"),
    "all padding": Case(documents=((), ())),
}
