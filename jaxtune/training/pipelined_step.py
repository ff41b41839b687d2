"""Gradients through a pipeline of stages (`Gradients` of training.step).

Stages run the layers of the pipeline. Embedding, remaining layers and head run on all devices, with positions sharded
over `stage`. A stage keeps the inputs of its chunks and recomputes a chunk in its backward pass.

The schedule (`parallel.pipeline`: GPipe or 1F1B) is a table of ticks, and the step is one scan over it. In each tick,
every stage computes at most one forward and one backward chunk. So the gradients are written out by hand, with jax.vjp
in each chunk: differentiating a scan would put all forward passes before the first backward pass, which is GPipe only.

Shapes: b rows of a micro-batch, s positions of a row, d hidden size. Further axes by name: `stages`; `slots`, the
inputs that a stage keeps for its backward passes; `waiting`, outputs of the last chunk that wait for theirs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.errors import UserError
from jaxtune.models.decoder import Decoder, Parameters, bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import Batch
from jaxtune.models.pipeline import (
    STAGES,
    add_at,
    enter,
    in_order,
    leave,
    noise_of,
    run_chunk,
    seen_by_stages,
    slice_chunk,
    zeros_like,
)
from jaxtune.models.stack import Sums as Emitted
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.models.structure.stack_spec import StackSpec
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import P, reshard_to, take_element
from jaxtune.parallel.pipeline_schedule import Schedule, by_stage, from_one, schedule, shift_stages
from jaxtune.parallel.random import StepNoise, make_step_noise
from jaxtune.precision.linears import StepWeights
from jaxtune.training.state import Scaling
from jaxtune.training.step import (
    Forward,
    Gradients,
    GradientSums,
    StepOptions,
    add_gradients,
    prepare_weights,
    reshard_gradients,
    shard_gradients,
    sum_micro_batch,
)
from pallas_kernels import cost

Index = Int[Array, ""]


class PipelineWeights(NamedTuple):
    """The parameters of the pipeline, or all others.

    Attributes:
        trained, frozen: by name.
        operands: low-precision operands, in place of some weights.
        scales: delayed scales.
    """

    trained: Parameters
    frozen: Parameters
    operands: dict[str, Any]
    scales: dict[str, Array]


class Total(NamedTuple):
    """Gradient sums of the parameters inside or outside of the pipeline, and the largest amax of each delayed scale."""

    gradients: Parameters
    amax: dict[str, Array]


class Stages(NamedTuple):
    """The state of the stages between ticks; the leading axis is the stage.

    Attributes:
        inputs: of the chunks, kept for the backward pass.
        arriving: activations from the previous chunk.
        returning: gradients from the next chunk.
        emitted: sums that layers emit, (stages, chunks, micro-batches, layers of a chunk, ...).
        d_emitted: gradients with respect to `emitted`.
    """

    inputs: Float[Array, "stages slots b s d"]
    arriving: Float[Array, "stages b s d"]
    returning: Float[Array, "stages b s d"]
    emitted: Emitted
    d_emitted: Emitted


class Carry(NamedTuple):
    """The carry of the scan over ticks.

    Attributes:
        stages: the state of the stages.
        waiting: gradients with respect to the outputs of the last chunk.
        entered: sums that layers before the pipeline emit, by micro-batch.
        d_entered: gradients with respect to `entered`.
        inside, outside: gradient sums of the pipeline's parameters, and of all others.
        sums: of the objective.
    """

    stages: Stages
    waiting: Float[Array, "waiting b s d"]
    entered: Emitted
    d_entered: Emitted
    inside: Total
    outside: Total
    sums: Sums


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a model without values, as its stages see it.

    Attributes:
        graph: the pipeline's layers without values.
        stack, spec: their shape, and the whole model's.
        plan: the schedule of a step.
        linears: the layers in low precision.
        gradient_specs: PartitionSpecs of the gradient sums on the devices of a stage.
        call: options of the forward pass, without noise.
    """

    graph: nnx.GraphDef
    stack: StackSpec
    spec: ModelSpec
    plan: Schedule
    linears: StepWeights | None
    gradient_specs: Mapping[str, jax.P]
    call: ForwardOptions

    def run(self, part: PipelineWeights, chunk: Index, micro: Batch, key: StepNoise, x: Array) -> tuple[Array, Emitted]:
        """On a stage: run x through one of its chunks, whose parameters are `part`."""
        weights = {**part.frozen, **part.trained}
        if self.linears is not None:
            weights = self.linears.wrap_weights(weights, part.operands, part.scales)
        call = self.call._replace(noise=noise_of(micro, key))
        return run_chunk(bind(self.graph, weights), chunk, x, self.spec, micro, call)


