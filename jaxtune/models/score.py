"""What a decoder makes of a batch, for objectives: the log-probability of each target, or logits of labels."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.models.attend import attend_packed
from jaxtune.models.call import Call
from jaxtune.models.decoder import Decoder
from jaxtune.parallel.layout import P, by_token, gather, used
from pallas_kernels.linear_cross_entropy import linear_cross_entropy

Batch = dict[str, Array]


class Scores(NamedTuple):
    """Scores of a micro-batch.

    log_prob: of each target, in nats, float32; 0 where loss_weight is 0, whose logits are never computed. With a z-loss
    its penalty is taken off. loss: -log_prob * loss_weight. sums: what layers emit (`models.experts`). reference:
    log_prob without adapters, no gradient reaches it; None where the objective does not ask for it.
    """

    log_prob: Float[Array, "b s"]
    loss: Float[Array, "b s"]
    sums: Mapping[str, Array]
    reference: Float[Array, "b s"] | None = None


class LabelScores(NamedTuple):
    """Of a micro-batch: the float32 logits of each label after each token, and what layers emit, as in `Scores`."""

    logits: Float[Array, "b s labels"]
    sums: Mapping[str, Array]


def score(decoder: Decoder, batch: Batch, call: Call, *, head_gradient: bool = False, z_loss: float = 0.0) -> Scores:
    """Scores of a batch of packed rows, whose columns are (rows, positions).

    `head_gradient`: whether the head is trained; without, its gradient is zero and costs nothing. `z_loss`: the penalty
    z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311).
    """
    hidden, sums = _hidden(decoder, batch, call)
    head = gather(decoder.head_weight.astype(call.dtype))

    def kernel(hidden, head, targets, weight):
        weight = weight.reshape(-1)
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            targets.reshape(-1),
            weight != 0,
            vocabulary=decoder.spec.vocabulary,
            soft_cap=decoder.spec.logit_cap,
            z_loss=z_loss,
            head_gradient=head_gradient,
            vocabulary_axis=used("vocabulary"),
        )
        return -loss.reshape(targets.shape), (loss * weight).reshape(targets.shape)

    by_device = (by_token(None), P(used("vocabulary"), None), by_token(), by_token())
    mapped = jax.shard_map(kernel, in_specs=by_device, out_specs=by_token())
    return Scores(*mapped(hidden, head, batch["targets"], batch["loss_weight"]), sums)


def score_labels(decoder: Decoder, batch: Batch, call: Call) -> LabelScores:
    """Scores of a batch of packed rows by a classifier.

    After every token, though few are the last of a document: the head is small, and nothing is gathered.
    """
    hidden, sums = _hidden(decoder, batch, call)
    head = gather(decoder.head_weight.astype(call.dtype))
    logits = jnp.einsum("bsd,ld->bsl", hidden, head, preferred_element_type=jnp.float32, out_sharding=by_token(None))
    return LabelScores(logits, sums)


def _hidden(decoder: Decoder, batch: Batch, call: Call) -> tuple[Float[Array, "b s d"], Mapping[str, Array]]:
    inputs = decoder.inputs(batch["positions"], attend_packed(batch["key_start"], call), batch["segment_ids"] > 0)
    hidden, _, sums = decoder(batch["tokens"], inputs, call)
    return hidden, sums


def logits(decoder: Decoder, hidden: Float[Array, "*b d"], dtype: jnp.dtype) -> Float[Array, "*b v"]:
    """Float32 logits of hidden states, whole on every device: for a few tokens, in decoding and comparisons."""
    head = jax.reshard(decoder.head_weight.astype(dtype), P())
    found = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
    found, cap = found[..., : decoder.spec.vocabulary], decoder.spec.logit_cap
    return found if cap is None else cap * jnp.tanh(found / cap)
