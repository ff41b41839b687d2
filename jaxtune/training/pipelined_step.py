"""Gradients through a pipeline of stages (`Gradients` of run.step).

Its layers are computed by stages, everything else by all devices, whose axis of stages shards positions there. A stage
holds the inputs of its chunks, and computes a chunk again in its backward pass.
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
from jaxtune.models.forward_options import Call
from jaxtune.models.pipeline import (
    STAGES,
    added,
    enter,
    in_order,
    leave,
    noise_of,
    of_chunk,
    seen_by_stages,
    through,
    zeros_like,
)
from jaxtune.models.score import Batch
from jaxtune.objectives.objective import Objective, Sums
from jaxtune.parallel.layout import P, moved
from jaxtune.parallel.pipeline_schedule import Order, by_stage, from_one, schedule, sent
from jaxtune.parallel.random import Source, source_of
from jaxtune.precision.linears import Linears
from jaxtune.precision.recipes import Recipe
from jaxtune.training.state import Scaling
from jaxtune.training.step import Gradients, Summed, placed, scores_of, weights_of_step

Index = Int[Array, ""]


class Part(NamedTuple):
    """The parameters of the pipeline, or all others, and what low-precision products take in place of some."""

    trained: Parameters
    frozen: Parameters
    operands: dict[str, Any]
    scales: dict[str, Array]


class Total(NamedTuple):
    """What is summed of a part's gradients, and the largest amax of its delayed scales."""

    gradients: Parameters
    amax: dict[str, Array]


class Stages(NamedTuple):
    """What stages have between ticks; they are the leading axis."""

    inputs: Float[Array, "stages slots b s d"]
    arriving: Float[Array, "stages b s d"]  # from the chunk before
    returning: Float[Array, "stages b s d"]  # gradients from the chunk after
    emitted: Emitted  # (stages, chunks, micro-batches, layers of a chunk, ...)
    of_emitted: Emitted  # gradients


class Carry(NamedTuple):
    """Between ticks."""

    stages: Stages
    waiting: Float[Array, "waiting b s d"]  # gradients of what the last chunk made
    entered: Emitted  # of each micro-batch, by layers before the pipeline
    of_entered: Emitted  # gradients
    inside: Total
    outside: Total
    sums: Sums


