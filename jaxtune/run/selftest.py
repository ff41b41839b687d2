"""Three steps of a tiny model on the default device, and a sum over all devices, as one line of JSON.

`jaxtune.doctor` runs this in a separate process, because a broken installation may crash it.
"""

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.models import families
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.training.assembly import Program, assemble
from jaxtune.weights.base import Base
from jaxtune.weights.values import frozen_parameters, initial_parameters

STEPS, RATE = 3, 1e-3
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def main() -> None:
    """Print the results of `measure` as JSON."""
    print(json.dumps(measure()))


def measure() -> dict[str, Any]:
    """Return platform and devices of this process, losses and gradient norms of the steps, the sum, and the seconds."""
    began = time.monotonic()
    devices = jax.devices()
    losses, norms = _steps()
    return {
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "memory": (devices[0].memory_stats() or {}).get("bytes_limit"),  # None on a CPU
        "losses": losses,
        "norms": norms,
        "sum": _sum(),
        "seconds": time.monotonic() - began,
    }


def _steps() -> tuple[list[float], list[float]]:
    """Run the steps in bfloat16 on the first device; return losses and gradient norms."""
    config = Config(
        model=ModelOptions(from_scratch=True),
        data=DataOptions(seq_len=128),
        train=TrainOptions(micro_batch_size=2),
        optim=OptimOptions(learning_rate=RATE),
        memory=MemoryOptions(remat="block"),
    )
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    program = assemble(Base(families.read_spec(SHAPE)), config, mesh)
    batch, frozen = _batch(program), frozen_parameters(program.model, config)
    state = jax.jit(program.start)(initial_parameters(program.model, config))
    step, rows = jax.jit(program.step), []
    for _ in range(STEPS):
        state, metrics = step(state, frozen, batch, jnp.float32(RATE))
        rows.append(jax.device_get(metrics))
    return [float(row["loss"]) for row in rows], [float(row["grad_norm"]) for row in rows]


def _batch(program: Program) -> dict[str, jax.Array]:
    """A batch with one document per row, the same in every process."""
    micro_batches, rows, length = program.batch["tokens"].shape
    # One token more: the last target.
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (micro_batches, rows, length + 1))
    values = {
        "tokens": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "positions": np.arange(length),
        "segment_ids": 1,
        "key_start": 0,
        "loss_weight": 1,
        "row": np.arange(rows),
    }
    return {
        name: jax.device_put(np.broadcast_to(values[name], like.shape).astype(like.dtype), like.sharding)
        for name, like in program.batch.items()
    }


def _sum() -> float:
    """The sum over devices of 0, 1, 2, ..., one number on each: an all-reduce."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    with jax.set_mesh(mesh):
        numbers = jax.device_put(np.arange(jax.device_count(), dtype=np.float32), jax.NamedSharding(mesh, jax.P("all")))
        return float(jax.jit(jnp.sum)(numbers))  # n (n - 1) / 2 on n devices


if __name__ == "__main__":
    main()
