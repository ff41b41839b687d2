"""A model that sees, on several devices: the same losses as on one, with the tower trained or adapted."""

import dataclasses
import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from images import draw_sample, image_batch
from mesh.test_family_meshes import values_of_layers
from nightly_rows import nightly
from tiny import transformers_config

from jaxtune.config.schema import Config, DataOptions, MeshOptions, ModelOptions, TrainOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.options import ExpertsOptions, VisionOptions
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base

ROWS, LENGTH, PATCHES = 4, 64, 64
MESHES = {
    "fsdp=2 tensor=2": MeshOptions(fsdp=2, tensor=2),
    "data=2 sequence=2": MeshOptions(data=2, fsdp=1, sequence=2),
    "expert=2 fsdp=2": MeshOptions(expert=2, fsdp=2),
    "data=2 expert=2": MeshOptions(data=2, fsdp=1, expert=2),
}
LORA = LoraOptions(enabled=True, rank=4, target_modules=r"(q_proj|blocks\.\d+\.attn\.qkv|merger.*linear_fc1)$")
QWEN, ERNIE = "qwen3_vl, deepstack", "ernie4_5_vl_moe, experts of images"
# Both mixtures of a layer are balanced, by losses and by the biases of their routers.
BALANCED = ExpertsOptions(router_loss=0.1, router_loss_over="sequence", router_z_loss=0.01, bias_update_rate=0.01)


def train(name: str, adapted: bool, mesh: MeshOptions, devices: int, dispatch: str = "all_gather") -> np.ndarray:
    """Return the losses of three steps."""
    made = make_mesh(mesh, jax.devices()[:devices])
    spec = spec_of(name)
    experts = dataclasses.replace(BALANCED, dispatch=dispatch) if spec.has_experts else ExpertsOptions()
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=LENGTH),
        train=TrainOptions(micro_batch_size=ROWS // data_shards(made)),
        vision=VisionOptions(PATCHES, "none" if adapted else "tower"),
        lora=LORA if adapted else LoraOptions(),
        precision=PrecisionOptions("fp32"),
        experts=experts,
    )
    program = assemble(Base(spec), config, made)
    trained, frozen = (values_of_layers(of) for of in (program.model.trained, program.model.frozen))
    assert any(one.startswith("vision.stacks") for one in trained)
    assert any(one.startswith(("vision.deepstack", "vision.projector.space")) for one in trained)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    state, step = jax.jit(program.start, out_shardings=shardings)(trained), jax.jit(program.step)
    losses = []
    for _ in range(3):
        batch = {
            column: jax.device_put(rows(name)[column].reshape(leaf.shape), leaf.sharding)
            for column, leaf in program.batch.items()
        }
        state, metrics = step(state, frozen, batch, jnp.float32(1e-3))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


def spec_of(name: str) -> ModelSpec:
    """Return a tiny model with its tower."""
    return families.read_spec(json.loads(transformers_config(name).to_json_string(use_diff=False)), vision=True)


@cache
def rows(name: str) -> dict[str, np.ndarray]:
    """Return the columns of a batch of packed rows; the first row has no image."""
    vision = spec_of(name).vision
    assert vision is not None
    batches, grids = [], [[], [(2, 4), (4, 4)], [(6, 4)]]
    for row in range(ROWS):
        samples = [draw_sample(vision, 13, one, row + number) for number, one in enumerate(grids[: row + 1])]
        batches.append(image_batch(samples, vision.layout, PATCHES, LENGTH))
    return {column: np.concatenate([batch[column] for batch in batches]) for column in batches[0]}


@cache
def one_device(name: str, adapted: bool) -> np.ndarray:
    return train(name, adapted, MeshOptions(), 1)


@pytest.mark.parametrize(
    ("name", "adapted", "mesh", "dispatch"),
    [
        (QWEN, False, "fsdp=2 tensor=2", "all_gather"),
        (QWEN, True, "data=2 sequence=2", "all_gather"),
        nightly(ERNIE, False, "expert=2 fsdp=2", "all_gather"),
        nightly(ERNIE, False, "data=2 expert=2", "all_to_all"),
        nightly(ERNIE, False, "fsdp=2 tensor=2", "all_gather"),
    ],
)
def test_equals_one_device(name, adapted, mesh, dispatch):
    expected = one_device(name, adapted)
    assert len({*expected}) == len(expected)
    assert np.abs(train(name, adapted, MESHES[mesh], 4, dispatch) / expected - 1).max() <= 1e-6
