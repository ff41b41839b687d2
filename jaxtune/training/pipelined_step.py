"""Gradients through a pipeline of stages (`Gradients` of run.step).

Stages run the layers of the pipeline. Embedding, remaining layers and head run on all devices, with positions sharded
over `stage`. A stage keeps the inputs of its chunks and recomputes a chunk in its backward pass.

The schedule (`parallel.pipeline`: GPipe or 1F1B) is a table of ticks, and the step is one scan over it. In each tick,
every stage computes at most one forward and one backward chunk. So the gradients are written out by hand, with jax.vjp
in each chunk: differentiating a scan would put all forward passes before the first backward pass, which is GPipe only.

Shapes: b rows of a micro-batch, s positions of a row, d hidden size. Further axes by name: `stages`; `slots`, the
inputs that a stage keeps for its backward passes; `waiting`, outputs of the last chunk that wait for theirs.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.errors import UserError
from jaxtune.models.decoder import Decoder, Parameters, bind
from jaxtune.models.decoder import Sums as Emitted
from jaxtune.models.forward_options import ForwardOptions
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
from jaxtune.models.score import Batch
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import P, reshard_to
from jaxtune.parallel.pipeline_schedule import Order, by_stage, from_one, schedule, shift_stages
from jaxtune.parallel.random import StepNoise, make_step_noise
from jaxtune.precision.linears import Linears
from jaxtune.precision.recipes import PrecisionRecipe
from jaxtune.training.state import Scaling
from jaxtune.training.step import Gradients, GradientSums, prepare_weights, reshard_gradients, score_micro_batch

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
    """Sums of a part's gradients, and the largest amax of its delayed scales."""

    gradients: Parameters
    amax: dict[str, Array]


class Stages(NamedTuple):
    """The state of the stages between ticks; the leading axis is the stage.

    Attributes:
        inputs: of the chunks, kept for the backward pass.
        arriving: activations from the previous chunk.
        returning: gradients from the next chunk.
        emitted: sums that layers emit, (stages, chunks, micro-batches, layers of a chunk, ...).
        of_emitted: gradients with respect to `emitted`.
    """

    inputs: Float[Array, "stages slots b s d"]
    arriving: Float[Array, "stages b s d"]
    returning: Float[Array, "stages b s d"]
    emitted: Emitted
    of_emitted: Emitted


class Carry(NamedTuple):
    """The carry of the scan over ticks.

    Attributes:
        stages: the state of the stages.
        waiting: gradients with respect to the outputs of the last chunk.
        entered: sums that layers before the pipeline emit, by micro-batch.
        of_entered: gradients with respect to `entered`.
        inside, outside: gradient sums of the pipeline's parameters, and of all others.
        sums: of the objective.
    """

    stages: Stages
    waiting: Float[Array, "waiting b s d"]
    entered: Emitted
    of_entered: Emitted
    inside: Total
    outside: Total
    sums: Sums


