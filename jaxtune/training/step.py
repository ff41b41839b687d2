"""One optimizer step, and one evaluation step, as pure functions.

Shapes: a batch is a dict of columns with leading axes (A, B), most of them (A, B, S), with

    A   micro-batches of the step (gradient accumulation)
    B   rows of a micro-batch, over all devices
    S   positions of a row

`micro` is one micro-batch, without the axis A. Parameters are stacks of layers, by name.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.config.schema import GuardOptions
from jaxtune.models.decoder import Decoder, Parameters, bind, cast_like
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import AnyScores, Batch, Hidden, ScoreOptions, score, score_labels, score_total
from jaxtune.models.pipeline import noise_of
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.optim import build
from jaxtune.optim.build import Optimizer
from jaxtune.parallel.layout import Axes, P, reshard_to, shards, take_element
from jaxtune.parallel.manual_axes import all_gather_rows, sum_over, with_manual_axes
from jaxtune.parallel.offload import AccumulatingWeight, is_on_host, to_device, zeros_of
from jaxtune.parallel.pipeline_schedule import Order
from jaxtune.parallel.random import make_step_noise, named_key
from jaxtune.precision import loss_scale
from jaxtune.precision.linears import StepWeights
from jaxtune.precision.recipes import PrecisionRecipe
from jaxtune.training.guard import bounds, level_after
from jaxtune.training.state import Scaling, State
from pallas_kernels.cost import iterations

Metrics = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Forward:
    """A model's forward pass in the number formats of its run, before it has values.

    Attributes:
        graph: the decoder without values.
        recipe: the number formats.
        call: further options, without noise.
    """

    graph: nnx.GraphDef
    recipe: PrecisionRecipe
    call: ForwardOptions

    def bind(
        self, trained: Parameters, frozen: Parameters, scaling: Scaling = Scaling(), step: Int[Array, ""] | int = 0
    ) -> Decoder:
        """Return the decoder with these values.

        scaling: gives delayed scales. Without it scaling is current: each tensor's own amax makes its scale.
        """
        weights_of, scales = prepare_weights(self.recipe.linears, trained, frozen, scaling, step)
        return bind(self.graph, weights_of(trained, scales))

    def run(self, function: Callable[[Decoder, Batch, ForwardOptions], T], decoder: Decoder, batch: Batch) -> T:
        """Return function(decoder, batch, options), with the precision of training but without a backward pass."""
        with jax.default_matmul_precision(self.recipe.matmul_precision):
            return function(decoder, batch, self.call._replace(remat="none"))  # nothing is computed again


@dataclass(frozen=True)
class StepOptions:
    """The options of a step that its model, objective and optimizer do not have.

    Attributes:
        seed: of noise and of stochastic rounding.
        dropout_warmup_steps: steps over which dropout rates rise from 0.
        gradient_specs: PartitionSpecs of the gradient sums that are sharded differently from their parameters.
        added_by_layer: stacks whose gradients the backward pass itself accumulates, one layer at a time; the value
            tells whether their sums are in the host's memory. Not in a pipeline.
        summed_last: mesh axes over which gradients are all-reduced once, after the last micro-batch. Not in a pipeline.
        order: of the micro-batches in a pipeline.
        skip_padding: whether micro-batches of padding, which follow those with tokens, are not computed. Not in a
            pipeline.
        counts: name of the metric under which the weight of a batch is reported.
        max_grad_norm: gradients are clipped to this global norm; 0: they are not.
        guard: a step that is a spike (`training.guard`) changes nothing; None: no step is judged.
        noise: (frozen parameters, key, learning rate) -> the same with noise (`training.noise`); None: no noise.
        reference_update_steps: the trained parameters become the reference after this number of steps, each time.
        ema_decay: in each step the average moves by 1 - ema_decay of the way to the trained parameters.
        merge: merges adapters into the base in the state (`weights.relora`), after each `merge_interval` steps.
        merge_interval: see merge.
        reset_on_merge: whether the optimizer's state is new after a merge.
    """

    seed: int = 0
    dropout_warmup_steps: int = 0
    gradient_specs: Mapping[str, jax.P] = field(default_factory=dict)
    added_by_layer: Mapping[str, bool] = field(default_factory=dict)
    summed_last: Axes = ()
    order: Order = "1f1b"
    skip_padding: bool = False
    counts: str = "target_tokens"
    max_grad_norm: float = 0.0
    guard: GuardOptions | None = None
    noise: Callable[..., Parameters] | None = None
    reference_update_steps: int | None = None
    ema_decay: float = 0.0
    merge: Callable[..., tuple[Parameters, Parameters]] | None = None
    merge_interval: int = 0
    reset_on_merge: bool = False


class GradientSums(NamedTuple):
    """Sums over micro-batches, not yet divided by the weight.

    Attributes:
        gradients: by name of the parameter, in gradient_dtype.
        sums: loss, weight and metrics.
        amax: measured in this step, for linear layers with delayed scaling.
        loss_factor: loss scale: the gradients are the loss's gradients times this factor.
    """

    gradients: Parameters
    sums: Sums
    amax: dict[str, Array] = {}  # noqa: RUF012
    loss_factor: Any = 1.0


# (trained, frozen, batch with a leading axis of micro-batches, step, scaling, reference) -> sums. There are two:
# `accumulated_gradients` below, and `pipelined_step.pipelined_gradients`.
Gradients = Callable[..., GradientSums]


def accumulated_gradients(forward: Forward, objective: Objective, options: StepOptions = StepOptions()) -> Gradients:
    """Gradients of the objective, summed over micro-batches in a loop."""
    recipe, added_by_layer, summed_last = forward.recipe, options.added_by_layer, options.summed_last

    def gradients(
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        step: Array,
        scaling: Scaling = Scaling(),
        reference: Mapping[str, Any] = {},
    ) -> GradientSums:
        arguments = trained, frozen, batch, step, scaling, dict(reference), count_filled(batch)
        if not summed_last:
            return of_local_rows(*arguments)
        # With only jit, XLA would all-reduce the gradients in every micro-batch. With these axes manual, a device sums
        # the gradients of its own rows, and they are reduced once: 1 / A of the communication.
        specs = (P(), P(), P(None, summed_last), P(), P(), P(), P())  # rows are axis 1 of a column (A, B, ...)
        return with_manual_axes(summed_last, of_local_rows, specs, P())(*arguments)

    def of_local_rows(
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        step: Array,
        scaling: Scaling,
        reference: Parameters,
        filled: Int[Array, ""],
    ) -> GradientSums:
        """Gradients of the local rows along `summed_last`; the objective sees the scores of all rows (all-gathered).

        filled: the number of micro-batches with tokens, of all devices.
        """
        noise = make_step_noise(options.seed, step, options.dropout_warmup_steps)
        weights_of, scales = prepare_weights(recipe.linears, trained, frozen, scaling, step)
        reference_decoder = forward.bind(reference, frozen, scaling, step) if reference else None
        trained = shard_gradients(recipe.linears, trained, options.gradient_specs)
        positions = batch["tokens"][0].size * shards(summed_last, jax.sharding.get_abstract_mesh())
        # The loss is a sum over tokens here. Dividing the loss scale by their number applies it to the mean loss, so
        # that its meaning does not depend on the size of a micro-batch.
        factor = 1.0 if scaling.loss is None else scaling.loss.scale / positions

        def loss(given: Parameters, scales: dict[str, Array], micro: Batch) -> tuple[Array, Sums]:
            # `AccumulatingWeight` takes a stack's gradient sum through the backward pass; its cotangent is the new sum.
            # In `given`, such a stack has its gradient sum in place of its value, because jax differentiates `given`.
            stacks = {name: AccumulatingWeight(trained[name], given[name]) for name in added_by_layer}
            decoder = bind(forward.graph, weights_of(given | stacks, scales))
            call = forward.call._replace(noise=noise_of(micro, noise))
            sums = sum_micro_batch(
                decoder, micro, objective, call, trained, reference=reference_decoder, axes=summed_last
            )
            return sums.loss * factor, sums

        def add(total: GradientSums, micro: Batch) -> tuple[GradientSums, None]:
            given = trained | {name: total.gradients[name] for name in added_by_layer}
            (_, sums), (grads, amax) = jax.value_and_grad(loss, (0, 1), has_aux=True)(given, scales, micro)
            added = {name: grads.pop(name) for name in added_by_layer}  # sums already, with this micro-batch
            earlier = {name: total.gradients[name] for name in grads}
            summed = added | add_gradients(earlier, grads, options.gradient_specs)
            # The cotangent of a delayed scale is an amax (`LowPrecision.scales`): the largest one counts.
            largest = jax.tree.map(jnp.maximum, total.amax, amax)
            return GradientSums(summed, jax.tree.map(jnp.add, total.sums, sums), largest), None

        # Sums have gradient_dtype, whatever dtype the parameters are stored in.
        totals = {
            name: zeros_of(p, recipe.gradient_dtype, added_by_layer.get(name, False)) for name, p in trained.items()
        }
        totals = reshard_gradients(totals, options.gradient_specs)
        given = trained | {name: totals[name] for name in added_by_layer}
        # Objectives differ in their metrics: the initial carry of the scan gets their shapes from one micro-batch.
        _, sums = jax.eval_shape(loss, given, scales, jax.tree.map(lambda x: x[0], batch))
        start = GradientSums(
            totals,
            jax.tree.map(_zero, sums),
            jax.tree.map(jnp.zeros_like, scales),
        )
        if options.skip_padding:
            total = over_filled(lambda number, micro, total: add(total, micro)[0], batch, filled, start)
        else:
            total, _ = jax.lax.scan(add, start, batch)
        return total._replace(gradients=sum_over(total.gradients, summed_last), loss_factor=factor)

    return gradients


def count_filled(batch: Batch) -> Int[Array, ""]:
    """Return the number of micro-batches with a token; micro-batches of padding follow them."""
    return jnp.sum(jnp.any(batch["segment_ids"] > 0, (1, 2)), dtype=jnp.int32)  # padding has segment 0


def over_filled(function: Callable[[Int[Array, ""], Batch, T], T], batch: Batch, filled: Int[Array, ""], start: T) -> T:
    """Return the last value = function(number, micro-batch, value), over the first `filled` micro-batches."""

    def one(number: Int[Array, ""], value: T) -> T:
        return function(number, take_element(batch, number), value)

    # A while loop, because `filled` is traced. The annotation gives cost estimates a bound of its iterations.
    with iterations(len(batch["segment_ids"])):
        return jax.lax.fori_loop(0, filled, one, start)


@jax.named_scope("gradient_accumulation")
def add_gradients(sums: Parameters, gradients: Parameters, specs: Mapping[str, jax.P]) -> Parameters:
    """Add a micro-batch's gradients to the sums, which keep their dtype and have the PartitionSpecs `specs`."""
    return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), sums, reshard_gradients(gradients, specs))


