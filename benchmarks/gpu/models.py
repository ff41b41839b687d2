"""The training step of a Qwen model with random weights: a run's program, without data or files."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.qwen3 import ALPHA, RANK
from jaxtune.config.schema import Config, MemoryOptions, ModelOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.head.score import Batch
from jaxtune.models.parameters import Parameter, randomize
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.layout import AXES, by_token
from jaxtune.parallel.random import named_key
from jaxtune.precision.options import PrecisionOptions
from jaxtune.precision.recipes import RECIPES
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import Program, assemble
from jaxtune.weights.base import Base

RATE = 1e-4


def one_device_mesh(device: jax.Device) -> jax.sharding.Mesh:
    """A mesh of one device, with all axes."""
    return jax.make_mesh((1,) * len(AXES), AXES, devices=[device])


def training(
    config: dict,
    *,
    remat: Any = "none",
    lora: bool = True,
    quant: Any = None,
    precision: PrecisionOptions = PrecisionOptions(),
    optim: OptimOptions = OptimOptions(learning_rate=RATE),
) -> Program:
    """Assemble the program for a config.json on the current mesh.

    Args:
        config: config.json of the model.
        remat: rematerialisation policy.
        lora: train adapters on every linear layer; otherwise the whole model.
        quant: format of the frozen linear layers.
        precision, optim: sections of the config, as in a recipe.
    """
    options = Config(
        model=ModelOptions(dtype=RECIPES[precision.recipe].dtype.name),
        optim=optim,
        lora=LoraOptions(enabled=lora, rank=RANK, alpha=ALPHA),
        quant=QuantOptions(format=quant),
        memory=MemoryOptions(remat),
        precision=precision,
    )
    base = Base(families.read_spec({"model_type": "qwen3"} | config))
    return assemble(base, options, jax.sharding.get_mesh())


def values(program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random parameters, (trained, frozen)."""
    declared = program.model.parameters
    made = randomize({name: p for name, p in declared.items() if p.storage is None}, 0)
    made |= {name: _draw_quantized(p) for name, p in declared.items() if p.storage is not None}
    return {name: made.pop(name) for name in program.model.trained}, made


def _draw_quantized(parameter: Parameter) -> Any:
    """Draw the values of `randomize`, quantized; at most one matrix at a time exists unquantized."""
    storage = parameter.storage
    assert storage is not None

    @jax.jit
    def draw(layer: int) -> jax.Array:
        key = jax.random.fold_in(named_key(jax.random.key(0), parameter.local), layer)
        return parameter.init(key, parameter.matrix, jnp.float32).astype(parameter.dtype)

    made = [storage.make(draw(layer), parameter.matrix_axes) for layer in parameter.layers]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def batch(tokens: np.ndarray, documents: list[tuple[int, ...]] | None = None) -> Batch:
    """Return micro-batches of rows, (accumulation, rows, positions), on the mesh.

    `documents`: lengths of the documents in each row of every micro-batch; the rest of a row is padding. None: one
    document fills each row.
    """
    length = tokens.shape[-1]
    segments, starts = (np.zeros(tokens.shape, np.int32) for _ in range(2))
    for row, lengths in enumerate(documents or [(length,)] * tokens.shape[1]):
        numbers = np.repeat(np.arange(len(lengths)), np.asarray(lengths, int))
        segments[:, row, : numbers.size] = numbers + 1
        starts[:, row, : numbers.size] = np.cumsum((0, *lengths))[numbers]
    place = np.broadcast_to(np.arange(length), tokens.shape)
    following = np.roll(segments, -1, axis=-1)
    following[..., -1] = 0
    fields = {
        "tokens": np.where(segments > 0, tokens, 0),
        "targets": np.roll(tokens, -1, axis=-1),
        "positions": np.where(segments > 0, place - starts, 0),
        "segment_ids": segments,
        "key_start": np.where(segments > 0, starts, length),
        "loss_weight": (segments > 0) & (segments == following),
    }
    mesh = jax.sharding.get_mesh()
    place = jax.NamedSharding(mesh, jax.P(None, *by_token()))
    dtypes = {name: np.float32 if name == "loss_weight" else np.int32 for name in fields}
    made = {name: jax.device_put(x.astype(dtypes[name]), place) for name, x in fields.items()}
    rows = np.arange(tokens.shape[0] * tokens.shape[1], dtype=np.int32).reshape(tokens.shape[:2])
    return made | {"row": jax.device_put(rows, jax.NamedSharding(mesh, jax.P(None, by_token()[0])))}


def log_choices() -> list[str]:
    """Return a list to which every kernel choice that the registry logs will be appended."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("pallas_kernels")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return messages