def pipelined_gradients(
    graph: nnx.GraphDef,
    objective: Objective,
    recipe: PrecisionRecipe,
    call: ForwardOptions,
    seed: int,
    order: Order,
    places: Mapping[str, jax.P] = {},
    dropout_warmup_steps: int = 0,
) -> Gradients:
    """Gradients of the objective, with micro-batches pipelined through the stages; `call` without noise.

    places: PartitionSpecs of the gradient sums that are sharded differently from their parameters.
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
        key = make_step_noise(seed, step, dropout_warmup_steps)
        magnified = 1.0 if scaling.loss is None else scaling.loss.scale / batch["tokens"][0].size
        decoder = bind(graph, {**frozen, **trained})
        spec, stack = decoder.spec, decoder.stacks[decoder.pipeline].stack
        of_stack, prefix = nnx.graphdef(decoder.stacks[decoder.pipeline]), f"stacks.{decoder.pipeline}."
        head = "embed.weight" if decoder.head is None else "head.weight"
        count, last = len(batch["tokens"]), (stack.stages - 1, stack.chunks - 1)
        plan = schedule(stack.stages, stack.chunks, count, order)

        (trained_in, trained), (frozen_in, frozen) = (_split(values, prefix) for values in (trained, frozen))
        (amax_in, amax), (places_in, places_out) = (_split(values, prefix) for values in (scaling.amax, places))
        # Stages are the leading axis of these gradients, and manual inside of `by_stage`: the specs must not name it.
        places_in = {name: P(None, *place[1:]) for name, place in places_in.items()}
        linears_in, linears = _split_linears(recipe.linears, prefix)
        bound, scales = prepare_weights(linears, trained, frozen, amax, step)
        inside = PipelineWeights(trained_in, frozen_in, {}, {})
        if linears_in is not None:
            on_stage = {name: jax.reshard(history, STAGES) for name, history in amax_in.items()}
            operands = by_stage(linears_in.operands, STAGES, STAGES)({**frozen_in, **trained_in})
            inside = inside._replace(operands=operands, scales=linears_in.scales(on_stage, step))
        seen = seen_by_stages(batch)

        # ---- the three parts of a micro-batch's forward pass ----
        def noisy(micro: Batch, key: StepNoise) -> ForwardOptions:
            return call._replace(noise=noise_of(micro, key))

        def whole(trained: Parameters, scales: dict[str, Array]) -> Decoder:
            # `bind` needs all parameters. The pipeline's layers are not computed through this decoder.
            return bind(graph, {**bound(trained, scales), **_with_prefix(prefix, {**inside.frozen, **inside.trained})})

        def before(trained: Parameters, scales: dict[str, Array], number: Index) -> tuple[Array, Emitted]:
            micro = _at(batch, number)
            return enter(whole(trained, scales), micro, noisy(micro, key))

        def of_chunks(
            part: PipelineWeights, chunk: Index, micro: Batch, key: StepNoise, x: Array
        ) -> tuple[Array, Emitted]:
            weights = {**part.frozen, **part.trained}
            if linears_in is not None:
                weights = linears_in.wrapped(weights, part.operands, part.scales)
            return run_chunk(bind(of_stack, weights), chunk, x, spec, micro, noisy(micro, key))

        def after(
            trained: Parameters, scales: dict[str, Array], x: Array, entered: Emitted, emitted: Emitted, number: Index
        ) -> tuple[Array, Sums]:
            decoder, micro = whole(trained, scales), _at(batch, number)
            hidden = leave(decoder, x, [entered, in_order(emitted)], micro, noisy(micro, key))
            scores = score_micro_batch(decoder, micro, objective, noisy(micro, key), head in trained, hidden)
            with jax.named_scope("loss"):
                sums = objective.loss(scores, micro)
            return sums.loss * magnified, sums

        # ---- a tick of one stage ----
        # Inside of `by_stage` an array has one stage's part: its leading axis has size 1, so leaf[0] and leaf[None].
        def forward(
            part: PipelineWeights, row: Any, x: Array, all: Stages, seen: Batch, key: StepNoise
        ) -> tuple[Array, Stages]:
            (number, chunk, slot), stage = _row_of_stage(row.forward)
            state = jax.tree.map(lambda leaf: leaf[0], all)
            # The first chunk takes the embedding's output, any other chunk the output of the previous one.
            x = jnp.where((stage == 0) & (chunk == 0), x, state.arriving)

            def compute(x: Array) -> tuple[Array, Emitted]:
                return of_chunks(slice_chunk(part, chunk, stack.chunks), chunk, _at(seen, number), key, x)

            # number -1: the stage is idle in this tick (the bubble of the pipeline) and skips the computation.
            y, emitted = jax.lax.cond(number >= 0, compute, lambda x: zeros_like(jax.eval_shape(compute, x)), x)
            # An idle stage (number -1) writes back the input that is in the slot.
            kept_input = jnp.where(number >= 0, x, _at(state.inputs, slot))
            state = state._replace(
                inputs=jax.lax.dynamic_update_index_in_dim(state.inputs, kept_input, slot, 0),
                arriving=shift_stages(y, stack.stages),
                emitted=jax.tree.map(lambda all, one: add_at(all, one, chunk, number), state.emitted, emitted),
            )
            leaving = _broadcast_leaving(row.leaving, y, (stage == last[0]) & (chunk == last[1]))
            return leaving, jax.tree.map(lambda leaf: leaf[None], state)

        def backward(
            part: PipelineWeights, row: Any, waiting: Array, total: Total, all: Stages, seen: Batch, key: StepNoise
        ) -> tuple[Array, Total, Stages]:
            (number, chunk, slot), stage = _row_of_stage(row.backward)
            state = jax.tree.map(lambda leaf: leaf[0], all)
            is_last = (stage == last[0]) & (chunk == last[1])
            # The last chunk takes its gradient from the head, any other chunk from the next one.
            dy = jnp.where(is_last, _at(waiting, number % plan.waiting), state.returning)

            def compute(total: Total) -> tuple[Total, Array]:
                given = slice_chunk(part, chunk, stack.chunks)

                def of(trained: Parameters, scales: dict[str, Array], x: Array) -> tuple[Array, Emitted]:
                    return of_chunks(given._replace(trained=trained, scales=scales), chunk, _at(seen, number), key, x)

                # vjp of the saved input: this recomputes the chunk's forward pass.
                _, transposed = jax.vjp(of, given.trained, given.scales, _at(state.inputs, slot))
                *parts, dx = transposed((dy, _at(_at(state.of_emitted, chunk), number)))
                so_far = slice_chunk(total, chunk, stack.chunks)
                return _with_chunk(total, _accumulate(so_far, Total(*parts), places_in), chunk, stack.chunks), dx

            total, dx = jax.lax.cond(number >= 0, compute, lambda total: (total, jnp.zeros_like(dy)), total)
            state = state._replace(returning=shift_stages(dx, stack.stages, by=-1))
            back = _broadcast_leaving(row.returning, dx, (stage == 0) & (chunk == 0))
            return back, total, jax.tree.map(lambda leaf: leaf[None], state)

        # ---- a tick: embedding, stages forward, head, stages backward, embedding backward ----
        forward_of_all = by_stage(forward, (STAGES, P(), P(), STAGES, P(), P()), (P(), STAGES))
        backward_of_all = by_stage(backward, (STAGES, P(), P(), STAGES, STAGES, P(), P()), (P(), STAGES, STAGES))

        def tick(carry: Carry, row: Any) -> tuple[Carry, None]:
            def take() -> tuple[Array, Emitted]:
                return before(trained, scales, row.entering)

            x, entered = jax.lax.cond(row.entering >= 0, take, lambda: zeros_like(jax.eval_shape(take)))
            entered = jax.tree.map(lambda all, one: add_at(all, one, row.entering), carry.entered, entered)
            leaving, stages = forward_of_all(inside, row, x, carry.stages, seen, key)
            carry = carry._replace(stages=stages, entered=entered)
            # The head's gradient is ready before the stages' backward pass of this tick: in 1F1B the last stage begins
            # the backward pass of a micro-batch in the tick of its forward pass.
            carry = jax.lax.cond(row.leaving >= 0, score, lambda carry, *_: carry, carry, leaving, row.leaving)
            dx, total, stages = backward_of_all(inside, row, carry.waiting, carry.inside, carry.stages, seen, key)
            carry = carry._replace(inside=total, stages=stages)
            return jax.lax.cond(row.returning >= 0, embed, lambda carry, *_: carry, carry, dx, row.returning), None

        def score(carry: Carry, x: Array, number: Index) -> Carry:
            emitted, entered = _at(carry.stages.emitted, number, axis=2), _at(carry.entered, number)
            (_, sums), (*parts, dx, of_entered, of_emitted) = jax.value_and_grad(after, range(5), has_aux=True)(
                trained, scales, x, entered, emitted, number
            )
            put = partial(jax.lax.dynamic_update_index_in_dim, index=number)
            of_emitted = jax.tree.map(partial(put, axis=2), carry.stages.of_emitted, of_emitted)
            return carry._replace(
                stages=carry.stages._replace(of_emitted=of_emitted),
                waiting=jax.lax.dynamic_update_index_in_dim(carry.waiting, dx, number % plan.waiting, 0),
                of_entered=jax.tree.map(partial(put, axis=0), carry.of_entered, of_entered),
                outside=_accumulate(carry.outside, Total(*parts), places_out),
                sums=jax.tree.map(jnp.add, carry.sums, sums),
            )

        def embed(carry: Carry, dx: Array, number: Index) -> Carry:
            _, transposed = jax.vjp(partial(before, number=number), trained, scales)
            parts = transposed((dx, _at(carry.of_entered, number)))
            return carry._replace(outside=_accumulate(carry.outside, Total(*parts), places_out))

        # ---- the step ----
        def nothing(part: PipelineWeights, seen: Batch, key: StepNoise, x: Array) -> Emitted:
            """Zeros for the sums that a stage emits, in all chunks and micro-batches."""
            first = jnp.int32(0)
            shapes = jax.eval_shape(of_chunks, slice_chunk(part, first, stack.chunks), first, _at(seen, 0), key, x)[1]
            return zeros_like(jax.tree.map(lambda leaf: _with_leading(leaf, 1, stack.chunks, count), shapes))

        @jax.named_scope("gradient_accumulation")
        def start(part: PipelineWeights, places: Mapping[str, jax.P]) -> Total:
            zero = jax.tree.map(lambda p: jnp.zeros_like(p, recipe.gradient_dtype), part.trained)
            return Total(reshard_gradients(zero, places), jax.tree.map(jnp.zeros_like, part.scales))

        x, entered = zeros_like(jax.eval_shape(before, trained, scales, jnp.int32(0)))
        emitted = by_stage(nothing, (STAGES, P(), P(), P()), STAGES)(inside, seen, key, x)
        of_micro = x, entered, _at(emitted, 0, axis=2)
        _, sums = jax.eval_shape(after, trained, scales, *of_micro, jnp.int32(0))
        entered = zeros_like(jax.tree.map(lambda leaf: _with_leading(jax.typeof(leaf), count), entered))
        of_stages = zeros_like(_with_leading(jax.typeof(x), stack.stages, place="stage"))
        inputs = zeros_like(_with_leading(jax.typeof(x), stack.stages, plan.slots, place="stage"))
        begin = Carry(
            stages=Stages(inputs, of_stages, of_stages, emitted, emitted),
            waiting=zeros_like(_with_leading(jax.typeof(x), plan.waiting)),
            entered=entered,
            of_entered=entered,
            inside=by_stage(partial(start, places=places_in), STAGES, STAGES)(inside),
            outside=start(PipelineWeights(trained, frozen, {}, scales), places_out),
            sums=zeros_like(sums),
        )
        done, _ = jax.lax.scan(tick, begin, jax.tree.map(jnp.asarray, plan.ticks))

        def where_trained(name: str, direction: Array) -> Array:
            inner = inside.trained.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            return reshard_to(direction, None if inner is None else jax.typeof(inner).sharding.spec)

        directions = {name: where_trained(name, direction) for name, direction in done.sums.directions.items()}
        amax = {name: jax.reshard(value, P()) for name, value in done.inside.amax.items()}
        return GradientSums(
            {**done.outside.gradients, **_with_prefix(prefix, done.inside.gradients)},
            done.sums._replace(directions=directions),
            {**done.outside.amax, **_with_prefix(prefix, amax)},
            magnified,
        )

    return gradients


def _split(values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values whose names have the prefix, with the prefix removed; and the other values."""
    inside = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return inside, {name: value for name, value in values.items() if not name.startswith(prefix)}