def reshard_gradients(gradients: Parameters, specs: Mapping[str, jax.P]) -> Parameters:
    """Reshard gradients to the PartitionSpecs in which they are summed."""
    return {name: reshard_to(gradient, specs.get(name)) for name, gradient in gradients.items()}


def _zero(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)


def sum_micro_batch(
    decoder: Decoder,
    batch: Batch,
    objective: Objective,
    call: ForwardOptions,
    trained: Collection[str] = (),
    hidden: Hidden | None = None,
    reference: Decoder | None = None,
    axes: Axes = (),
) -> Sums:
    """Return the objective's sums over a micro-batch.

    trained: names of the parameters that get a gradient.
    hidden: `hidden_states` of the micro-batch, if they are computed already.
    reference: the decoder that the objective compares with, if it does; None: the same decoder without its adapters.
    axes: mesh axes over which scores are all-gathered first, for objectives that are not a sum over rows.
    """
    head_gradient = ("embed.weight" if decoder.head is None else "head.weight") in trained
    if decoder.spec.labels or objective.score.tokens:
        scores = score_labels(decoder, batch, call, hidden, objective.score.tokens)
    elif objective.score.total:
        scores = score_total(decoder, batch, call, hidden, objective.score, head_gradient=head_gradient)
    else:
        scores = score(decoder, batch, call, hidden, objective.score, head_gradient=head_gradient)
        if objective.reference:
            # A reference has neither dropout nor the rounding of weights as they will be served.
            call = call._replace(adapters=reference is not None, served=False, noise=None)
            options = ScoreOptions(temperature=objective.score.temperature)
            log_prob = score(reference or decoder, batch, call, options=options).log_prob
            scores = scores._replace(reference=jax.lax.stop_gradient(log_prob))
    with jax.named_scope("loss"):
        return objective.loss(gather_scores(scores, axes), all_gather_rows(batch, axes))