@dataclass(frozen=True)
class PipelinedStep:
    """A step as all devices see it, outside of the stages.

    Attributes:
        pipeline: what runs in the stages.
        forward, objective: of the whole model.
        factor: loss scale (`GradientSums.loss_factor`).
        key: the randomness of the step.
        prefix: of the names of the pipeline's parameters.
        weights_of: (trained, scales) -> weights outside of the pipeline.
        inside, outside: the pipeline's parameters, without the prefix, and all others.
        gradient_specs: PartitionSpecs of the gradient sums outside of the pipeline.
        batch: all micro-batches.
        seen: their columns that layers use, in the layout inside the stages.
    """

    pipeline: Pipeline
    forward: Forward
    objective: Objective
    factor: float | Float[Array, ""]
    key: StepNoise
    prefix: str
    weights_of: Callable[[Parameters, dict[str, Array]], Parameters]
    inside: PipelineWeights
    outside: PipelineWeights
    gradient_specs: Mapping[str, jax.P]
    batch: Batch
    seen: Batch

    def decoder(self, trained: Parameters, scales: dict[str, Array]) -> Decoder:
        """Return the whole decoder; the pipeline's layers, which `bind` needs, are not computed through it."""
        inside = _with_prefix(self.prefix, {**self.inside.frozen, **self.inside.trained})
        return bind(self.forward.graph, {**self.weights_of(trained, scales), **inside})

    def call(self, micro: Batch) -> ForwardOptions:
        """Return the options of a micro-batch's forward pass."""
        return self.forward.call._replace(noise=noise_of(micro, self.key))


def pipelined_gradients(forward: Forward, objective: Objective, options: StepOptions = StepOptions()) -> Gradients:
    """Gradients of the objective, with micro-batches pipelined through the stages.

    Raises UserError if the objective compares with a reference.
    """
    if objective.reference:
        raise UserError(
            "mesh.stage: not available for an objective that computes a reference in each step; set "
            "preference.precompute_reference=True, or take mesh.fsdp"
        )

    def gradients(
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        step: Array,
        scaling: Scaling = Scaling(),
        reference: Mapping[str, Any] = {},
    ) -> GradientSums:
        key = make_step_noise(options.seed, step, options.dropout_warmup_steps)
        factor = 1.0 if scaling.loss is None else scaling.loss.scale / batch["tokens"][0].size
        decoder = bind(forward.graph, {**frozen, **trained})
        assert decoder.pipeline is not None
        layers, prefix = decoder.stacks[decoder.pipeline], f"stacks.{decoder.pipeline}."

        (trained_in, trained), (frozen_in, frozen) = (_split(values, prefix) for values in (trained, frozen))
        (amax_in, amax), (specs_in, specs) = (
            _split(values, prefix) for values in (scaling.amax, options.gradient_specs)
        )
        linears_in, linears = _split_linears(forward.recipe.linears, prefix)
        weights_of, scales = prepare_weights(linears, trained, frozen, Scaling(amax=amax), step)
        inside = PipelineWeights(shard_gradients(linears_in, trained_in, specs_in), frozen_in, {}, {})
        outside = PipelineWeights(shard_gradients(linears, trained, specs), frozen, {}, scales)
        if linears_in is not None:
            # A history has a leading axis of layers: each stage takes the entries of its own.
            on_stage = {name: jax.reshard(history, STAGES) for name, history in amax_in.items()}
            operands = by_stage(linears_in.operands, STAGES, STAGES)({**frozen_in, **trained_in})
            inside = inside._replace(operands=operands, scales=linears_in.scales(on_stage, step))

        # Stages are the gradients' leading axis, and manual inside of `by_stage`: the specs must not name it.
        specs_in = {name: P(None, *spec[1:]) for name, spec in specs_in.items()}
        stack = layers.stack
        plan = schedule(stack.stages, stack.chunks, len(batch["tokens"]), options.order)
        graph, seen = nnx.graphdef(layers), seen_by_stages(batch)
        pipeline = Pipeline(graph, stack, decoder.spec, plan, linears_in, specs_in, forward.call)
        pipelined = PipelinedStep(
            pipeline, forward, objective, factor, key, prefix, weights_of, inside, outside, specs, batch, seen
        )
        final, _ = jax.lax.scan(partial(_tick, pipelined), _begin(pipelined), jax.tree.map(jnp.asarray, plan.ticks))

        # A direction is computed outside of the stages; its parameter may be sharded over them.
        def reshard_direction(name: str, direction: Array) -> Array:
            inner = trained_in.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            return reshard_to(direction, None if inner is None else jax.typeof(inner).sharding.spec)

        directions = {name: reshard_direction(name, direction) for name, direction in final.sums.directions.items()}
        amax = {name: jax.reshard(value, P()) for name, value in final.inside.amax.items()}
        return GradientSums(
            {**final.outside.gradients, **_with_prefix(prefix, final.inside.gradients)},
            final.sums._replace(directions=directions),
            {**final.outside.amax, **_with_prefix(prefix, amax)},
            factor,
        )

    return gradients


