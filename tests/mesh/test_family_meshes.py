"""What families have beside Qwen3, on eight devices: parts of fused modules, and experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh.harness import MESHES, ROWS, SEQUENCE, fetched, fields
from tiny import layer, spec

from jaxtune.config.schema import Config, Data, Lora, Mesh, Model, Precision, Train
from jaxtune.models.parameters import randomize
from jaxtune.models.spec import Experts
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.run.assembly import assemble
from jaxtune.run.model import Base

HEADS = dataclasses.replace(layer().mixer, heads=8, kv_heads=4)
SPARSE = dataclasses.replace(layer(), mixer=HEADS, feed_forward=Experts(64, count=4, active=2, normalized=True))
FUSED = dataclasses.replace(layer(intermediate=64), mixer=dataclasses.replace(HEADS, qk_norm=False))
SPECS = {
    "phi3": spec((FUSED, FUSED), family="phi3", hidden=64),
    "qwen3_moe": spec((SPARSE, SPARSE), family="qwen3_moe", hidden=64, router_loss=0.1),
}


def train(family: str, lora: bool, mesh: Mesh, devices: int) -> tuple[np.ndarray, dict]:
    """Losses of two steps, and the trained parameters afterwards."""
    made = make_mesh(mesh, jax.devices()[:devices])
    config = Config(
        model=Model(dtype="float32"),
        data=Data(seq_len=SEQUENCE),
        train=Train(micro_batch_size=ROWS // data_shards(made)),
        lora=Lora(enabled=lora, rank=4, dropout=0.1),
        precision=Precision("fp32"),
    )
    program = assemble(Base(SPECS[family]), config, made)
    trained, frozen = (randomize(of, 0) for of in (program.model.trained, program.model.frozen))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    state, step = jax.jit(program.start, out_shardings=shardings)(trained), jax.jit(program.step)
    losses = []
    for number in range(2):
        batch = {
            name: jax.device_put(fields(2)[name][number].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.batch.items()
        }
        state, metrics = step(state, frozen, batch, jnp.float32(1e-3))
        losses.append(float(metrics["loss"]))
    return np.array(losses), fetched(state.trained)


@pytest.mark.parametrize(
    ("family", "lora", "mesh"),
    [
        ("phi3", True, "fsdp=4 tensor=2"),
        ("qwen3_moe", False, "fsdp=4 tensor=2"),
        ("qwen3_moe", True, "data=2 fsdp=4"),
    ],
)
def test_equals_one_device(family, lora, mesh):
    expected, _ = train(family, lora, Mesh(), 1)
    found, _ = train(family, lora, MESHES[mesh], 8)
    assert np.abs(found / expected - 1).max() <= 1e-6