def gather_scores(scores: AnyScores, axes: Axes) -> AnyScores:
    """All-gather scores over `axes`, for objectives that are not a sum over rows."""
    # `sums` are per layer: their rows are the second axis.
    return all_gather_rows(scores._replace(sums={}), axes)._replace(
        sums=all_gather_rows(scores.sums, axes, dimension=1)
    )


def prepare_weights(
    linears: StepWeights | None, trained: Parameters, frozen: Parameters, scaling: Scaling, step: Int[Array, ""] | int
) -> tuple[Callable[[Parameters, dict[str, Array]], Parameters], dict[str, Array]]:
    """Return a function (trained, scales) -> weights to bind the decoder to; and the delayed scales of the step.

    Low-precision operands are made here, outside of the scan: once for all micro-batches.
    """
    if linears is None:
        return lambda trained, _: {**frozen, **trained}, {}
    operands = linears.operands({**frozen, **trained})
    scales = linears.scales(scaling.amax, jnp.asarray(step))
    return lambda trained, scales: linears.wrap_weights({**frozen, **trained}, operands, scales), scales


def shard_gradients(linears: StepWeights | None, trained: Parameters, specs: Mapping[str, jax.P]) -> Parameters:
    """Reshard the weights that have operands as their gradients are summed: a gradient has its weight's PartitionSpec.

    The values of such a weight are not read. With `parallel.zero=2`, in which weights are whole, each layer's gradient
    is then reduce-scattered.
    """
    if linears is None:
        return trained
    return trained | reshard_gradients({name: trained[name] for name in linears.parameters if name in trained}, specs)