# ---- the carry before the first tick ----
def _begin(step: PipelinedStep) -> Carry:
    """Return a carry of zeros. Objectives and layers differ in their sums, whose shapes come from one micro-batch."""
    stack, plan, part, count = step.pipeline.stack, step.pipeline.plan, step.outside, len(step.batch["tokens"])
    x, entered = zeros_like(jax.eval_shape(partial(_run_before_stages, step), part.trained, part.scales, jnp.int32(0)))
    zero_emitted = by_stage(partial(_zero_emitted, step.pipeline, count), (STAGES, P(), P(), P()), STAGES)
    emitted = zero_emitted(step.inside, step.seen, step.key, x)
    of_micro = x, entered, take_element(emitted, 0, axis=2)  # `emitted` has micro-batches on axis 2
    _, sums = jax.eval_shape(partial(_run_after_stages, step), part.trained, part.scales, *of_micro, jnp.int32(0))
    # Leading axes: micro-batches for `entered`; stages, and slots, for the state of the stages.
    entered = zeros_like(jax.tree.map(lambda leaf: _with_leading(jax.typeof(leaf), count), entered))
    of_stages = zeros_like(_with_leading(jax.typeof(x), stack.stages, axis="stage"))
    inputs = zeros_like(_with_leading(jax.typeof(x), stack.stages, plan.slots, axis="stage"))
    zeros = partial(_zero_total, step.forward.recipe.gradient_dtype)
    return Carry(
        stages=Stages(inputs, of_stages, of_stages, emitted, emitted),
        waiting=zeros_like(_with_leading(jax.typeof(x), plan.waiting)),
        entered=entered,
        d_entered=entered,
        inside=by_stage(partial(zeros, step.pipeline.gradient_specs), STAGES, STAGES)(step.inside),
        outside=zeros(step.gradient_specs, part),
        sums=zeros_like(sums),
    )


def _zero_emitted(
    pipeline: Pipeline, count: int, part: PipelineWeights, seen: Batch, key: StepNoise, x: Array
) -> Emitted:
    """Zeros for the sums that a stage emits, in all chunks and micro-batches."""
    first, chunks = jnp.int32(0), pipeline.stack.chunks
    shapes = jax.eval_shape(pipeline.run, slice_chunk(part, first, chunks), first, take_element(seen, 0), key, x)[1]
    return zeros_like(jax.tree.map(lambda leaf: _with_leading(leaf, 1, chunks, count), shapes))


