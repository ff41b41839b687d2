"""A quantized base on eight devices: each has its part of codes and scales, and no block is split."""

import jax
import pytest
from mesh.harness import Case, assert_equals_one_device, folder

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model


def test_codes_and_scales_are_sharded_and_a_split_block_is_refused():
    made = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2), jax.devices())
    options = dict(
        model=ModelOptions(path=str(folder("dense", False, False))),
        data=DataOptions(seq_len=32),
        lora=LoraOptions(enabled=True),
    )
    config = Config(**options, quant=QuantOptions(format="nf4"))
    model = declare_model(read_base(config), config, made)
    up = model.parameters["stacks.0.blocks.0.mlp.up.weight"].abstract()
    assert up.shape == (2, 128, 256)
    assert up.codes.sharding.shard_shape(up.codes.shape) == (2, 64, 64)
    assert up.scales.sharding.shard_shape(up.scales.shape) == (2, 64, 2)
    with pytest.raises(
        UserError,
        match=r"mesh.fsdp=8 does not divide the 256 features of embed in blocks of 64; these would: \[1, 2, 4\]",
    ):
        declare_model(read_base(config), config, make_mesh(MeshOptions(fsdp=8), jax.devices()))


@pytest.mark.parametrize(
    "case",
    [
        Case("data=2 fsdp=2 tensor=2", "served int4", "lora"),
        Case("fsdp=4 tensor=2", "served nvfp4", "none"),
        Case("tensor=8", "served nvfp4", "lora"),  # keys and values are whole on each device, queries are not
        Case("data=2 fsdp=2 tensor=2", "served int4", "lora", model="moe"),
        Case("fsdp=2 context=2 tensor=2", "served int4", "none", model="moe"),
    ],
    ids=" ".join,
)
def test_trained_as_served_on_eight_devices_as_on_one(case):
    losses = assert_equals_one_device(case)
    assert losses[-1] < losses[0]
