"""Scores of a batch, for objectives: the log-probability of each target, or the logits of labels.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, v rows of the head (the
padded vocabulary).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxtune.errors import UserError
from jaxtune.models import pipeline
from jaxtune.models.decoder import Decoder, routed_by_stack
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.divergence import Divergence, likeliest, score_with_divergence
from jaxtune.models.layers.linear import scale
from jaxtune.models.layers.lookup import lookup
from jaxtune.models.pipeline import Batch
from jaxtune.models.stack import join_sums
from jaxtune.parallel.layout import P, by_token, gather, gathered_entry
from pallas_kernels.linear_cross_entropy import linear_cross_entropy


class FurtherScores(NamedTuple):
    """Scores of a micro-batch by a multi-token-prediction module.

    Attributes:
        loss: cross-entropy of each target in nats * its weight, float32.
        hits: whether the target is the likeliest token and has a weight.
    """

    loss: Float[Array, "b s"]
    hits: Bool[Array, "b s"]


class Scores(NamedTuple):
    """Scores of a micro-batch. Optional fields are None unless the objective requests them.

    Attributes:
        log_prob: log-probability of each target in nats, float32, less the penalty of a z-loss. 0 at positions whose
            loss_weight is 0: their logits are never computed.
        loss: -log_prob * loss_weight, plus label smoothing.
        sums: sums that the layers emit (`models.mixture.experts`).
        reference: log_prob without adapters; no gradient reaches it.
        divergence: divergence from a teacher in nats, float32; 0 at positions whose loss_weight is 0.
        hits: whether the target is the likeliest token and has a loss_weight.
        further: scores of each multi-token-prediction module, if the objective requests them.
    """

    log_prob: Float[Array, "b s"]
    loss: Float[Array, "b s"]
    sums: Mapping[str, Array]
    reference: Float[Array, "b s"] | None = None
    divergence: Float[Array, "b s"] | None = None
    hits: Bool[Array, "b s"] | None = None
    further: tuple[FurtherScores, ...] = ()


class TotalScores(NamedTuple):
    """Scores of a micro-batch for an objective that reads the losses only as their sum.

    Attributes:
        total: sums of `Scores.loss`, one for the rows of each device along the axes of rows.
        sums, hits, further: as in `Scores`.
    """

    total: Float[Array, " groups"]
    sums: Mapping[str, Array]
    hits: Bool[Array, "b s"] | None = None
    further: tuple[FurtherScores, ...] = ()


class LabelScores(NamedTuple):
    """Scores of a micro-batch by a classifier, or of some tokens by a language model.

    Attributes:
        logits: logits of each label or token after each token, float32.
        sums: sums that the layers emit, as in `Scores`.
    """

    logits: Float[Array, "b s labels"]
    sums: Mapping[str, Array]


AnyScores = Scores | TotalScores | LabelScores


class ScoreOptions(NamedTuple):
    """The scores that an objective needs.

    Attributes:
        z_loss: weight of the penalty z_loss * logsumexp(logits)^2 (PaLM, arXiv:2204.02311).
        label_smoothing: share of the target that `Scores.loss` spreads over the vocabulary (arXiv:1512.00567), as in
            torch's cross_entropy.
        divergence: the divergence from a teacher to compute, from the columns teacher_tokens and teacher_log_probs.
        temperature: divides all logits.
        hits: whether to compute `Scores.hits`.
        further: whether to compute `Scores.further`, from the columns of `columns.further_columns`.
        replay_routing: whether tokens go to the experts in the column routed_experts; False: to those that the router
            chooses.
        next_token: False: log_prob and loss are 0, and cost nothing.
        total: the objective reads `TotalScores`: a trained head costs 3 products of its size instead of 4.
        tokens: the objective reads `LabelScores` of these tokens instead; (): it does not.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    divergence: Divergence | None = None
    temperature: float = 1.0
    hits: bool = False
    further: bool = False
    replay_routing: bool = False
    next_token: bool = True
    total: bool = False
    tokens: tuple[int, ...] = ()


Hidden = tuple[Float[Array, "b s d"], Mapping[str, Array]]  # hidden states for the head, and the sums that layers emit


