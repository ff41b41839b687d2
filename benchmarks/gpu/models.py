"""The LoRA step of a Qwen3 with random weights, made of jaxtune's parts that need neither data nor a run."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu.qwen3 import ALPHA, RANK
from jaxtune.lora.inject import inject
from jaxtune.models import parameters
from jaxtune.models.families import qwen3
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.build import build
from jaxtune.parallel.layout import AXES, TOKENS
from jaxtune.precision.recipes import RECIPES
from jaxtune.step import Batch, Gradients, State, accumulated_gradients, initial_state, make_train_step

LORA = SimpleNamespace(rank=RANK, alpha=ALPHA, dropout=0.0, use_rslora=False, target_modules="all-linear")
ADAMW = SimpleNamespace(weight_decay=0.0, no_decay="norm", beta1=0.9, beta2=0.999, epsilon=1e-8)


class Lora(NamedTuple):
    """A model on the current mesh, and its step. Nothing is on the device before `values` is called."""

    gradients: Gradients
    step: Callable[..., Any]
    state: Callable[[dict], State]  # from the trained parameters
    values: Callable[[], tuple[dict, dict]]  # (trained in float32, frozen), random


def make_mesh() -> None:
    """One device under all axes, current from now on."""
    jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, devices=jax.devices()[:1]))


def lora(config: dict, *, remat: Any, rate: float, recipe: str = "bf16") -> Lora:
    """LoRA on every linear of the model of a config.json, with AdamW."""
    graph, declared = parameters.declare(inject(qwen3.read_spec(config), LORA))
    precision = RECIPES[recipe]
    dtypes = {name: jnp.dtype("float32") if p.trained else precision.dtype for name, p in declared.items()}
    optimizer = build(ADAMW, {name: (name,) * max(1, len(p.layers)) for name, p in declared.items() if p.trained})
    gradients = accumulated_gradients(graph, cross_entropy, precision, remat, 0)
    step = make_train_step(gradients, optimizer, lambda _: jnp.float32(rate), 1.0, precision)

    def values() -> tuple[dict, dict]:
        made = parameters.randomize(declared, dtypes, 0)
        trained = {name: made.pop(name) for name, p in declared.items() if p.trained}
        return trained, made

    return Lora(gradients, step, lambda trained: initial_state(optimizer, trained), values)


def batch(tokens: np.ndarray, documents: list[tuple[int, ...]] | None = None) -> Batch:
    """Micro-batches of rows, (accumulation, rows, positions), on the mesh.

    `documents`: lengths of the documents in each row of every micro-batch, the rest is padding; one a row unless told.
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
    by_token = jax.NamedSharding(mesh, jax.P(None, *TOKENS))
    dtypes = {name: np.float32 if name == "loss_weight" else np.int32 for name in fields}
    made = {name: jax.device_put(x.astype(dtypes[name]), by_token) for name, x in fields.items()}
    rows = np.arange(tokens.shape[0] * tokens.shape[1], dtype=np.int32).reshape(tokens.shape[:2])
    return made | {"row": jax.device_put(rows, jax.NamedSharding(mesh, jax.P(None, TOKENS[0])))}


def log_choices() -> list[str]:
    """A list that fills with what the kernels' registry logs of its choices."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pallas_kernels")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return said
