"""The forward pass of a pipelined decoder in parts: layers before the stages, a chunk of a stage, layers after them.

Stages run the layers of one stack. Embedding, the other layers and the head run on all devices; there the axis of
stages shards positions. `enter` and `leave` change between the two layouts.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, n layers of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.decoder import Decoder, inputs_of
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attend import attend_packed
from jaxtune.models.layers.attention import Inputs
from jaxtune.models.stack import Stack, Sums, join_sums
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import RULES, P, by_head, by_residual, by_token
from jaxtune.parallel.pipeline_schedule import by_stage, from_one, shift_stages
from jaxtune.parallel.random import Noise, StepNoise

Batch = dict[str, Array]
# The columns of a batch that layers use.
SEEN = ("positions", "key_start", "segment_ids", "place", "row")
STAGES = P("stage")


def make_inputs(spec: ModelSpec, batch: Batch, call: ForwardOptions) -> Inputs:
    """Make the inputs that all layers share from the columns of a micro-batch."""
    place = whole_rows(batch, "place")
    attend = attend_packed(batch["key_start"], call, place, batch.get("key_end"))
    valid, rope_positions = batch["segment_ids"] > 0, batch.get("rope_positions")
    return inputs_of(spec, batch["positions"], attend, valid, place, rope_positions)


def noise_of(batch: Batch, source: StepNoise) -> Noise:
    """Make the source of randomness of a micro-batch from the step's."""
    return Noise(source.key, batch["row"], place=whole_rows(batch, "place"), share=source.share)


def whole_rows(batch: Batch, name: str) -> Array | None:
    """Return a column with whole rows on every device; None if the batch does not have it."""
    return jax.reshard(batch[name], P(*by_head()[:2])) if name in batch else None


def enter(decoder: Decoder, batch: Batch, call: ForwardOptions) -> tuple[Float[Array, "b s d"], Sums]:
    """Return the first stage's input, and the sums of the layers before it."""
    x = decoder.embed_tokens(batch["tokens"], call)
    x, _, sums = decoder.run(x, make_inputs(decoder.spec, batch, call), call, part=slice(decoder.pipeline))
    return for_stages(x), sums


def leave(
    decoder: Decoder, x: Float[Array, "b s d"], sums: list[Sums], batch: Batch, call: ForwardOptions
) -> tuple[Float[Array, "b s d"], Sums]:
    """Return the head's input, from the last stage's output, and the sums of all layers; sums: of earlier layers."""
    assert decoder.pipeline is not None
    after = slice(decoder.pipeline + 1, None)
    x, _, later_sums = decoder.run(
        jax.reshard(x, by_residual()), make_inputs(decoder.spec, batch, call), call, part=after
    )
    return decoder.apply_final_norm(x), join_sums([*sums, later_sums], jnp.concatenate)