def score(
    decoder: Decoder,
    batch: Batch,
    call: ForwardOptions,
    hidden: Hidden | None = None,
    options: ScoreOptions = ScoreOptions(),
    *,
    head_gradient: bool = False,
) -> Scores:
    """Return the scores of a batch of packed rows, whose columns are (rows, positions).

    Args:
        decoder, batch, call: the model, the batch, and how the forward pass is computed.
        hidden: `hidden_states` of the batch, if already computed.
        options: the scores that are needed.
        head_gradient: whether the head is trained; if not, its gradient is zero and costs nothing.

    Raises:
        UserError: for label_smoothing or a temperature if the model caps its logits.
    """
    states, sums = hidden_states(decoder, batch, call, options.replay_routing) if hidden is None else hidden
    further = ()
    if options.further:
        further, sums = _score_further(decoder, batch, call, states, sums, head_gradient)
    with jax.named_scope("head"):
        if options.temperature != 1:
            if decoder.spec.logit_cap is not None:
                raise UserError(f"rollout.temperature: the logits of a {decoder.spec.family} are capped; leave it at 1")
            # Logits are linear in the states, so dividing the states divides the logits.
            states = scale(states, 1 / options.temperature)
        head = gather(decoder.head_weight.astype(call.dtype))
        from_teacher = right = None
        if options.hits:  # a second product with the head, which an evaluation can afford
            tokens, _ = likeliest(decoder, states, call.dtype, 1, decoder.spec.vocabulary, options.temperature)
            right = (tokens[..., 0] == batch["targets"]) & (batch["loss_weight"] != 0)
        if not options.next_token:
            log_prob = loss = jnp.zeros_like(batch["loss_weight"])
        elif options.divergence is None:
            log_prob, loss = _cross_entropy(decoder, states, head, batch, options.z_loss, head_gradient)
        else:
            how = options.divergence, options.z_loss, head_gradient
            nll, from_teacher = score_with_divergence(decoder, states, head, batch, *how)
            log_prob, loss = -nll, nll * batch["loss_weight"]
        if options.label_smoothing:
            head = head if head_gradient else jax.lax.stop_gradient(head)
            excess = _above_mean(decoder, states, head, batch["targets"])
            loss += options.label_smoothing * excess * batch["loss_weight"]
    return Scores(log_prob, loss, sums, divergence=from_teacher, hits=right, further=further)


def score_total(
    decoder: Decoder,
    batch: Batch,
    call: ForwardOptions,
    hidden: Hidden | None = None,
    options: ScoreOptions = ScoreOptions(),
    *,
    head_gradient: bool = False,
) -> TotalScores:
    """Return the sum of the losses of a batch, whose gradient costs less than the gradients of single tokens' losses.

    Arguments are as in `score`; options without a divergence or a temperature.
    """
    hidden = hidden_states(decoder, batch, call, options.replay_routing) if hidden is None else hidden
    of_others = options._replace(next_token=False, label_smoothing=0.0)
    others = score(decoder, batch, call, hidden, of_others, head_gradient=head_gradient)
    total = jnp.zeros((1, 1))
    if options.next_token:
        with jax.named_scope("head"):
            total = _compute_loss(
                *(decoder, hidden[0], gather(decoder.head_weight.astype(call.dtype))),
                *(batch["targets"], batch["loss_weight"]),
                z_loss=options.z_loss,
                label_smoothing=options.label_smoothing,
                head_gradient=head_gradient,
                summed=True,
            )
    # Without the axis of positions: transposed, an axis of size 1 would lose the mesh axes that divide it.
    return TotalScores(jnp.sum(total, axis=1), others.sums, others.hits, others.further)


def _score_further(
    decoder: Decoder,
    batch: Batch,
    call: ForwardOptions,
    states: Float[Array, "b s d"],
    sums: Mapping[str, Array],
    head_gradient: bool,
) -> tuple[tuple[FurtherScores, ...], Mapping[str, Array]]:
    """Return the scores of the multi-token-prediction modules, and the sums of all layers, theirs last.

    states, sums: the body's `hidden_states`. Module k sees each token's next k tokens and predicts the one after them.
    """
    inputs, tokens, every, scores = pipeline.make_inputs(decoder.spec, batch, call), batch["targets"], [dict(sums)], []
    head = gather(decoder.head_weight.astype(call.dtype))
    for module in range(len(decoder.mtp)):
        states, emitted = decoder.predict_further(module, states, tokens, inputs, call)
        every.append(emitted)
        targets, weight = (batch[f"further_{name}"][..., module] for name in ("targets", "loss_weight"))
        with jax.named_scope("head"):
            columns = {"targets": targets, "loss_weight": weight}
            loss = _cross_entropy(decoder, states, head, columns, 0.0, head_gradient)[1]
            best, _ = likeliest(decoder, jax.lax.stop_gradient(states), call.dtype, 1, decoder.spec.vocabulary, 1.0)
        scores.append(FurtherScores(loss, (best[..., 0] == targets) & (weight != 0)))
        tokens = targets
    return tuple(scores), join_sums(every, jnp.concatenate)


