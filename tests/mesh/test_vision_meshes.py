"""A model that sees, on several devices: the same losses as on one, with the tower trained or adapted."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from images import draw_sample, image_batch
from mesh.test_family_meshes import values_of_layers
from tiny import transformers_config

from jaxtune.config.schema import Config, DataOptions, MeshOptions, ModelOptions, TrainOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.options import VisionOptions
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base

ROWS, LENGTH, PATCHES = 4, 64, 64
MESHES = {
    "fsdp=2 tensor=2": MeshOptions(fsdp=2, tensor=2),
    "data=2 sequence=2": MeshOptions(data=2, fsdp=1, sequence=2),
}
LORA = LoraOptions(enabled=True, rank=4, target_modules=r"(q_proj|blocks\.\d+\.attn\.qkv|merger.*linear_fc1)$")


def train(adapted: bool, mesh: MeshOptions, devices: int) -> np.ndarray:
    """Return the losses of two steps."""
    made = make_mesh(mesh, jax.devices()[:devices])
    written = json.loads(transformers_config("qwen3_vl, deepstack").to_json_string(use_diff=False))
    spec = families.read_spec(written, vision=True)
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=LENGTH),
        train=TrainOptions(micro_batch_size=ROWS // data_shards(made)),
        vision=VisionOptions(PATCHES, "none" if adapted else "tower"),
        lora=LORA if adapted else LoraOptions(),
        precision=PrecisionOptions("fp32"),
    )
    program = assemble(Base(spec), config, made)
    trained, frozen = (values_of_layers(of) for of in (program.model.trained, program.model.frozen))
    assert any(name.startswith("vision.stacks") for name in trained)
    assert any(name.startswith("vision.deepstack") for name in trained)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    state, step = jax.jit(program.start, out_shardings=shardings)(trained), jax.jit(program.step)
    losses = []
    for _ in range(2):
        batch = {
            name: jax.device_put(rows()[name].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.batch.items()
        }
        state, metrics = step(state, frozen, batch, jnp.float32(1e-3))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@cache
def rows() -> dict[str, np.ndarray]:
    """Return the columns of a batch of packed rows; the first row has no image."""
    written = json.loads(transformers_config("qwen3_vl, deepstack").to_json_string(use_diff=False))
    vision = families.read_spec(written, vision=True).vision
    assert vision is not None
    layout, grids = vision.layout, [[], [(2, 4), (4, 4)], [(6, 4)]]
    batches = []
    for row in range(ROWS):
        samples = [draw_sample(vision, 13, one, row + number) for number, one in enumerate(grids[: row + 1])]
        batches.append(image_batch(samples, layout, PATCHES, LENGTH))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@cache
def one_device(adapted: bool) -> np.ndarray:
    return train(adapted, MeshOptions(), 1)


@pytest.mark.parametrize(("adapted", "mesh"), [(False, "fsdp=2 tensor=2"), (True, "data=2 sequence=2")])
def test_equals_one_device(adapted, mesh):
    expected = one_device(adapted)
    assert expected[0] != expected[1]
    assert np.abs(train(adapted, MESHES[mesh], 4) / expected - 1).max() <= 1e-6
