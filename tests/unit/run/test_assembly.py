"""The parts of a run that are built from a config."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import write_model_folder

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.optim.build import UpdateInputs
from jaxtune.optim.options import OptimOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import read_base
from jaxtune.weights.values import initial_parameters


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_orthogonalised_updates_ignore_the_size_of_gradients_also_in_float16(one_device, tmp_path, name):
    options = ModelOptions(str(write_model_folder(tmp_path / "model")), from_scratch=True, dtype="float32")
    data = DataOptions(seq_len=64)
    config = Config(
        model=options,
        data=data,
        precision=PrecisionOptions("fp16"),
        optim=OptimOptions(name, learning_rate=0.1, weight_decay=0.0),
    )
    program = assemble(read_base(config), config, jax.sharding.get_mesh())
    optimizer, parameters = program.optimizer, initial_parameters(program.model, config)
    random = jax.random.normal(jax.random.key(0), parameters["stacks.0.blocks.0.mlp.up.weight"].shape)
    gradients = {key: jnp.ones_like(value) for key, value in parameters.items()}
    gradients["stacks.0.blocks.0.mlp.up.weight"] = random
    step = UpdateInputs(jnp.float32(0.1), jnp.float32(1.0), jnp.bool(True), jax.random.key(0))

    update = jax.jit(optimizer.update)

    def moved(size):
        after, _ = update(gradients, optimizer.init(parameters), parameters, step._replace(factor=jnp.float32(size)))
        return np.asarray(after["stacks.0.blocks.0.mlp.up.weight"] - parameters["stacks.0.blocks.0.mlp.up.weight"])

    expected = moved(1.0)
    for size in (2.0**-20, 2.0**23):
        np.testing.assert_allclose(moved(size), expected, atol=1e-3 * np.abs(expected).max())