@jax.named_scope("gradient_accumulation")
def _zero_total(dtype: Any, specs: Mapping[str, jax.P], part: PipelineWeights) -> Total:
    zero = jax.tree.map(lambda p: jnp.zeros_like(p, dtype), part.trained)
    return Total(reshard_gradients(zero, specs), jax.tree.map(jnp.zeros_like, part.scales))


# ---- a tick: embedding, stages forward, head, stages backward, embedding backward ----
def _tick(step: PipelinedStep, carry: Carry, row: Any) -> tuple[Carry, None]:
    """Advance all stages by one tick; row: the work of this tick, a row of `Ticks`."""
    forward = by_stage(partial(_forward, step.pipeline), (STAGES, P(), P(), STAGES, P(), P()), (P(), STAGES))
    specs = (STAGES, P(), P(), STAGES, STAGES, P(), P()), (P(), STAGES, STAGES)
    backward = by_stage(partial(_backward, step.pipeline), *specs)

    def enter_micro_batch() -> tuple[Array, Emitted]:
        return _run_before_stages(step, step.outside.trained, step.outside.scales, row.entering)

    ticks = step.pipeline.plan.ticks
    # A conditional, not a select: ticks in which no micro-batch enters do not pay for the embedding.
    x, entered = _cond(
        ticks.entering, row.entering, enter_micro_batch, lambda: zeros_like(jax.eval_shape(enter_micro_batch))
    )
    entered = jax.tree.map(lambda all, one: add_at(all, one, row.entering), carry.entered, entered)
    leaving, stages = forward(step.inside, row, x, carry.stages, step.seen, step.key)
    carry = carry._replace(stages=stages, entered=entered)
    # The head's gradient is ready before the stages' backward pass of this tick: in 1F1B the last stage begins the
    # backward pass of a micro-batch in the tick of its forward pass.
    carry = _cond(ticks.leaving, row.leaving, partial(_score, step), _unchanged, carry, leaving, row.leaving)
    dx, total, stages = backward(step.inside, row, carry.waiting, carry.inside, carry.stages, step.seen, step.key)
    carry = carry._replace(inside=total, stages=stages)
    carry = _cond(ticks.returning, row.returning, partial(_embed, step), _unchanged, carry, dx, row.returning)
    return carry, None


def _unchanged(carry: Carry, *_: Array) -> Carry:
    return carry


def _score(step: PipelinedStep, carry: Carry, x: Array, number: Index) -> Carry:
    """Add the loss of a micro-batch that leaves the last stage, and the gradients from the loss to this output."""
    emitted, entered = take_element(carry.stages.emitted, number, axis=2), take_element(carry.entered, number)
    # With respect to all arguments but `number`.
    (_, sums), (*parts, dx, d_entered, d_emitted) = jax.value_and_grad(
        partial(_run_after_stages, step), range(5), has_aux=True
    )(step.outside.trained, step.outside.scales, x, entered, emitted, number)
    put = partial(jax.lax.dynamic_update_index_in_dim, index=number)
    d_emitted = jax.tree.map(partial(put, axis=2), carry.stages.d_emitted, d_emitted)
    slot = number % step.pipeline.plan.waiting  # a ring buffer of `waiting` gradients
    return carry._replace(
        stages=carry.stages._replace(d_emitted=d_emitted),
        waiting=jax.lax.dynamic_update_index_in_dim(carry.waiting, dx, slot, 0),
        d_entered=jax.tree.map(partial(put, axis=0), carry.d_entered, d_entered),
        outside=_accumulate(carry.outside, Total(*parts), step.gradient_specs),
        sums=jax.tree.map(jnp.add, carry.sums, sums),
    )


def _embed(step: PipelinedStep, carry: Carry, dx: Array, number: Index) -> Carry:
    """Add the gradients from the first stage's input to the embedding."""
    # This recomputes the embedding, whose forward pass was in an earlier tick.
    _, transposed = jax.vjp(partial(_run_before_stages, step, number=number), step.outside.trained, step.outside.scales)
    parts = transposed((dx, take_element(carry.d_entered, number)))
    return carry._replace(outside=_accumulate(carry.outside, Total(*parts), step.gradient_specs))