def make_train_step(
    gradients: Gradients, optimizer: Optimizer, recipe: PrecisionRecipe, options: StepOptions = StepOptions()
) -> Callable[[State, Parameters, Batch, Float[Array, ""]], tuple[State, Metrics]]:
    """Return the train step: (state, frozen, batch, learning rate) -> (state, metrics).

    The sums are divided once, by the weight of the whole batch over all devices, which is the metric `options.counts`.
    A step whose loss or gradient is not finite changes only the step number and the loss scale. The metric `absent`
    marks the metrics of the objective that have no weight in this batch, so that their mean is undefined.
    """

    def step(state: State, frozen: Parameters, batch: Batch, rate: Float[Array, ""]) -> tuple[State, Metrics]:
        # A function of seed and step only, so that a resumed run draws the same random bits.
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)
        frozen = {**frozen, **state.base}
        if options.noise is not None:
            frozen = options.noise(frozen, named_key(key, "quantization"), rate)
        # Schedule-free optimizers take the gradient at another point than the parameters that are evaluated.
        point = optimizer.point(state.trained, state.optimizer)
        with jax.default_matmul_precision(recipe.matmul_precision):
            summed = gradients(point, frozen, batch, state.step, state.scaling, state.reference)
        # Divide once, at the end: micro-batches and devices differ in their number of targets, so that a mean of their
        # means would weight tokens differently. Gradients are divided in `factor`, together with clipping.
        weight = jnp.maximum(summed.sums.weight, 1).astype(jnp.float32)  # a batch of padding has weight 0
        loss = summed.sums.loss / weight
        norm = _global_norm(summed.gradients) / (weight * summed.loss_factor)  # of the mean loss's gradients
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        taken, level = finite, state.guard
        if options.guard is not None:
            assert level is not None, "the state has no level to judge steps by"
            largest_loss, largest_norm = bounds(level, options.guard)
            taken = finite & (loss <= largest_loss) & (norm <= largest_norm)
            rate = rate * level.rate
        factor = build.clip_factor(norm, options.max_grad_norm) / (weight * summed.loss_factor)

        # A step that is not taken is computed too: the optimizer selects old or new values by `taken` (jnp.where).
        update = build.UpdateInputs(rate, factor, taken, named_key(key, "rounding"))
        with jax.default_matmul_precision(recipe.matmul_precision):
            # A router's correction has a direction from the objective in place of a gradient (`balanced`).
            directions = {**summed.gradients, **summed.sums.directions}
            trained, optimizer_state = optimizer.update(directions, state.optimizer, state.trained, update)
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            options.counts: summed.sums.weight,
            "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
            **{name: value / jnp.maximum(count, 1) for name, (value, count) in summed.sums.metrics.items()},
        }
        if summed.sums.metrics:
            metrics["absent"] = {name: count == 0 for name, (_, count) in summed.sums.metrics.items()}
        if options.guard is not None and level is not None:
            metrics |= {"spike": (finite & ~taken).astype(jnp.int32), "rate_factor": level.rate}
            level = level_after(level, loss, norm, finite, options.guard)
        scaling = state.scaling
        if scaling.loss is not None and recipe.growth_steps is not None:
            new_scale = loss_scale.update_scale(scaling.loss, finite, recipe.growth_steps)
            metrics |= {"loss_scale": scaling.loss.scale, "skipped_steps": new_scale.skipped_steps}
            scaling = scaling._replace(loss=new_scale)
        if recipe.linears is not None:
            scaling = scaling._replace(amax=recipe.linears.extend_history(scaling.amax, summed.amax, taken))
        reference = state.reference
        if reference and options.reference_update_steps:
            due = (state.step + 1) % options.reference_update_steps == 0  # this step counts
            reference = jax.lax.cond(due, partial(cast_like, trained), lambda same: same, reference)
        base = state.base
        if options.merge is not None:
            due = (state.step + 1) % options.merge_interval == 0  # this step counts
            merge = partial(options.merge, step=state.step)
            trained, base = jax.lax.cond(due, merge, lambda *same: same, trained, base)
            if options.reset_on_merge:
                optimizer_state = jax.lax.cond(
                    due, lambda _: optimizer.init(trained), lambda same: same, optimizer_state
                )
        share = 1 - options.ema_decay  # without ema_decay, `state.average` is {}
        average = {name: mean + share * (trained[name] - mean) for name, mean in state.average.items()}
        return State(state.step + 1, trained, optimizer_state, scaling, reference, average, base, level), metrics

    return step


