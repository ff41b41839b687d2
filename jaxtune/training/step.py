"""One optimizer step, and one evaluation step, as pure functions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.config.schema import Guard
from jaxtune.models.decoder import Decoder, Parameters, bind, cast_like
from jaxtune.models.forward_options import Call
from jaxtune.models.pipeline import noise_of
from jaxtune.models.score import Batch, Hidden, LabelScores, Scores, score, score_labels
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.optim import build
from jaxtune.optim.build import Optimizer
from jaxtune.parallel.layout import Axes, P, moved, shards
from jaxtune.parallel.manual_axes import apart, summed_over, with_others
from jaxtune.parallel.offload import Added, is_on_host, to_device, zeros_of
from jaxtune.parallel.random import named_key, source_of
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import Amax, Linears
from jaxtune.precision.recipes import Recipe
from jaxtune.training.guard import bounds, level_after
from jaxtune.training.state import Scaling, State

Metrics = dict[str, Any]


class Summed(NamedTuple):
    """Sums over micro-batches, not yet divided by the weight."""

    gradients: Parameters
    sums: Sums
    amax: dict[str, Array] = {}  # noqa: RUF012  found in this step, of linear layers with delayed scaling
    magnified: Any = 1.0  # the gradients are this many times those of the loss


# (trained, frozen, batch with a leading axis of micro-batches, step, scaling, reference) -> sums. A pipeline can take
# its place.
Gradients = Callable[..., Summed]


def accumulated_gradients(
    graph: nnx.GraphDef,
    objective: Objective,
    recipe: Recipe,
    call: Call,
    seed: int,
    places: Mapping[str, jax.P] = {},
    added_by_layer: Mapping[str, bool] = {},
    summed_last: Axes = (),
    dropout_warmup_steps: int = 0,
) -> Gradients:
    """Gradients of the objective, one micro-batch after the other; `call` without noise.

    places: PartitionSpecs in which gradients are summed, where they are not the parameters' own.
    added_by_layer: stacks whose gradients the backward pass itself sums, a layer at a time; whether on the host.
    summed_last: axes over which a device's gradient is summed with others' after the last micro-batch alone.
    """

    def gradients(
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        step: Array,
        scaling: Scaling = Scaling(),
        reference: Mapping[str, Any] = {},
    ) -> Summed:
        arguments = trained, frozen, batch, step, scaling, dict(reference)
        if not summed_last:
            return of_rows(*arguments)
        specs = (P(), P(), P(None, summed_last), P(), P(), P())
        return apart(summed_last, of_rows, specs, P())(*arguments)

    def of_rows(
        trained: Parameters, frozen: Parameters, batch: Batch, step: Array, scaling: Scaling, reference: Parameters
    ) -> Summed:
        """Of rows that devices along `summed_last` have; what the objective is given, and its sums, are of all rows."""
        source = source_of(seed, step, dropout_warmup_steps)
        weights_of, scales = weights_of_step(recipe.linears, trained, frozen, scaling.amax, step)
        compared = compared_with(graph, recipe.linears, reference, frozen, scaling.amax, step)
        size = batch["tokens"][0].size * shards(summed_last, jax.sharding.get_abstract_mesh())
        # The loss scale is that of the mean loss, so that it means the same whatever the size of a micro-batch.
        magnified = 1.0 if scaling.loss is None else scaling.loss.scale / size

        def loss(given: Parameters, scales: dict[str, Array], micro: Batch) -> tuple[Array, Sums]:
            decoder = bind(graph, weights_of(given | {n: Added(trained[n], given[n]) for n in added_by_layer}, scales))
            head = "embed.weight" if decoder.head is None else "head.weight"
            noisy = call._replace(noise=noise_of(micro, source))
            scores = scores_of(decoder, micro, objective, noisy, head in trained, compared=compared)
            sums = objective.loss(scores_with_others(scores, summed_last), with_others(micro, summed_last))
            return sums.loss * magnified, sums

        def add(total: Summed, micro: Batch) -> tuple[Summed, None]:
            given = trained | {name: total.gradients[name] for name in added_by_layer}
            (_, sums), (grads, amax) = jax.value_and_grad(loss, (0, 1), has_aux=True)(given, scales, micro)
            added = {name: grads.pop(name) for name in added_by_layer}
            earlier = {name: total.gradients[name] for name in grads}
            summed = added | jax.tree.map(lambda a, b: (a + b).astype(a.dtype), earlier, placed(grads, places))
            # The cotangent of a delayed scale is an amax (`LowPrecision.scales`): of micro-batches the largest counts.
            largest = jax.tree.map(jnp.maximum, total.amax, amax)
            return Summed(summed, jax.tree.map(jnp.add, total.sums, sums), largest), None

        # In gradient_dtype, whatever the parameters are stored in.
        totals = {
            name: zeros_of(p, recipe.gradient_dtype, added_by_layer.get(name, False)) for name, p in trained.items()
        }
        given = trained | {name: totals[name] for name in added_by_layer}
        _, sums = jax.eval_shape(loss, given, scales, jax.tree.map(lambda x: x[0], batch))
        start = Summed(placed(totals, places), jax.tree.map(_zero, sums), jax.tree.map(jnp.zeros_like, scales))
        total, _ = jax.lax.scan(add, start, batch)
        return total._replace(gradients=summed_over(total.gradients, summed_last), magnified=magnified)

    return gradients


def placed(gradients: Parameters, places: Mapping[str, jax.P]) -> Parameters:
    """The gradients where they are summed."""
    return {name: moved(gradient, places.get(name)) for name, gradient in gradients.items()}


def _zero(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def scores_of(
    decoder: Decoder,
    batch: Batch,
    objective: Objective,
    call: Call,
    head_gradient: bool,
    hidden: Hidden | None = None,
    compared: Decoder | None = None,
) -> Scores | LabelScores:
    """Scores of a micro-batch, with those of `compared` where the objective compares with a reference.

    hidden: its `hidden_states`, if known. compared: None: the same decoder without its adapters.
    """
    if decoder.spec.labels:
        return score_labels(decoder, batch, call, hidden)
    asked = {
        name: getattr(objective, name) for name in ("z_loss", "label_smoothing", "divergence", "temperature", "hits")
    }
    scores = score(decoder, batch, call, hidden, head_gradient=head_gradient, **asked)
    if not objective.reference:
        return scores
    plain = call._replace(adapters=compared is not None, noise=None)
    reference = score(compared or decoder, batch, plain, temperature=objective.temperature).log_prob
    return scores._replace(reference=jax.lax.stop_gradient(reference))


def compared_with(
    graph: nnx.GraphDef,
    linears: Linears | None,
    reference: Mapping[str, Any],
    frozen: Parameters,
    amax: Amax,
    step: Array,
) -> Decoder | None:
    """The decoder with these values in place of the trained ones, computed as they are; None if there are none."""
    if not reference:
        return None
    values = dict(reference)
    weights_of, scales = weights_of_step(linears, values, frozen, amax, step)
    return bind(graph, weights_of(values, scales))


def scores_with_others(scores: Scores | LabelScores, axes: Axes) -> Scores | LabelScores:
    """Those of the rows of all devices along these axes, so that what is no sum over rows is still that of all."""
    return with_others(scores._replace(sums={}), axes)._replace(sums=with_others(scores.sums, axes, dimension=1))


def weights_of_step(
    linears: Linears | None, trained: Parameters, frozen: Parameters, amax: Amax, step: Array
) -> tuple[Callable[[Parameters, dict[str, Array]], Parameters], dict[str, Array]]:
    """(trained, scales) -> what the decoder is bound to; and the delayed scales of the step.

    Operands are made here, once for all micro-batches.
    """
    if linears is None:
        return lambda trained, _: {**frozen, **trained}, {}
    operands = linears.operands({**frozen, **trained})
    scales = linears.scales(amax, step)
    return lambda trained, scales: linears.wrapped({**frozen, **trained}, operands, scales), scales


def make_train_step(
    gradients: Gradients,
    optimizer: Optimizer,
    max_grad_norm: float,
    recipe: Recipe,
    seed: int = 0,
    counts: str = "target_tokens",
    reference_update_steps: int | None = None,
    ema_decay: float = 0.0,
    merge: Callable[..., tuple[Parameters, Parameters]] | None = None,
    merge_interval: int = 0,
    reset_on_merge: bool = False,
    noise: Callable[..., Parameters] | None = None,
    guarded: Guard | None = None,
) -> Callable[[State, Parameters, Batch, Float[Array, ""]], tuple[State, Metrics]]:
    """(state, frozen, batch, learning rate) -> (state, metrics).

    The sums are divided once, by the weight of the whole batch over all devices, which is the metric `counts`. A step
    whose loss or gradient is not finite changes nothing but the step number and the loss scale. The metric `absent`
    says which of the objective's metrics are means of nothing. After each
    `reference_update_steps` the trained parameters become the reference; their average moves by 1 - `ema_decay` of the
    way to them. After each `merge_interval` adapters are merged into the base in the state (`weights.relora`), and
    their optimizer begins anew if `reset_on_merge`. `noise` is added to frozen parameters (`training.noise`).
    `guarded`: a step that is a spike (`training.guard`) changes nothing either.
    """

    def step(state: State, frozen: Parameters, batch: Batch, rate: Float[Array, ""]) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        frozen = {**frozen, **state.base}
        if noise is not None:
            frozen = noise(frozen, named_key(key, "quantization"), rate)
        at = optimizer.point(state.trained, state.optimizer)
        with jax.default_matmul_precision(recipe.matmul_precision):
            summed = gradients(at, frozen, batch, state.step, state.scaling, state.reference)
        weight = jnp.maximum(summed.sums.weight, 1).astype(jnp.float32)
        loss = summed.sums.loss / weight
        norm = _norm(summed.gradients) / (weight * summed.magnified)
        taken = finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        level = state.guard
        if guarded is not None:
            assert level is not None, "the state has no level to judge steps by"
            most = bounds(level, guarded)
            taken = finite & (loss <= most[0]) & (norm <= most[1])
            rate = rate * level.rate
        factor = build.clip_factor(norm, max_grad_norm) / (weight * summed.magnified)

        update = build.Step(rate, factor, taken, named_key(key, "rounding"))
        with jax.default_matmul_precision(recipe.matmul_precision):
            directed = {**summed.gradients, **summed.sums.directions}
            trained, optimizer_state = optimizer.update(directed, state.optimizer, state.trained, update)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            counts: summed.sums.weight,
            "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
            **{name: value / jnp.maximum(own, 1) for name, (value, own) in summed.sums.metrics.items()},
        }
        if summed.sums.metrics:
            metrics["absent"] = {name: own == 0 for name, (_, own) in summed.sums.metrics.items()}
        if guarded is not None and level is not None:
            metrics |= {"spike": (finite & ~taken).astype(jnp.int32), "rate_factor": level.rate}
            level = level_after(level, loss, norm, finite, guarded)
        scaling = state.scaling
        if scaling.loss is not None and recipe.growth_steps is not None:
            after = loss_scale.updated(scaling.loss, finite, recipe.growth_steps)
            metrics |= {"loss_scale": scaling.loss.scale, "skipped_steps": after.skipped_steps}
            scaling = scaling._replace(loss=after)
        if recipe.linears is not None:
            scaling = scaling._replace(amax=recipe.linears.extended(scaling.amax, summed.amax, taken))
        reference = state.reference
        if reference and reference_update_steps:
            due = (state.step + 1) % reference_update_steps == 0
            reference = jax.lax.cond(due, partial(cast_like, trained), lambda before: before, reference)
        base = state.base
        if merge is not None:
            due = (state.step + 1) % merge_interval == 0
            trained, base = jax.lax.cond(due, partial(merge, step=state.step), lambda *same: same, trained, base)
            if reset_on_merge:
                anew = lambda _: optimizer.init(trained)  # noqa: E731
                optimizer_state = jax.lax.cond(due, anew, lambda kept: kept, optimizer_state)
        average = {name: mean + (1 - ema_decay) * (trained[name] - mean) for name, mean in state.average.items()}
        return State(state.step + 1, trained, optimizer_state, scaling, reference, average, base, level), metrics

    return step


def _norm(gradients: Parameters) -> Float[Array, ""]:
    """The norm of all gradients together, in float32."""

    def squares(gradient: Array) -> Float[Array, ""]:
        return jnp.sum(jnp.square(to_device(gradient).astype(jnp.float32)))

    return jnp.sqrt(sum(jax.lax.map(squares, g).sum() if is_on_host(g) else squares(g) for g in gradients.values()))


def make_eval_step(
    graph: nnx.GraphDef, objective: Objective, recipe: Recipe, call: Call
) -> Callable[[Parameters, Parameters, Batch, Parameters], Sums]:
    """(trained, frozen, batch, reference) -> sums: scalars, never logits.

    Computed as in training, except that scaling is never delayed: each tensor's own amax makes its scale.
    """

    def step(trained: Parameters, frozen: Parameters, batch: Batch, reference: Mapping[str, Any] = {}) -> Sums:
        first = jnp.zeros((), jnp.int32)
        weights_of, _ = weights_of_step(recipe.linears, trained, frozen, {}, first)
        compared = compared_with(graph, recipe.linears, reference, frozen, {}, first)

        def of_micro_batch(micro: Batch) -> Sums:
            with jax.default_matmul_precision(recipe.matmul_precision):
                decoder = bind(graph, weights_of(trained, {}))
                scores = scores_of(decoder, micro, objective, call, head_gradient=False, compared=compared)
                return objective.loss(scores, micro)

        def add(total: Sums, micro: Batch) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, total, of_micro_batch(micro)), None

        sums = jax.eval_shape(of_micro_batch, jax.tree.map(lambda x: x[0], batch))
        return jax.lax.scan(add, jax.tree.map(_zero, sums), batch)[0]

    return step
