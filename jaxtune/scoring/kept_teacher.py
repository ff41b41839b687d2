"""A teacher that scores the rows of each step: its weights stay on the devices, or are those under the adapters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtune.columns import teacher_columns
from jaxtune.config.schema import Config
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.divergence import likeliest
from jaxtune.models.head.score import Batch, hidden_states
from jaxtune.models.parameters import abstract
from jaxtune.parallel.layout import P, by_token
from jaxtune.scoring.teacher_scores import (
    Teacher,
    check_top_k,
    configs_of_teachers,
    declare_teacher_model,
    read_weights,
)
from jaxtune.training.assembly import forward_of
from jaxtune.training.memory import device_bytes
from jaxtune.weights.base import Base, read_base
from jaxtune.weights.model import Model

# (trained, frozen, batch, the batch as the teacher sees it) -> the batch with the teacher's columns.
AddColumns = Callable[[Parameters, Parameters, Batch, Batch], Batch]


def kept_bytes(config: Config, mesh: jax.sharding.Mesh, read: Callable[[Config], Base] = read_base) -> int:
    """Return the bytes on a device of teachers that stay there to score the student's own answers; 0 without one.

    `read` reads what the files of a base say. Raises UserError as `declare_teacher_model`.
    """
    if not config.distill.own_answers:
        return 0
    models = [declare_teacher_model(one, mesh, read) for one in configs_of_teachers(config).values()]
    parameters = [abstract(declared[1].parameters) for declared in models if declared is not None]
    return sum(map(device_bytes, jax.tree.leaves(parameters)))


def keep_teacher(config: Config, model: Model, teacher: Teacher | None) -> AddColumns:
    """Return a function that adds the columns of `columns.teacher_columns` to a batch.

    The teacher may see other prompts: then its rows end in the same trained tokens, which may be at other positions.

    Args:
        config: the student's.
        model: the student.
        teacher: whose weights are read here; None: the student without its adapters.

    Raises:
        UserError: as `read_parameters`, and if distill.top_k is more than the number of tokens.
    """
    weights = None if teacher is None else read_weights(teacher)
    scoring, vocabulary = (model, model.spec.vocabulary) if teacher is None else (teacher.model, teacher.vocabulary)
    check_top_k(config.distill.top_k, vocabulary)
    options, forward = config.distill, forward_of(config if teacher is None else teacher.config, scoring)

    def score(decoder: Decoder, batch: Batch, call: ForwardOptions) -> tuple[jax.Array, jax.Array]:
        call = call._replace(adapters=teacher is not None, served=False)

        def of_micro_batch(micro: Batch) -> tuple[jax.Array, jax.Array]:
            hidden, _ = hidden_states(decoder, micro, call)
            return likeliest(decoder, hidden, call.dtype, options.top_k, vocabulary, options.temperature)

        return jax.lax.map(of_micro_batch, batch)

    def score_all(trained: Parameters, frozen: Parameters, batch: Batch, seen: Batch) -> Batch:
        found = forward.run(score, forward.bind(trained, frozen), seen)
        if seen is not batch:
            found = _move(found, seen["loss_weight"], batch["loss_weight"])
        columns = zip(teacher_columns(options.top_k), found)
        return {column.name: jax.reshard(values, P(None, *by_token(None))) for column, values in columns}

    options_of_xla = compiler_options(config)
    step = jax.jit(score_all, compiler_options=options_of_xla)
    as_seen = jax.jit(
        lambda trained, frozen, batch: score_all(trained, frozen, batch, batch), compiler_options=options_of_xla
    )

    def add_columns(trained: Parameters, frozen: Parameters, batch: Batch, seen: Batch) -> Batch:
        trained, frozen = (trained, frozen) if weights is None else ({}, weights)
        columns = as_seen(trained, frozen, batch) if seen is batch else step(trained, frozen, batch, seen)
        return batch | columns

    return add_columns


def _move(found: tuple[jax.Array, jax.Array], seen: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Move what a teacher says of each target to where the student has the target.

    found: arrays (micro-batches, rows, positions, values). seen, weight: the loss weights of the teacher's rows and of
    the student's, (micro-batches, rows, positions).
    """
    rows = by_token()[0]

    def move(values: jax.Array, seen: jax.Array, weight: jax.Array) -> jax.Array:
        # argmax of booleans is the first trained position; the rows end in the same trained tokens, so all shift alike.
        ahead = jnp.argmax(seen > 0, -1) - jnp.argmax(weight > 0, -1)
        places = jnp.arange(values.shape[2]) + ahead[..., None]
        # Positions whose place wraps have no loss weight.
        return jnp.take_along_axis(values, places[..., None] % values.shape[2], axis=2)

    # In a shard_map, over whole rows: each device moves the values of its rows.
    whole = [jax.reshard(array, P(None, rows, *(None,) * (array.ndim - 2))) for array in (*found, seen, weight)]
    specs = P(None, rows, None, None), P(None, rows, None), P(None, rows, None)
    moved = jax.shard_map(move, in_specs=specs, out_specs=specs[0])
    return moved(whole[0], *whole[2:]), moved(whole[1], *whole[2:])
