"""A decoder in the parts of a pipeline: what comes before its stages, a chunk of a stage, and what comes after them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.decoder import Decoder, Stack, Sums, inputs_of, joined
from jaxtune.models.forward_options import Call
from jaxtune.models.layers.attend import attend_packed
from jaxtune.models.layers.attention import Inputs
from jaxtune.models.spec import ModelSpec
from jaxtune.parallel.layout import RULES, P, by_head, by_residual, by_token
from jaxtune.parallel.pipeline_schedule import by_stage, from_one, sent
from jaxtune.parallel.random import Noise, Source

Batch = dict[str, Array]
# Of a batch, what layers see.
SEEN = ("positions", "key_start", "segment_ids", "place", "row")
STAGES = P("stage")


def seen(spec: ModelSpec, batch: Batch, call: Call) -> Inputs:
    """What every layer sees of a micro-batch."""
    place = whole_rows(batch, "place")
    attend = attend_packed(batch["key_start"], call, place)
    return inputs_of(spec, batch["positions"], attend, batch["segment_ids"] > 0, place)


def noise_of(batch: Batch, source: Source) -> Noise:
    """The source of randomness of a micro-batch, from that of a step."""
    return Noise(source.key, batch["row"], place=whole_rows(batch, "place"), share=source.share)


def whole_rows(batch: Batch, name: str) -> Array | None:
    """A column of whole rows on every device, if the batch has it."""
    return jax.reshard(batch[name], P(*by_head()[:2])) if name in batch else None


def enter(decoder: Decoder, batch: Batch, call: Call) -> tuple[Float[Array, "b s d"], Sums]:
    """What the first stage takes, and the sums that layers before it emit."""
    x = decoder.embedded(batch["tokens"], call)
    x, _, sums = decoder.run(x, seen(decoder.spec, batch, call), call, part=slice(decoder.pipeline))
    return for_stages(x), sums


def leave(
    decoder: Decoder, x: Float[Array, "b s d"], sums: list[Sums], batch: Batch, call: Call
) -> tuple[Float[Array, "b s d"], Sums]:
    """What the head multiplies, from what the last stage makes; and all sums, those of earlier layers before it."""
    assert decoder.pipeline is not None
    after = slice(decoder.pipeline + 1, None)
    x, _, own = decoder.run(jax.reshard(x, by_residual()), seen(decoder.spec, batch, call), call, part=after)
    return decoder.normed(x), joined([*sums, own], jnp.concatenate)


def for_stages(x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Activations as every stage has them."""
    with RULES(RULES.value.apart("stage")):
        place = by_residual()
    return jax.reshard(x, place)


def seen_by_stages(batch: Batch) -> Batch:
    """What layers see of one or more micro-batches, with the whole rows that every stage needs."""
    with RULES(RULES.value.apart("stage")):
        place = tuple(by_token())

    def one(name: str, column: Array) -> Array:
        return column if name == "row" else jax.reshard(column, P(*(None,) * (column.ndim - 2), *place))

    return {name: one(name, batch[name]) for name in SEEN if name in batch}


def of_chunk(stacked: Any, chunk: Int[Array, ""], chunks: int) -> Any:
    """Of arrays whose leading axis has the layers of a stage, those of one of its chunks."""

    def one(leaf: Array) -> Array:
        size = len(leaf) // chunks
        return jax.lax.dynamic_slice_in_dim(leaf, chunk * size, size)

    return stacked if chunks == 1 else jax.tree.map(one, stacked)


def through(
    chunk: Stack, number: Int[Array, ""], x: Float[Array, "b s d"], spec: ModelSpec, batch: Batch, call: Call
) -> tuple[Float[Array, "b s d"], Sums]:
    """On the devices of a stage: what a chunk of its layers makes of x, and their sums.

    chunk: the stack with the parameters of the chunk alone. batch: what layers see of the micro-batch.
    """
    stack, stage = chunk.stack, jax.lax.axis_index("stage")
    repeats = stack.repeats // (stack.stages * stack.chunks)
    repeat = (number * stack.stages + stage) * repeats + jnp.arange(repeats)
    x, _, sums = chunk(x, seen(spec, batch, call), None, call, stack.first + len(stack.period) * repeat)
    return x, sums


def in_order(sums: Sums) -> Sums:
    """Sums of all chunks, (stages, chunks, layers of a chunk, ...), by layer."""

    def one(value: Float[Array, "stages chunks n ..."]) -> Float[Array, "layers ..."]:
        rest = jax.typeof(value).sharding.spec[3:]
        whole = jnp.swapaxes(jax.reshard(value, P(None, None, None, *rest)), 0, 1)
        return jnp.reshape(whole, (-1, *value.shape[3:]), out_sharding=P(None, *rest))

    return jax.tree.map(one, sums)


def added(stacked: Array, value: Array, *index: Int[Array, ""]) -> Array:
    """With the value added at an index of the leading axes; a negative one counts as 0, for a value of zeros."""
    at = (*(jnp.maximum(number, 0) for number in index), *(0,) * value.ndim)
    now = jax.lax.dynamic_slice(stacked, at, (*(1,) * len(index), *value.shape))
    return jax.lax.dynamic_update_slice(stacked, now + jnp.expand_dims(value, tuple(range(len(index)))), at)


def zeros_like(shapes: Any) -> Any:
    """Zeros of these shapes, dtypes and shardings."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), shapes)


def in_turn(decoder: Decoder, x: Float[Array, "b s d"], batch: Batch, call: Call) -> tuple[Float[Array, "b s d"], Sums]:
    """Through all chunks, one after the other: a forward pass, in which a stage waits while others compute."""
    assert decoder.pipeline is not None
    stack, spec = decoder.stacks[decoder.pipeline].stack, decoder.spec
    graph, weights = nnx.split(decoder.stacks[decoder.pipeline])

    def on_stage(weights: Any, x: Array, batch: Batch) -> tuple[Array, Sums]:
        def run(chunk: Int[Array, ""], x: Array) -> tuple[Array, Sums]:
            own = nnx.merge(graph, of_chunk(weights, chunk, stack.chunks))
            return through(own, chunk, x, spec, batch, call)

        none = zeros_like(jax.eval_shape(run, jnp.zeros((), jnp.int32), x)[1])

        def hop(number: Int[Array, ""], carried: tuple[Array, Sums]) -> tuple[Array, Sums]:
            x, sums = carried
            chunk, own = number // stack.stages, number % stack.stages == jax.lax.axis_index("stage")
            x, emitted = jax.lax.cond(own, run, lambda chunk, x: (x, none), chunk, x)
            sums = jax.tree.map(lambda of_all, own: added(of_all, own, chunk), sums, emitted)
            return sent(x, stack.stages), sums

        start = x, jax.tree.map(lambda leaf: jnp.stack([leaf] * stack.chunks), none)
        x, sums = jax.lax.fori_loop(0, stack.stages * stack.chunks, hop, start)
        first = jax.lax.axis_index("stage") == 0  # the last chunk's output has come round to it
        return from_one(x, first), jax.tree.map(lambda leaf: leaf[None], sums)

    x, sums = by_stage(on_stage, (STAGES, P(), P()), (P(), STAGES))(weights, x, seen_by_stages(batch))
    return x, in_order(sums)