@jax.named_scope("optimizer")
def _global_norm(gradients: Parameters) -> Float[Array, ""]:
    """The global norm of the gradients, in float32; gradients on the host come to the device one layer at a time."""

    def squares(gradient: Array) -> Float[Array, ""]:
        return jnp.sum(jnp.square(to_device(gradient).astype(jnp.float32)))

    return jnp.sqrt(sum(jax.lax.map(squares, g).sum() if is_on_host(g) else squares(g) for g in gradients.values()))


def make_eval_step(
    forward: Forward, objective: Objective
) -> Callable[[Parameters, Parameters, Batch, Parameters], Sums]:
    """Return the evaluation step: (trained, frozen, batch, reference) -> sums. Sums are scalars, never logits."""

    def step(trained: Parameters, frozen: Parameters, batch: Batch, reference: Mapping[str, Any] = {}) -> Sums:
        decoder = forward.bind(trained, frozen)
        reference_decoder = forward.bind(dict(reference), frozen) if reference else None
        return forward.run(partial(_sum_batch, objective, reference_decoder), decoder, batch)

    return step


def _sum_batch(
    objective: Objective, reference: Decoder | None, decoder: Decoder, batch: Batch, call: ForwardOptions
) -> Sums:
    """Return the objective's sums over all micro-batches of a batch."""

    def of_micro_batch(micro: Batch) -> Sums:
        return sum_micro_batch(decoder, micro, objective, call, reference=reference)

    def add(total: Sums, micro: Batch) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, total, of_micro_batch(micro)), None

    sums = jax.eval_shape(of_micro_batch, jax.tree.map(lambda x: x[0], batch))
    return jax.lax.scan(add, jax.tree.map(_zero, sums), batch)[0]