def pipelined_gradients(
    graph: nnx.GraphDef,
    objective: Objective,
    recipe: Recipe,
    call: Call,
    seed: int,
    order: Order,
    places: Mapping[str, jax.P] = {},
    dropout_warmup_steps: int = 0,
) -> Gradients:
    """Gradients of the objective, micro-batches one after the other through the stages; `call` without noise.

    places: PartitionSpecs in which gradients are summed, where they are not the parameters' own.
    Raises UserError for an objective that compares with a reference.
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
    ) -> Summed:
        key = source_of(seed, step, dropout_warmup_steps)
        magnified = 1.0 if scaling.loss is None else scaling.loss.scale / batch["tokens"][0].size
        decoder = bind(graph, {**frozen, **trained})
        spec, stack = decoder.spec, decoder.stacks[decoder.pipeline].stack
        of_stack, prefix = nnx.graphdef(decoder.stacks[decoder.pipeline]), f"stacks.{decoder.pipeline}."
        head = "embed.weight" if decoder.head is None else "head.weight"
        count, last = len(batch["tokens"]), (stack.stages - 1, stack.chunks - 1)
        plan = schedule(stack.stages, stack.chunks, count, order)

        (trained_in, trained), (frozen_in, frozen) = (_parted(values, prefix) for values in (trained, frozen))
        (amax_in, amax), (places_in, places_out) = (_parted(values, prefix) for values in (scaling.amax, places))
        places_in = {name: P(None, *place[1:]) for name, place in places_in.items()}
        linears_in, linears = _linears_parted(recipe.linears, prefix)
        bound, scales = weights_of_step(linears, trained, frozen, amax, step)
        inside = Part(trained_in, frozen_in, {}, {})
        if linears_in is not None:
            on_stage = {name: jax.reshard(history, STAGES) for name, history in amax_in.items()}
            operands = by_stage(linears_in.operands, STAGES, STAGES)({**frozen_in, **trained_in})
            inside = inside._replace(operands=operands, scales=linears_in.scales(on_stage, step))
        seen = seen_by_stages(batch)

        # ---- the three parts of a micro-batch's forward pass ----
        def noisy(micro: Batch, key: Source) -> Call:
            return call._replace(noise=noise_of(micro, key))

        def whole(trained: Parameters, scales: dict[str, Array]) -> Decoder:
            # The pipeline's parameters only fill their places: its layers are not computed through this.
            return bind(graph, {**bound(trained, scales), **_with_prefix(prefix, {**inside.frozen, **inside.trained})})

        def before(trained: Parameters, scales: dict[str, Array], number: Index) -> tuple[Array, Emitted]:
            micro = _at(batch, number)
            return enter(whole(trained, scales), micro, noisy(micro, key))

        def of_chunks(part: Part, chunk: Index, micro: Batch, key: Source, x: Array) -> tuple[Array, Emitted]:
            weights = {**part.frozen, **part.trained}
            if linears_in is not None:
                weights = linears_in.wrapped(weights, part.operands, part.scales)
            return through(bind(of_stack, weights), chunk, x, spec, micro, noisy(micro, key))

        def after(
            trained: Parameters, scales: dict[str, Array], x: Array, entered: Emitted, emitted: Emitted, number: Index
        ) -> tuple[Array, Sums]:
            decoder, micro = whole(trained, scales), _at(batch, number)
            hidden = leave(decoder, x, [entered, in_order(emitted)], micro, noisy(micro, key))
            scores = scores_of(decoder, micro, objective, noisy(micro, key), head in trained, hidden)
            sums = objective.loss(scores, micro)
            return sums.loss * magnified, sums

        # ---- what a stage does in a tick ----
        def forward(part: Part, row: Any, x: Array, all: Stages, seen: Batch, key: Source) -> tuple[Array, Stages]:
            (number, chunk, slot), here = _own(row.forward)
            own = jax.tree.map(lambda leaf: leaf[0], all)
            x = jnp.where((here == 0) & (chunk == 0), x, own.arriving)

            def compute(x: Array) -> tuple[Array, Emitted]:
                return of_chunks(of_chunk(part, chunk, stack.chunks), chunk, _at(seen, number), key, x)

            y, emitted = jax.lax.cond(number >= 0, compute, lambda x: zeros_like(jax.eval_shape(compute, x)), x)
            held = jnp.where(number >= 0, x, _at(own.inputs, slot))
            own = own._replace(
                inputs=jax.lax.dynamic_update_index_in_dim(own.inputs, held, slot, 0),
                arriving=sent(y, stack.stages),
                emitted=jax.tree.map(lambda all, one: added(all, one, chunk, number), own.emitted, emitted),
            )
            leaving = _taken(row.leaving, y, (here == last[0]) & (chunk == last[1]))
            return leaving, jax.tree.map(lambda leaf: leaf[None], own)

        def backward(
            part: Part, row: Any, waiting: Array, total: Total, all: Stages, seen: Batch, key: Source
        ) -> tuple[Array, Total, Stages]:
            (number, chunk, slot), here = _own(row.backward)
            own = jax.tree.map(lambda leaf: leaf[0], all)
            is_last = (here == last[0]) & (chunk == last[1])
            dy = jnp.where(is_last, _at(waiting, number % plan.waiting), own.returning)

            def compute(total: Total) -> tuple[Total, Array]:
                given = of_chunk(part, chunk, stack.chunks)

                def of(trained: Parameters, scales: dict[str, Array], x: Array) -> tuple[Array, Emitted]:
                    return of_chunks(given._replace(trained=trained, scales=scales), chunk, _at(seen, number), key, x)

                _, transposed = jax.vjp(of, given.trained, given.scales, _at(own.inputs, slot))
                *found, dx = transposed((dy, _at(_at(own.of_emitted, chunk), number)))
                so_far = of_chunk(total, chunk, stack.chunks)
                return _with_chunk(total, _added(so_far, Total(*found), places_in), chunk, stack.chunks), dx

            total, dx = jax.lax.cond(number >= 0, compute, lambda total: (total, jnp.zeros_like(dy)), total)
            own = own._replace(returning=sent(dx, stack.stages, by=-1))
            back = _taken(row.returning, dx, (here == 0) & (chunk == 0))
            return back, total, jax.tree.map(lambda leaf: leaf[None], own)

        # ---- a tick of all stages, and of what comes before and after them ----
        forward_of_all = by_stage(forward, (STAGES, P(), P(), STAGES, P(), P()), (P(), STAGES))
        backward_of_all = by_stage(backward, (STAGES, P(), P(), STAGES, STAGES, P(), P()), (P(), STAGES, STAGES))

        def tick(carry: Carry, row: Any) -> tuple[Carry, None]:
            def take() -> tuple[Array, Emitted]:
                return before(trained, scales, row.entering)

            x, entered = jax.lax.cond(row.entering >= 0, take, lambda: zeros_like(jax.eval_shape(take)))
            entered = jax.tree.map(lambda all, own: added(all, own, row.entering), carry.entered, entered)
            leaving, stages = forward_of_all(inside, row, x, carry.stages, seen, key)
            carry = carry._replace(stages=stages, entered=entered)
            carry = jax.lax.cond(row.leaving >= 0, score, lambda carry, *_: carry, carry, leaving, row.leaving)
            dx, total, stages = backward_of_all(inside, row, carry.waiting, carry.inside, carry.stages, seen, key)
            carry = carry._replace(inside=total, stages=stages)
            return jax.lax.cond(row.returning >= 0, embed, lambda carry, *_: carry, carry, dx, row.returning), None

        def score(carry: Carry, x: Array, number: Index) -> Carry:
            emitted, entered = _at(carry.stages.emitted, number, axis=2), _at(carry.entered, number)
            (_, sums), (*found, dx, of_entered, of_emitted) = jax.value_and_grad(after, range(5), has_aux=True)(
                trained, scales, x, entered, emitted, number
            )
            put = partial(jax.lax.dynamic_update_index_in_dim, index=number)
            of_emitted = jax.tree.map(partial(put, axis=2), carry.stages.of_emitted, of_emitted)
            return carry._replace(
                stages=carry.stages._replace(of_emitted=of_emitted),
                waiting=jax.lax.dynamic_update_index_in_dim(carry.waiting, dx, number % plan.waiting, 0),
                of_entered=jax.tree.map(partial(put, axis=0), carry.of_entered, of_entered),
                outside=_added(carry.outside, Total(*found), places_out),
                sums=jax.tree.map(jnp.add, carry.sums, sums),
            )

        def embed(carry: Carry, dx: Array, number: Index) -> Carry:
            _, transposed = jax.vjp(partial(before, number=number), trained, scales)
            found = transposed((dx, _at(carry.of_entered, number)))
            return carry._replace(outside=_added(carry.outside, Total(*found), places_out))

        # ---- the step ----
        def nothing(part: Part, seen: Batch, key: Source, x: Array) -> Emitted:
            """Of all chunks and micro-batches of a stage."""
            first = jnp.int32(0)
            shapes = jax.eval_shape(of_chunks, of_chunk(part, first, stack.chunks), first, _at(seen, 0), key, x)[1]
            return zeros_like(jax.tree.map(lambda leaf: _behind(leaf, 1, stack.chunks, count), shapes))

        def start(part: Part, places: Mapping[str, jax.P]) -> Total:
            zero = jax.tree.map(lambda p: jnp.zeros_like(p, recipe.gradient_dtype), part.trained)
            return Total(placed(zero, places), jax.tree.map(jnp.zeros_like, part.scales))

        x, entered = zeros_like(jax.eval_shape(before, trained, scales, jnp.int32(0)))
        emitted = by_stage(nothing, (STAGES, P(), P(), P()), STAGES)(inside, seen, key, x)
        of_micro = x, entered, _at(emitted, 0, axis=2)
        _, sums = jax.eval_shape(after, trained, scales, *of_micro, jnp.int32(0))
        entered = zeros_like(jax.tree.map(lambda leaf: _behind(jax.typeof(leaf), count), entered))
        of_stages = zeros_like(_behind(jax.typeof(x), stack.stages, place="stage"))
        inputs = zeros_like(_behind(jax.typeof(x), stack.stages, plan.slots, place="stage"))
        begin = Carry(
            stages=Stages(inputs, of_stages, of_stages, emitted, emitted),
            waiting=zeros_like(_behind(jax.typeof(x), plan.waiting)),
            entered=entered,
            of_entered=entered,
            inside=by_stage(partial(start, places=places_in), STAGES, STAGES)(inside),
            outside=start(Part(trained, frozen, {}, scales), places_out),
            sums=zeros_like(sums),
        )
        done, _ = jax.lax.scan(tick, begin, jax.tree.map(jnp.asarray, plan.ticks))

        def where_trained(name: str, direction: Array) -> Array:
            inner = inside.trained.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            return moved(direction, None if inner is None else jax.typeof(inner).sharding.spec)

        directions = {name: where_trained(name, direction) for name, direction in done.sums.directions.items()}
        amax = {name: jax.reshard(found, P()) for name, found in done.inside.amax.items()}
        return Summed(
            {**done.outside.gradients, **_with_prefix(prefix, done.inside.gradients)},
            done.sums._replace(directions=directions),
            {**done.outside.amax, **_with_prefix(prefix, amax)},
            magnified,
        )

    return gradients


def _parted(values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those whose names have the prefix, without it; and the others."""
    inside = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return inside, {name: value for name, value in values.items() if not name.startswith(prefix)}


