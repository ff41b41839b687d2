"""One optimizer step, and one evaluation step, as pure functions.

Shapes: a batch is a dict of columns with leading axes (A, B), most of them (A, B, S), with

    A   micro-batches of the step (gradient accumulation)
    B   rows of a micro-batch, over all devices
    S   positions of a row

`micro` is one micro-batch, without the axis A. Parameters are stacks of layers, by name.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.config.schema import GuardOptions
from jaxtune.models.decoder import Decoder, Parameters, bind, cast_like
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.pipeline import noise_of
from jaxtune.models.score import Batch, Hidden, LabelScores, Scores, score, score_labels
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.optim import build
from jaxtune.optim.build import Optimizer
from jaxtune.parallel.layout import Axes, P, reshard_to, shards
from jaxtune.parallel.manual_axes import all_gather_rows, sum_over, with_manual_axes
from jaxtune.parallel.offload import GradientSum, is_on_host, to_device, zeros_of
from jaxtune.parallel.random import make_step_noise, named_key
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import Amax, Linears
from jaxtune.precision.recipes import PrecisionRecipe
from jaxtune.training.guard import bounds, level_after
from jaxtune.training.state import Scaling, State

Metrics = dict[str, Any]


class GradientSums(NamedTuple):
    """Sums over micro-batches, not yet divided by the weight.

    Attributes:
        gradients: by name of the parameter, in gradient_dtype.
        sums: loss, weight and metrics.
        amax: measured in this step, for linear layers with delayed scaling.
        magnified: loss scale: the gradients are the loss's gradients times this factor.
    """

    gradients: Parameters
    sums: Sums
    amax: dict[str, Array] = {}  # noqa: RUF012
    magnified: Any = 1.0


# (trained, frozen, batch with a leading axis of micro-batches, step, scaling, reference) -> sums. There are two:
# `accumulated_gradients` below, and `pipelined_step.pipelined_gradients`.
Gradients = Callable[..., GradientSums]


def accumulated_gradients(
    graph: nnx.GraphDef,
    objective: Objective,
    recipe: PrecisionRecipe,
    call: ForwardOptions,
    seed: int,
    places: Mapping[str, jax.P] = {},
    added_by_layer: Mapping[str, bool] = {},
    summed_last: Axes = (),
    dropout_warmup_steps: int = 0,
) -> Gradients:
    """Gradients of the objective, summed over micro-batches in a scan; `call` without noise.

    places: PartitionSpecs of the gradient sums that are sharded differently from their parameters.
    added_by_layer: stacks whose gradients the backward pass itself accumulates, one layer at a time; the value tells
        whether their sums are in the host's memory.
    summed_last: mesh axes over which gradients are all-reduced once, after the last micro-batch.
    """

    def gradients(
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        step: Array,
        scaling: Scaling = Scaling(),
        reference: Mapping[str, Any] = {},
    ) -> GradientSums:
        arguments = trained, frozen, batch, step, scaling, dict(reference)
        if not summed_last:
            return of_rows(*arguments)
        # With only jit, XLA would all-reduce the gradients in every micro-batch. With these axes manual, a device sums
        # the gradients of its own rows, and they are reduced once: 1 / A of the communication.
        specs = (P(), P(), P(None, summed_last), P(), P(), P())
        return with_manual_axes(summed_last, of_rows, specs, P())(*arguments)

    def of_rows(
        trained: Parameters, frozen: Parameters, batch: Batch, step: Array, scaling: Scaling, reference: Parameters
    ) -> GradientSums:
        """Gradients of the local rows along `summed_last`; the objective sees the scores of all rows (all-gathered)."""
        source = make_step_noise(seed, step, dropout_warmup_steps)
        weights_of, scales = prepare_weights(recipe.linears, trained, frozen, scaling.amax, step)
        compared = bind_reference(graph, recipe.linears, reference, frozen, scaling.amax, step)
        size = batch["tokens"][0].size * shards(summed_last, jax.sharding.get_abstract_mesh())
        # The loss is a sum over tokens here. Dividing the loss scale by their number applies it to the mean loss, so
        # that its meaning does not depend on the size of a micro-batch.
        magnified = 1.0 if scaling.loss is None else scaling.loss.scale / size

        def loss(given: Parameters, scales: dict[str, Array], micro: Batch) -> tuple[Array, Sums]:
            # `GradientSum` takes a stack's gradient sum through the backward pass; its cotangent is the new sum.
            decoder = bind(
                graph, weights_of(given | {n: GradientSum(trained[n], given[n]) for n in added_by_layer}, scales)
            )
            head = "embed.weight" if decoder.head is None else "head.weight"
            noisy = call._replace(noise=noise_of(micro, source))
            scores = score_micro_batch(decoder, micro, objective, noisy, head in trained, compared=compared)
            with jax.named_scope("loss"):
                sums = objective.loss(gather_scores(scores, summed_last), all_gather_rows(micro, summed_last))
            return sums.loss * magnified, sums

        def add(total: GradientSums, micro: Batch) -> tuple[GradientSums, None]:
            given = trained | {name: total.gradients[name] for name in added_by_layer}
            (_, sums), (grads, amax) = jax.value_and_grad(loss, (0, 1), has_aux=True)(given, scales, micro)
            added = {name: grads.pop(name) for name in added_by_layer}
            earlier = {name: total.gradients[name] for name in grads}
            with jax.named_scope("gradient_accumulation"):
                summed = added | jax.tree.map(
                    lambda a, b: (a + b).astype(a.dtype), earlier, reshard_gradients(grads, places)
                )
            # The cotangent of a delayed scale is an amax (`LowPrecision.scales`): the largest one counts.
            largest = jax.tree.map(jnp.maximum, total.amax, amax)
            return GradientSums(summed, jax.tree.map(jnp.add, total.sums, sums), largest), None

        # Sums have gradient_dtype, whatever dtype the parameters are stored in.
        totals = {
            name: zeros_of(p, recipe.gradient_dtype, added_by_layer.get(name, False)) for name, p in trained.items()
        }
        given = trained | {name: totals[name] for name in added_by_layer}
        # Objectives differ in their metrics: the initial carry of the scan gets their shapes from one micro-batch.
        _, sums = jax.eval_shape(loss, given, scales, jax.tree.map(lambda x: x[0], batch))
        start = GradientSums(
            reshard_gradients(totals, places), jax.tree.map(_zero, sums), jax.tree.map(jnp.zeros_like, scales)
        )
        total, _ = jax.lax.scan(add, start, batch)
        return total._replace(gradients=sum_over(total.gradients, summed_last), magnified=magnified)

    return gradients


def reshard_gradients(gradients: Parameters, places: Mapping[str, jax.P]) -> Parameters:
    """Reshard gradients to the PartitionSpecs in which they are summed."""
    return {name: reshard_to(gradient, places.get(name)) for name, gradient in gradients.items()}


def _zero(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def score_micro_batch(
    decoder: Decoder,
    batch: Batch,
    objective: Objective,
    call: ForwardOptions,
    head_gradient: bool,
    hidden: Hidden | None = None,
    compared: Decoder | None = None,
) -> Scores | LabelScores:
    """Score a micro-batch; also with the reference, if the objective compares with one.

    hidden: `hidden_states` of the micro-batch, if they are computed already.
    compared: the reference's decoder; None: the same decoder without its adapters.
    """
    if decoder.spec.labels:
        return score_labels(decoder, batch, call, hidden)
    options = {
        name: getattr(objective, name) for name in ("z_loss", "label_smoothing", "divergence", "temperature", "hits")
    }
    scores = score(decoder, batch, call, hidden, head_gradient=head_gradient, **options)
    if not objective.reference:
        return scores
    reference_call = call._replace(adapters=compared is not None, noise=None)
    reference = score(compared or decoder, batch, reference_call, temperature=objective.temperature).log_prob
    return scores._replace(reference=jax.lax.stop_gradient(reference))


def bind_reference(
    graph: nnx.GraphDef,
    linears: Linears | None,
    reference: Mapping[str, Any],
    frozen: Parameters,
    amax: Amax,
    step: Array,
) -> Decoder | None:
    """The reference's decoder: these values in place of the trained ones, same precision. None without values."""
    if not reference:
        return None
    values = dict(reference)
    weights_of, scales = prepare_weights(linears, values, frozen, amax, step)
    return bind(graph, weights_of(values, scales))