# ---- a micro-batch before and after the stages ----
def _run_before_stages(
    step: PipelinedStep, trained: Parameters, scales: dict[str, Array], number: Index
) -> tuple[Array, Emitted]:
    micro = take_element(step.batch, number)
    return enter(step.decoder(trained, scales), micro, step.call(micro))


def _run_after_stages(
    step: PipelinedStep,
    trained: Parameters,
    scales: dict[str, Array],
    x: Array,
    entered: Emitted,
    emitted: Emitted,
    number: Index,
) -> tuple[Array, Sums]:
    decoder, micro = step.decoder(trained, scales), take_element(step.batch, number)
    # Sums in the order of layers: those before the pipeline, the pipeline's, and in `leave` those after it.
    hidden = leave(decoder, x, [entered, in_order(emitted)], micro, step.call(micro))
    sums = sum_micro_batch(decoder, micro, step.objective, step.call(micro), trained, hidden)
    return sums.loss * step.factor, sums


# ---- a tick of one stage ----
# Inside of `by_stage` an array has one stage's part: its leading axis has size 1, so leaf[0] and leaf[None].
def _forward(
    pipeline: Pipeline, part: PipelineWeights, row: Any, x: Array, stages: Stages, seen: Batch, key: StepNoise
) -> tuple[Array, Stages]:
    """Run one forward pass of a chunk, or none. Return what leaves the last chunk, on all stages, and the new state."""
    ((number, chunk, slot), stage), stack = _row_of_stage(row.forward), pipeline.stack
    state = jax.tree.map(lambda leaf: leaf[0], stages)
    # The first chunk takes the embedding's output, any other chunk the output of the previous one.
    x = jnp.where((stage == 0) & (chunk == 0), x, state.arriving)

    def compute(x: Array) -> tuple[Array, Emitted]:
        return pipeline.run(slice_chunk(part, chunk, stack.chunks), chunk, take_element(seen, number), key, x)

    # number -1: the stage is idle in this tick (the bubble of the pipeline) and skips the computation.
    ticks = pipeline.plan.ticks
    y, emitted = _cond(ticks.forward.micro_batch, number, compute, lambda x: zeros_like(jax.eval_shape(compute, x)), x)
    # An idle stage (number -1) writes back the input that is in the slot.
    # (b, s, d), for the vjp of this chunk in a later tick.
    kept_input = jnp.where(number >= 0, x, take_element(state.inputs, slot))
    state = state._replace(
        inputs=jax.lax.dynamic_update_index_in_dim(state.inputs, kept_input, slot, 0),
        arriving=shift_stages(y, stack.stages),  # the next stage's input in the next tick
        emitted=jax.tree.map(lambda all, one: add_at(all, one, chunk, number), state.emitted, emitted),
    )
    leaving = _broadcast_leaving(
        ticks.leaving, row.leaving, y, (stage == stack.stages - 1) & (chunk == stack.chunks - 1)
    )
    return leaving, jax.tree.map(lambda leaf: leaf[None], state)