def _with_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _linears_parted(linears: Linears | None, prefix: str) -> tuple[Linears | None, Linears | None]:
    if linears is None:
        return None, None
    inside, outside = _parted(linears.parameters, prefix)
    return dataclasses.replace(linears, parameters=inside), dataclasses.replace(linears, parameters=outside)


def _at(tree: Any, index: Index | int, axis: int = 0) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False), tree)


def _own(columns: Any) -> tuple[Any, Index]:
    """What the schedule has for this stage, and its number."""
    here = jax.lax.axis_index("stage")
    return type(columns)(*(column[here] for column in columns)), here


def _taken(leaving: Index, x: Array, is_own: Array) -> Array:
    """The x of the stage where `is_own`, on all; zeros in a tick in which no micro-batch leaves the stages."""
    return jax.lax.cond(leaving >= 0, from_one, lambda x, _: jnp.zeros_like(x), x, is_own)


def _with_chunk(total: Total, own: Total, chunk: Index, chunks: int) -> Total:
    if chunks == 1:
        return own
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, chunk * len(one), 0), total, own)


def _added(total: Total, found: Total, places: Mapping[str, jax.P]) -> Total:
    summed = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), total.gradients, placed(found.gradients, places))
    return Total(summed, jax.tree.map(jnp.maximum, total.amax, found.amax))


def _behind(leaf: Any, *sizes: int, place: str | None = None) -> jax.ShapeDtypeStruct:
    """A shape with other axes before its own, the first sharded over `place`."""
    spec = P(place, *(None,) * (len(sizes) - 1), *leaf.sharding.spec)
    return jax.ShapeDtypeStruct((*sizes, *leaf.shape), leaf.dtype, sharding=leaf.sharding.update(spec=spec))