def for_stages(x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Reshard activations to the layout inside the stages, where the axis of stages shards nothing."""
    with RULES(RULES.value.apart("stage")):
        place = by_residual()
    return jax.reshard(x, place)


def seen_by_stages(batch: Batch) -> Batch:
    """Return the columns of one or more micro-batches that layers use, in the layout inside the stages."""
    with RULES(RULES.value.apart("stage")):
        place = tuple(by_token())

    def one(name: str, column: Array) -> Array:
        # `row` has no positions, so its layout is the same inside and outside of the stages.
        return column if name == "row" else jax.reshard(column, P(*(None,) * (column.ndim - 2), *place))

    return {name: one(name, batch[name]) for name in SEEN if name in batch}


def slice_chunk(stacked: Any, chunk: Int[Array, ""], chunks: int) -> Any:
    """Return the part of a chunk of arrays whose leading axis has the layers of a stage."""

    def one(leaf: Array) -> Array:
        size = len(leaf) // chunks
        return jax.lax.dynamic_slice_in_dim(leaf, chunk * size, size)

    return stacked if chunks == 1 else jax.tree.map(one, stacked)


def run_chunk(
    chunk: Stack, number: Int[Array, ""], x: Float[Array, "b s d"], spec: ModelSpec, batch: Batch, call: ForwardOptions
) -> tuple[Float[Array, "b s d"], Sums]:
    """On the devices of a stage: run x through a chunk of its layers, and return the output and their sums.

    chunk: the stack with only the chunk's parameters. number: the chunk's number in the stage. batch: the columns of
    the micro-batch that layers use.
    """
    stack, stage = chunk.stack, jax.lax.axis_index("stage")
    repeats = stack.repeats // (stack.stages * stack.chunks)  # of one chunk
    # Global numbers of the chunk's repeats, which dropout needs: chunk c of all stages comes before chunk c + 1 of any.
    repeat = (number * stack.stages + stage) * repeats + jnp.arange(repeats)
    x, _, sums = chunk(x, make_inputs(spec, batch, call), None, call, stack.first + len(stack.period) * repeat)
    return x, sums


def in_order(sums: Sums) -> Sums:
    """Reorder sums (stages, chunks, layers of a chunk, ...) by layer."""

    def one(value: Float[Array, "stages chunks n ..."]) -> Float[Array, "layers ..."]:
        rest = jax.typeof(value).sharding.spec[3:]
        # Chunk c of every stage comes before chunk c + 1 of any, so chunks are the outer axis.
        whole = jnp.swapaxes(jax.reshard(value, P(None, None, None, *rest)), 0, 1)
        return jnp.reshape(whole, (-1, *value.shape[3:]), out_sharding=P(None, *rest))

    return jax.tree.map(one, sums)


def add_at(stacked: Array, value: Array, *index: Int[Array, ""]) -> Array:
    """Add a value at an index of the leading axes. A negative index counts as 0: an idle stage adds zeros there."""
    at = (*(jnp.maximum(number, 0) for number in index), *(0,) * value.ndim)
    current = jax.lax.dynamic_slice(stacked, at, (*(1,) * len(index), *value.shape))
    return jax.lax.dynamic_update_slice(stacked, current + jnp.expand_dims(value, tuple(range(len(index)))), at)


def zeros_like(shapes: Any) -> Any:
    """Return zeros with the given shapes, dtypes and shardings."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), shapes)


def run_chunks(
    decoder: Decoder, x: Float[Array, "b s d"], batch: Batch, call: ForwardOptions
) -> tuple[Float[Array, "b s d"], Sums]:
    """Run a forward pass through all chunks, one after the other: a stage waits while the others compute."""
    assert decoder.pipeline is not None
    stack, spec = decoder.stacks[decoder.pipeline].stack, decoder.spec
    graph, weights = nnx.split(decoder.stacks[decoder.pipeline])

    def on_stage(weights: Any, x: Array, batch: Batch) -> tuple[Array, Sums]:
        def run(chunk: Int[Array, ""], x: Array) -> tuple[Array, Sums]:
            layers = nnx.merge(graph, slice_chunk(weights, chunk, stack.chunks))
            return run_chunk(layers, chunk, x, spec, batch, call)

        # An idle stage returns these; both branches of the cond below must have the same types.
        none = zeros_like(jax.eval_shape(run, jnp.zeros((), jnp.int32), x)[1])

        def hop(number: Int[Array, ""], carried: tuple[Array, Sums]) -> tuple[Array, Sums]:
            x, sums = carried
            # In hop n only stage n % stages has the activations and computes; the others' x is not used.
            chunk, is_active = number // stack.stages, number % stack.stages == jax.lax.axis_index("stage")
            # All devices of a stage take the same branch, so collectives inside a chunk have all their participants.
            x, emitted = jax.lax.cond(is_active, run, lambda chunk, x: (x, none), chunk, x)
            sums = jax.tree.map(lambda total, value: add_at(total, value, chunk), sums, emitted)
            return shift_stages(x, stack.stages), sums

        start = x, jax.tree.map(lambda leaf: jnp.stack([leaf] * stack.chunks), none)
        x, sums = jax.lax.fori_loop(0, stack.stages * stack.chunks, hop, start)
        first = jax.lax.axis_index("stage") == 0  # the ring's last hop brought the last chunk's output to it
        return from_one(x, first), jax.tree.map(lambda leaf: leaf[None], sums)

    x, sums = by_stage(on_stage, (STAGES, P(), P()), (P(), STAGES))(weights, x, seen_by_stages(batch))
    return x, in_order(sums)
