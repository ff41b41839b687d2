"""(IA)^3 and trained biases on a quantized base, and the configs that refuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from tiny import random_values, spec

from jaxtune.config import checks
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base


def test_factors_train_on_a_quantized_base_as_on_what_it_stands_for(one_device):
    losses = {}
    for quant in (None, "int8"):
        config = Config(
            model=ModelOptions(dtype="float32"),
            data=DataOptions(seq_len=32),
            lora=LoraOptions(enabled=True, kind="ia3"),
            quant=QuantOptions(quant, block_size="channel" if quant else None),
            precision=PrecisionOptions("fp32"),
            optim=OptimOptions(learning_rate=1e-2, weight_decay=0.0),
        )
        program = assemble(Base(spec(2)), config, one_device)
        values: dict = random_values(program.model.parameters)
        values |= {name: jnp.ones(p.shape) for name, p in program.model.trained.items()}
        for name, parameter in program.model.quantized.items():
            values[name] = parameter.storage.make(values[name], parameter.axes)
        state = jax.jit(program.start)({name: values[name] for name in program.state.trained})
        frozen = {name: values[name] for name in program.frozen}
        batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 32), one_device))
        step, of_steps = jax.jit(program.step), []
        for _ in range(4):
            state, metrics = step(state, frozen, batch, jnp.float32(1e-2))
            of_steps.append(float(metrics["loss"]))
        losses[quant] = of_steps
        assert of_steps[-1] < of_steps[0]
        assert all(np.abs(np.asarray(value) - 1).max() > 1e-3 for value in state.trained.values())
    np.testing.assert_allclose(losses["int8"], losses[None], atol=2e-3)


@pytest.mark.parametrize(("option", "value"), [("kind", "ia3"), ("bias", "all")])
def test_a_pipeline_has_neither(option, value):
    config = Config(lora=LoraOptions(enabled=True, **{option: value}), mesh=MeshOptions(stage=2))
    assert any(f"lora.{option} = {value!r}: not available with mesh.stage" in p.text for p in checks.check(config))