def _cross_entropy(
    decoder: Decoder,
    states: Float[Array, "b s d"],
    head: Float[Array, "v d"],
    batch: Batch,
    z_loss: float,
    head_gradient: bool,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return (log_prob, loss) of each target, without label smoothing."""
    weight = batch["loss_weight"]
    kept = weight != 0  # no logits are computed for the others
    loss = _compute_loss(decoder, states, head, batch["targets"], kept, z_loss=z_loss, head_gradient=head_gradient)
    return -loss, loss * weight


def _compute_loss(
    decoder: Decoder, states: Array, head: Array, targets: Array, weight: Array, *, summed: bool = False, **options: Any
) -> Array:
    """Return `linear_cross_entropy` of the tokens (b, s), or its sum over each device's tokens (rows, positions).

    In a shard_map: each device has the logits of its tokens and its part of the vocabulary.
    """

    def kernel(hidden, head, targets, weight):
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            targets.reshape(-1),
            weight.reshape(-1),
            vocabulary=decoder.spec.vocabulary,
            soft_cap=decoder.spec.logit_cap,
            summed=summed,
            vocabulary_axis=gathered_entry("vocabulary"),
            **options,
        )
        return loss.reshape((1, 1) if summed else targets.shape)

    by_device = (by_token(None), P(gathered_entry("vocabulary"), None), by_token(), by_token())
    return jax.shard_map(kernel, in_specs=by_device, out_specs=by_token())(states, head, targets, weight)


def _above_mean(
    decoder: Decoder, states: Float[Array, "b s d"], head: Float[Array, "v d"], targets: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """Return the logit of each target minus the mean logit over the vocabulary, float32, for label smoothing.

    The mean of the logits is the logit of the head's mean row, so no other logits are computed.
    """
    if decoder.spec.logit_cap is not None:
        raise UserError(f"train.label_smoothing: the logits of a {decoder.spec.family} are capped; leave it out")
    head, count = jax.reshard(head, P(None, None)), decoder.spec.vocabulary
    real = jnp.arange(len(head)) < count  # without padding rows
    mean = jnp.sum(jnp.where(real[:, None], head, 0), 0, dtype=jnp.float32) / count
    wide = states.astype(jnp.float32)
    target_logit = jnp.sum(wide * lookup(head, targets).astype(jnp.float32), axis=-1)
    return target_logit - jnp.sum(wide * mean, axis=-1)


def score_labels(
    decoder: Decoder, batch: Batch, call: ForwardOptions, hidden: Hidden | None = None, tokens: tuple[int, ...] = ()
) -> LabelScores:
    """Return a classifier's scores of a batch of packed rows, or the logits of `tokens` by a language model.

    Logits are computed after every token, although only those after a document's last token are used: the head is
    small, and so no positions have to be gathered.

    hidden: `hidden_states` of the batch, if already computed.
    """
    states, sums = hidden_states(decoder, batch, call) if hidden is None else hidden
    with jax.named_scope("head"):
        head, cap = gather(decoder.head_weight.astype(call.dtype)), None
        if tokens:
            rows, cap = jnp.array(tokens), decoder.spec.logit_cap
            head = jax.reshard(head, P(None, None)).at[rows].get(out_sharding=P(None, None))
        logits = jnp.einsum(
            "bsd,ld->bsl", states, head, preferred_element_type=jnp.float32, out_sharding=by_token(None)
        )
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    return LabelScores(logits, sums)


def hidden_states(decoder: Decoder, batch: Batch, call: ForwardOptions, replay_routing: bool = False) -> Hidden:
    """Return the head's input for a batch of packed rows; a pipeline's stages run one after another.

    replay_routing: as in `ScoreOptions`; not in a pipeline.
    """
    if decoder.pipeline is None:
        inputs = pipeline.make_inputs(decoder.spec, batch, call)
        if replay_routing:
            inputs = inputs._replace(routed_experts=routed_by_stack(decoder.spec, batch["routed_experts"]))
        if decoder.vision is not None and "patches" in batch:
            inputs = inputs._replace(images=decoder.vision(batch, call))
        hidden, _, sums = decoder(batch["tokens"], inputs, call)
        return hidden, sums
    x, before = pipeline.enter(decoder, batch, call)
    x, inside = pipeline.run_chunks(decoder, x, batch, call)
    return pipeline.leave(decoder, x, [before, inside], batch, call)


def logits(decoder: Decoder, hidden: Float[Array, "*b d"], dtype: jnp.dtype) -> Float[Array, "*b v"]:
    """Return float32 logits over the whole vocabulary, on the devices that have the hidden states; for few tokens."""
    rows = jax.typeof(hidden).sharding.spec[:-1]
    head = gather(decoder.head_weight.astype(dtype))
    by_row = P(*rows, gathered_entry("vocabulary"))
    scores = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32, out_sharding=by_row)
    # The product is sharded over the vocabulary; callers need whole rows, without padding tokens.
    scores, cap = jax.reshard(scores, P(*rows, None))[..., : decoder.spec.vocabulary], decoder.spec.logit_cap
    return scores if cap is None else cap * jnp.tanh(scores / cap)