def _with_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _split_linears(linears: Linears | None, prefix: str) -> tuple[Linears | None, Linears | None]:
    if linears is None:
        return None, None
    inside, outside = _split(linears.parameters, prefix)
    return dataclasses.replace(linears, parameters=inside), dataclasses.replace(linears, parameters=outside)


def _at(tree: Any, index: Index | int, axis: int = 0) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False), tree)


def _row_of_stage(columns: Any) -> tuple[Any, Index]:
    """The schedule's entries for this stage, and the stage's number."""
    stage = jax.lax.axis_index("stage")
    return type(columns)(*(column[stage] for column in columns)), stage


def _broadcast_leaving(leaving: Index, x: Array, is_own: Array) -> Array:
    """Copy x from the stage where `is_own` to all stages; zeros in a tick in which no micro-batch leaves."""
    return jax.lax.cond(leaving >= 0, from_one, lambda x, _: jnp.zeros_like(x), x, is_own)


@jax.named_scope("gradient_accumulation")
def _with_chunk(total: Total, one_chunk: Total, chunk: Index, chunks: int) -> Total:
    if chunks == 1:
        return one_chunk
    return jax.tree.map(
        lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, chunk * len(one), 0), total, one_chunk
    )


@jax.named_scope("gradient_accumulation")
def _accumulate(total: Total, micro: Total, places: Mapping[str, jax.P]) -> Total:
    summed = jax.tree.map(
        lambda a, b: (a + b).astype(a.dtype), total.gradients, reshard_gradients(micro.gradients, places)
    )
    return Total(summed, jax.tree.map(jnp.maximum, total.amax, micro.amax))


def _with_leading(leaf: Any, *sizes: int, place: str | None = None) -> jax.ShapeDtypeStruct:
    """The leaf's shape behind new leading axes of `sizes`, the first one sharded over `place`."""
    spec = P(place, *(None,) * (len(sizes) - 1), *leaf.sharding.spec)
    return jax.ShapeDtypeStruct((*sizes, *leaf.shape), leaf.dtype, sharding=leaf.sharding.update(spec=spec))