def _backward(
    pipeline: Pipeline,
    part: PipelineWeights,
    row: Any,
    waiting: Array,
    total: Total,
    stages: Stages,
    seen: Batch,
    key: StepNoise,
) -> tuple[Array, Total, Stages]:
    """Run one backward pass of a chunk, or none.

    Return the gradient with respect to the first chunk's input, on all stages; the gradient sums; and the new state.
    """
    ((number, chunk, slot), stage), stack = _row_of_stage(row.backward), pipeline.stack
    state = jax.tree.map(lambda leaf: leaf[0], stages)
    is_last = (stage == stack.stages - 1) & (chunk == stack.chunks - 1)
    # The last chunk takes its gradient from the head, any other chunk from the next one.
    dy = jnp.where(is_last, take_element(waiting, number % pipeline.plan.waiting), state.returning)

    def compute(total: Total) -> tuple[Total, Array]:
        given = slice_chunk(part, chunk, stack.chunks)

        def of(trained: Parameters, scales: dict[str, Array], x: Array) -> tuple[Array, Emitted]:
            return pipeline.run(
                given._replace(trained=trained, scales=scales), chunk, take_element(seen, number), key, x
            )

        # vjp of the saved input: this recomputes the chunk's forward pass.
        _, transposed = jax.vjp(of, given.trained, given.scales, take_element(state.inputs, slot))
        # `d_emitted` is (chunks, micro-batches, layers of a chunk, ...) here.
        *parts, dx = transposed((dy, take_element(take_element(state.d_emitted, chunk), number)))
        so_far = slice_chunk(total, chunk, stack.chunks)
        return _with_chunk(total, _accumulate(so_far, Total(*parts), pipeline.gradient_specs), chunk, stack.chunks), dx

    ticks = pipeline.plan.ticks
    total, dx = _cond(ticks.backward.micro_batch, number, compute, lambda total: (total, jnp.zeros_like(dy)), total)
    state = state._replace(returning=shift_stages(dx, stack.stages, by=-1))
    back = _broadcast_leaving(ticks.returning, row.returning, dx, (stage == 0) & (chunk == 0))
    return back, total, jax.tree.map(lambda leaf: leaf[None], state)


def _split(values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values whose names have the prefix, with the prefix removed; and the other values."""
    inside = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return inside, {name: value for name, value in values.items() if not name.startswith(prefix)}


def _with_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _split_linears(linears: StepWeights | None, prefix: str) -> tuple[StepWeights | None, StepWeights | None]:
    if linears is None:
        return None, None
    inside, outside = _split(linears.parameters, prefix)
    return linears.of(inside), linears.of(outside)


def _row_of_stage(columns: Any) -> tuple[Any, Index]:
    """The schedule's entries for this stage, and the stage's number."""
    stage = jax.lax.axis_index("stage")
    return type(columns)(*(column[stage] for column in columns)), stage  # columns are (stages,)


def _cond(
    numbers: Int[np.ndarray, "ticks *stages"],
    number: Index,
    compute: Callable[..., Any],
    otherwise: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Call `compute` if there is a micro-batch in this tick (on this stage), else `otherwise`; -1: none.

    Stages wait for one another in each tick, so a computation takes time in the ticks in which any stage has it.
    """
    busy = (numbers >= 0).reshape(len(numbers), -1).any(1)
    with cost.taken(int(np.count_nonzero(busy)), len(numbers)):
        return jax.lax.cond(number >= 0, compute, otherwise, *operands)


def _broadcast_leaving(numbers: Int[np.ndarray, " ticks"], number: Index, x: Array, is_own: Array) -> Array:
    """Copy x from the stage where `is_own` to all stages; zeros in a tick in which no micro-batch leaves."""
    return _cond(numbers, number, from_one, lambda x, _: jnp.zeros_like(x), x, is_own)


@jax.named_scope("gradient_accumulation")
def _with_chunk(total: Total, one_chunk: Total, chunk: Index, chunks: int) -> Total:
    """Put a chunk's new sums into its stage's."""
    if chunks == 1:
        return one_chunk
    # A stage's layers are ordered by chunk.
    return jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, chunk * len(one), 0), total, one_chunk
    )


@jax.named_scope("gradient_accumulation")
def _accumulate(total: Total, micro: Total, specs: Mapping[str, jax.P]) -> Total:
    summed = add_gradients(total.gradients, micro.gradients, specs)
    return Total(summed, jax.tree.map(jnp.maximum, total.amax, micro.amax))


def _with_leading(leaf: Any, *sizes: int, axis: str | None = None) -> jax.ShapeDtypeStruct:
    """The leaf's shape behind new leading axes of `sizes`, the first one sharded over `axis`."""
    spec = P(axis, *(None,) * (len(sizes) - 1), *leaf.sharding.spec)
    return jax.ShapeDtypeStruct((*sizes, *leaf.shape), leaf.dtype, sharding=leaf.sharding.update(spec=spec))
