"""What a decoder makes of a batch, for objectives: the log-probability of each target, or logits of labels."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxtune.errors import UserError
from jaxtune.models import pipeline
from jaxtune.models.decoder import Decoder
from jaxtune.models.divergence import Divergence, likeliest, scored_beside
from jaxtune.models.forward_options import Call
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.pipeline import Batch
from jaxtune.parallel.layout import P, by_token, gather, used
from pallas_kernels.linear_cross_entropy import linear_cross_entropy


class Scores(NamedTuple):
    """Scores of a micro-batch.

    log_prob: of each target, in nats, float32; 0 where loss_weight is 0, whose logits are never computed. With a z-loss
    its penalty is taken off. loss: -log_prob * loss_weight. sums: what layers emit (`models.layers.experts`).
    reference: log_prob without adapters, no gradient reaches it; None where the objective does not ask for it.
    divergence: from a teacher, as log_prob float32 in nats and 0 where loss_weight is 0; None where it is not asked
    for. hits: whether the target is the likeliest token, and has a loss_weight; None where it is not asked for.
    """

    log_prob: Float[Array, "b s"]
    loss: Float[Array, "b s"]
    sums: Mapping[str, Array]
    reference: Float[Array, "b s"] | None = None
    divergence: Float[Array, "b s"] | None = None
    hits: Bool[Array, "b s"] | None = None


class LabelScores(NamedTuple):
    """Of a micro-batch: the float32 logits of each label after each token, and what layers emit, as in `Scores`."""

    logits: Float[Array, "b s labels"]
    sums: Mapping[str, Array]


Hidden = tuple[Float[Array, "b s d"], Mapping[str, Array]]  # hidden states for the head, and what layers emit


def score(
    decoder: Decoder,
    batch: Batch,
    call: Call,
    hidden: Hidden | None = None,
    *,
    head_gradient: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    divergence: Divergence | None = None,
    temperature: float = 1.0,
    hits: bool = False,
) -> Scores:
    """Scores of a batch of packed rows, whose columns are (rows, positions); hidden: its `hidden_states`, if known.

    `head_gradient`: whether the head is trained; without, its gradient is zero and costs nothing. `z_loss`: the penalty
    z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311). `label_smoothing`: share of the target that is divided over
    the vocabulary in `loss` (arXiv:1512.00567), as label_smoothing of torch's cross_entropy. `divergence`: from the
    teacher of the batch's columns teacher_tokens and teacher_log_probs. `temperature`: divides all logits. `hits`: they
    are asked for. Raises UserError for label_smoothing or a temperature where logits are capped.
    """
    states, sums = hidden_states(decoder, batch, call) if hidden is None else hidden
    if temperature != 1:
        if decoder.spec.logit_cap is not None:
            raise UserError(f"rollout.temperature: the logits of a {decoder.spec.family} are capped; leave it at 1")
        states /= jnp.asarray(temperature, states.dtype)
    head = gather(decoder.head_weight.astype(call.dtype))
    apart = right = None
    if hits:  # the head is multiplied once more, which an evaluation can afford
        tokens, _ = likeliest(decoder, states, call.dtype, 1, decoder.spec.vocabulary, temperature)
        right = (tokens[..., 0] == batch["targets"]) & (batch["loss_weight"] != 0)
    if divergence is None:
        log_prob, loss = _cross_entropy(decoder, states, head, batch, z_loss, head_gradient)
    else:
        found, apart = scored_beside(decoder, states, head, batch, divergence, z_loss, head_gradient)
        log_prob, loss = -found, found * batch["loss_weight"]
    if label_smoothing:
        head = head if head_gradient else jax.lax.stop_gradient(head)
        excess = _above_mean(decoder, states, head, batch["targets"])
        loss += label_smoothing * excess * batch["loss_weight"]
    return Scores(log_prob, loss, sums, divergence=apart, hits=right)


def _cross_entropy(
    decoder: Decoder,
    states: Float[Array, "b s d"],
    head: Float[Array, "v d"],
    batch: Batch,
    z_loss: float,
    head_gradient: bool,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """(log_prob, loss) of each target, without label smoothing."""

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
    return mapped(states, head, batch["targets"], batch["loss_weight"])


def _above_mean(
    decoder: Decoder, states: Float[Array, "b s d"], head: Float[Array, "v d"], targets: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """By how much the logit of each target exceeds the mean over the vocabulary, float32: no other logit is needed."""
    if decoder.spec.logit_cap is not None:
        raise UserError(f"train.label_smoothing: the logits of a {decoder.spec.family} are capped; leave it out")
    head, count = jax.reshard(head, P(None, None)), decoder.spec.vocabulary
    real = jnp.arange(len(head)) < count
    mean = jnp.sum(jnp.where(real[:, None], head, 0), 0, dtype=jnp.float32) / count
    wide = states.astype(jnp.float32)
    own = jnp.sum(wide * lookup(head, targets).astype(jnp.float32), axis=-1)
    return own - jnp.sum(wide * mean, axis=-1)


def score_labels(decoder: Decoder, batch: Batch, call: Call, hidden: Hidden | None = None) -> LabelScores:
    """Scores of a batch of packed rows by a classifier; hidden: its `hidden_states`, if known.

    After every token, though few are the last of a document: the head is small, and nothing is gathered.
    """
    states, sums = hidden_states(decoder, batch, call) if hidden is None else hidden
    head = gather(decoder.head_weight.astype(call.dtype))
    logits = jnp.einsum("bsd,ld->bsl", states, head, preferred_element_type=jnp.float32, out_sharding=by_token(None))
    return LabelScores(logits, sums)


def hidden_states(decoder: Decoder, batch: Batch, call: Call) -> Hidden:
    """What the head multiplies, of a batch of packed rows; through a pipeline, one stage after another."""
    if decoder.pipeline is None:
        hidden, _, sums = decoder(batch["tokens"], pipeline.seen(decoder.spec, batch, call), call)
        return hidden, sums
    x, before = pipeline.enter(decoder, batch, call)
    x, inside = pipeline.in_turn(decoder, x, batch, call)
    return pipeline.leave(decoder, x, [before, inside], batch, call)


def logits(decoder: Decoder, hidden: Float[Array, "*b d"], dtype: jnp.dtype) -> Float[Array, "*b v"]:
    """Float32 logits of hidden states, whole on the devices that have these: for a few tokens, as in decoding."""
    rows = jax.typeof(hidden).sharding.spec[:-1]
    head = gather(decoder.head_weight.astype(dtype))
    by_row = P(*rows, used("vocabulary"))
    found = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32, out_sharding=by_row)
    found, cap = jax.reshard(found, P(*rows, None))[..., : decoder.spec.vocabulary], decoder.spec.logit_cap
    return found if cap is None else cap * jnp.tanh(found / cap)
