"""Next-token cross-entropy over packed rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.models.attention import attend_packed
from jaxtune.models.decoder import Decoder, Remat
from jaxtune.models.dropout import Noise
from jaxtune.parallel.layout import ACTIVATIONS, RULES, TOKENS, P, gather
from pallas_kernels.linear_cross_entropy import linear_cross_entropy

Batch = dict[str, Array]


def token_losses(
    decoder: Decoder,
    batch: Batch,
    *,
    dtype: jnp.dtype,
    noise: Noise | None,
    remat: Remat,
    head_gradient: bool,
    z_loss: float = 0.0,
) -> Float[Array, "b s"]:
    """(-log p(target) + z_loss * logsumexp(logits)^2) * loss_weight of every token, in float32.

    Batch fields are (rows, positions). Tokens without weight cost no logits.
    """
    hidden, _ = decoder(
        batch["tokens"], batch["positions"], attend_packed(batch["key_start"]), dtype=dtype, noise=noise, remat=remat
    )
    head = gather(decoder.head_weight.astype(dtype))

    def kernel(hidden, head, targets, weight):
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            targets.reshape(-1),
            weight.reshape(-1),
            vocabulary=decoder.spec.vocabulary,
            z_loss=z_loss,
            head_gradient=head_gradient,
            vocabulary_axis=RULES.vocabulary,
        )
        return loss.reshape(targets.shape)

    by_device = (ACTIVATIONS, P(RULES.vocabulary, None), TOKENS, TOKENS)
    mapped = jax.shard_map(kernel, in_specs=by_device, out_specs=TOKENS)
    return mapped(hidden, head, batch["targets"], batch["loss_weight"])


def cross_entropy(decoder: Decoder, batch: Batch, **options: Any) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of weighted token losses, and the number of tokens with a weight; options as those of `token_losses`."""
    total = jnp.sum(token_losses(decoder, batch, **options))
    return total, jnp.sum(batch["loss_weight"] > 0, dtype=jnp.int32)