def gather_scores(scores: Scores | LabelScores, axes: Axes) -> Scores | LabelScores:
    """All-gather scores over `axes`, for objectives that are not a sum over rows."""
    # `sums` are per layer: their rows are the second axis.
    return all_gather_rows(scores._replace(sums={}), axes)._replace(
        sums=all_gather_rows(scores.sums, axes, dimension=1)
    )


def prepare_weights(
    linears: Linears | None, trained: Parameters, frozen: Parameters, amax: Amax, step: Array
) -> tuple[Callable[[Parameters, dict[str, Array]], Parameters], dict[str, Array]]:
    """Return a function (trained, scales) -> weights to bind the decoder to; and the delayed scales of the step.

    Low-precision operands are made here, outside of the scan: once for all micro-batches.
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
    recipe: PrecisionRecipe,
    seed: int = 0,
    counts: str = "target_tokens",
    reference_update_steps: int | None = None,
    ema_decay: float = 0.0,
    merge: Callable[..., tuple[Parameters, Parameters]] | None = None,
    merge_interval: int = 0,
    reset_on_merge: bool = False,
    noise: Callable[..., Parameters] | None = None,
    guarded: GuardOptions | None = None,
) -> Callable[[State, Parameters, Batch, Float[Array, ""]], tuple[State, Metrics]]:
    """Return the train step: (state, frozen, batch, learning rate) -> (state, metrics).

    The sums are divided once, by the weight of the whole batch over all devices, which is the metric `counts`. A step
    whose loss or gradient is not finite changes only the step number and the loss scale. The metric `absent` marks the
    metrics of the objective that have no weight in this batch, so that their mean is undefined.

    Args:
        gradients: computes the sums of a batch.
        optimizer: updates the trained parameters.
        max_grad_norm: gradients are clipped to this global norm.
        recipe: the precision.
        seed: of stochastic rounding and of noise.
        counts: name of the metric under which the weight is reported.
        reference_update_steps: the trained parameters become the reference after this number of steps, each time.
        ema_decay: in each step the average moves by 1 - ema_decay of the way to the trained parameters.
        merge: merges adapters into the base in the state (`weights.relora`), after each `merge_interval` steps.
        merge_interval: see merge.
        reset_on_merge: whether the optimizer's state is new after a merge.
        noise: is added to frozen parameters (`training.noise`).
        guarded: a step that is a spike (`training.guard`) changes nothing either.
    """

    def step(state: State, frozen: Parameters, batch: Batch, rate: Float[Array, ""]) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        frozen = {**frozen, **state.base}
        if noise is not None:
            frozen = noise(frozen, named_key(key, "quantization"), rate)
        at = optimizer.point(state.trained, state.optimizer)
        with jax.default_matmul_precision(recipe.matmul_precision):
            summed = gradients(at, frozen, batch, state.step, state.scaling, state.reference)
        # Divide once, at the end: micro-batches and devices differ in their number of targets, so that a mean of their
        # means would weight tokens differently. Gradients are divided in `factor`, together with clipping.
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

        # A step that is not taken is computed too: the optimizer selects old or new values by `taken` (jnp.where).
        update = build.UpdateInputs(rate, factor, taken, named_key(key, "rounding"))
        with jax.default_matmul_precision(recipe.matmul_precision):
            directed = {**summed.gradients, **summed.sums.directions}
            trained, optimizer_state = optimizer.update(directed, state.optimizer, state.trained, update)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            counts: summed.sums.weight,
            "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
            **{name: value / jnp.maximum(count, 1) for name, (value, count) in summed.sums.metrics.items()},
        }
        if summed.sums.metrics:
            metrics["absent"] = {name: count == 0 for name, (_, count) in summed.sums.metrics.items()}
        if guarded is not None and level is not None:
            metrics |= {"spike": (finite & ~taken).astype(jnp.int32), "rate_factor": level.rate}
            level = level_after(level, loss, norm, finite, guarded)
        scaling = state.scaling
        if scaling.loss is not None and recipe.growth_steps is not None:
            after = loss_scale.update_scale(scaling.loss, finite, recipe.growth_steps)
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
                new_state = lambda _: optimizer.init(trained)  # noqa: E731
                optimizer_state = jax.lax.cond(due, new_state, lambda same_state: same_state, optimizer_state)
        average = {name: mean + (1 - ema_decay) * (trained[name] - mean) for name, mean in state.average.items()}
        return State(state.step + 1, trained, optimizer_state, scaling, reference, average, base, level), metrics

    return step


@jax.named_scope("optimizer")
def _norm(gradients: Parameters) -> Float[Array, ""]:
    """The global norm of the gradients, in float32; gradients on the host come to the device one layer at a time."""

    def squares(gradient: Array) -> Float[Array, ""]:
        return jnp.sum(jnp.square(to_device(gradient).astype(jnp.float32)))

    return jnp.sqrt(sum(jax.lax.map(squares, g).sum() if is_on_host(g) else squares(g) for g in gradients.values()))


def make_eval_step(
    graph: nnx.GraphDef, objective: Objective, recipe: PrecisionRecipe, call: ForwardOptions
) -> Callable[[Parameters, Parameters, Batch, Parameters], Sums]:
    """Return the evaluation step: (trained, frozen, batch, reference) -> sums. Sums are scalars, never logits.

    Precision is as in training, except that scaling is always current: each tensor's own amax makes its scale.
    """

    def step(trained: Parameters, frozen: Parameters, batch: Batch, reference: Mapping[str, Any] = {}) -> Sums:
        first = jnp.zeros((), jnp.int32)
        weights_of, _ = prepare_weights(recipe.linears, trained, frozen, {}, first)
        compared = bind_reference(graph, recipe.linears, reference, frozen, {}, first)

        def of_micro_batch(micro: Batch) -> Sums:
            with jax.default_matmul_precision(recipe.matmul_precision):
                decoder = bind(graph, weights_of(trained, {}))
                scores = score_micro_batch(decoder, micro, objective, call, head_gradient=False, compared=compared)
                with jax.named_scope("loss"):
                    return objective.loss(scores, micro)

        def add(total: Sums, micro: Batch) -> tuple[Sums, None]:
            return jax.tree.map(jnp.add, total, of_micro_batch(micro)), None

        sums = jax.eval_shape(of_micro_batch, jax.tree.map(lambda x: x[0], batch))
        return jax.lax.scan(add, jax.tree.map(_zero, sums), batch)[0]

    return step
