"""A quantized base on eight devices equals that on one: codes, loss and adapter gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_batch
from runs import model_folder

from jaxtune.config.schema import Config, Data, Lora, Mesh, Model, Quant
from jaxtune.errors import UserError
from jaxtune.models.parameters import randomize
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.parallel.mesh import make_mesh
from jaxtune.precision.recipes import RECIPES
from jaxtune.run.model import declare_model
from jaxtune.run.step import accumulated_gradients
from jaxtune.run.values import frozen_parameters

ONE, EIGHT = Mesh(fsdp=1), Mesh(data=2, fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = dict(hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    return model_folder(tmp_path_factory.mktemp("model"), **sizes)


def gradients(folder, quant: Quant, mesh: Mesh, devices: int):
    """(quantized base, loss, adapter gradients), fetched."""
    made = make_mesh(mesh, jax.devices()[:devices])
    options = Model(path=str(folder), dtype="float32")
    config = Config(model=options, data=Data(seq_len=32), lora=Lora(enabled=True, rank=4), quant=quant)
    model = declare_model(config, made)
    frozen = frozen_parameters(model, config)
    trained = randomize({name: model.parameters[name] for name in model.trained}, dict(model.dtypes), seed=1)
    trained = {name: value + 0.01 for name, value in trained.items()}  # B is not zero
    rows = np.random.default_rng(0).integers(0, 256, (4, 32))
    batch = jax.tree.map(lambda x: x[None], make_batch(rows, made, [20, 12]))
    computed = accumulated_gradients(model.graph, cross_entropy, RECIPES["fp32"], "block", 0)
    with jax.default_matmul_precision("highest"):
        summed = jax.jit(computed)(trained, frozen, batch, jnp.int32(0))
    codes = {name: jax.tree.map(np.asarray, frozen[name]) for name in model.formats}
    return codes, summed.loss.item(), {name: np.asarray(value) for name, value in summed.gradients.items()}


@pytest.mark.parametrize(
    "format", ["nf4", *(pytest.param(format, marks=pytest.mark.slow) for format in ("fp8", "nvfp4", "int8"))]
)
def test_eight_devices_equal_one(folder, format):
    (codes, loss, expected) = gradients(folder, Quant(format=format), ONE, 1)
    (sharded_codes, sharded_loss, found) = gradients(folder, Quant(format=format), EIGHT, 8)
    assert abs(sharded_loss - loss) <= 1e-6 * abs(loss)
    for name in codes:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), codes[name], sharded_codes[name])
    for name, gradient in found.items():
        assert np.abs(gradient - expected[name]).max() <= 1e-5 * np.abs(expected[name]).max(), name


def test_codes_and_scales_are_sharded_and_a_split_block_is_refused(folder):
    made = make_mesh(EIGHT, jax.devices())
    options = dict(model=Model(path=str(folder)), data=Data(seq_len=32), lora=Lora(enabled=True))
    model = declare_model(Config(**options, quant=Quant(format="nf4")), made)
    name = "stacks.0.blocks.0.mlp.up.weight"
    up = model.abstract([name])[name]
    assert up.shape == (2, 256, 256)
    assert up.codes.sharding.shard_shape(up.codes.shape) == (2, 128, 64)
    assert up.scales.sharding.shard_shape(up.scales.shape) == (2, 128, 2)
    with pytest.raises(
        UserError,
        match=r"mesh.fsdp=8 does not divide the 256 features of embed in blocks of 64; these would: \[1, 2, 4\]",
    ):
        declare_model(Config(**options, quant=Quant(format="nf4")), make_mesh(Mesh(fsdp=8), jax.devices()))
