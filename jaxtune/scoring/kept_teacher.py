"""A teacher whose weights stay on the devices, to score the rows of each step."""

from collections.abc import Callable

import jax

from jaxtune.columns import teacher_columns
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Decoder, Parameters
from jaxtune.models.divergence import likeliest
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.parameters import abstract
from jaxtune.models.score import Batch, hidden_states
from jaxtune.parallel.layout import P, by_token
from jaxtune.scoring.teacher_scores import Teacher, read_weights
from jaxtune.training.assembly import forward_of
from jaxtune.training.memory import device_bytes


def bytes_of(teacher: Teacher) -> int:
    """Return the bytes that a teacher's weights take on a device."""
    return sum(map(device_bytes, jax.tree.leaves(abstract(teacher.model.parameters))))


def keep_teacher(teacher: Teacher) -> Callable[[Batch], Batch]:
    """Read a teacher and return a function: batch -> the batch with the teacher's columns.

    The batch has the columns of `columns.NEXT_TOKEN`; those of `columns.teacher_columns` are added. Raises UserError as
    `read_parameters`.
    """
    weights, options = read_weights(teacher), teacher.config.distill
    forward = forward_of(teacher.config, teacher.model)

    def score(decoder: Decoder, batch: Batch, call: ForwardOptions) -> tuple[jax.Array, jax.Array]:
        def of_micro_batch(micro: Batch) -> tuple[jax.Array, jax.Array]:
            hidden, _ = hidden_states(decoder, micro, call)
            return likeliest(decoder, hidden, call.dtype, options.top_k, teacher.vocabulary, options.temperature)

        return jax.lax.map(of_micro_batch, batch)

    def add_columns(weights: Parameters, batch: Batch) -> Batch:
        likeliest_tokens = forward.run(score, forward.bind({}, weights), batch)
        columns = zip(teacher_columns(options.top_k), likeliest_tokens)
        return {column.name: jax.reshard(values, P(None, *by_token(None))) for column, values in columns}

    step = jax.jit(add_columns, compiler_options=compiler_options(teacher.config))
    return lambda batch: batch | step(weights, batch)
