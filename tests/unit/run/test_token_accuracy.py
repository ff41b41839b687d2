"""Token accuracy of an evaluation, against the argmax of all logits; also with a sharded vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import compute_logits, make_batch, tokens
from tiny import random_values, spec

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.objectives.cross_entropy import token_accuracy
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble, forward_of
from jaxtune.training.step import make_eval_step
from jaxtune.weights.base import Base


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_it_counts_targets_that_are_the_likeliest_token(sizes):
    config = Config(
        model=ModelOptions(dtype="float32"), data=DataOptions(seq_len=32), precision=PrecisionOptions("fp32")
    )
    mesh = make_mesh(MeshOptions(**{"fsdp": 1, **sizes}), jax.devices()[: 4 if sizes else 1])
    program = assemble(Base(spec(2)), config, mesh)
    values = random_values(program.model.parameters)
    batch = make_batch(tokens(2, 32), mesh)
    likeliest = np.asarray(jax.jit(lambda: jnp.argmax(compute_logits(program.model, values, batch), -1))())
    # Every second target is the likeliest token, so that some predictions are right.
    chosen = np.where(np.arange(32) % 2 == 0, likeliest, np.asarray(batch["targets"])).astype(np.int32)
    batch["targets"] = jax.device_put(chosen, batch["targets"].sharding)
    step = jax.jit(make_eval_step(forward_of(config, program.model), token_accuracy()))
    sums = step(values, {}, jax.tree.map(lambda x: x[None], batch))
    trained = np.asarray(batch["loss_weight"]) > 0
    right, count = sums.metrics["token_accuracy"]
    assert count == trained.sum() and right == (trained & (chosen == likeliest)).sum() > 20
