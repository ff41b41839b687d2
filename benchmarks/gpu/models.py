"""The LoRA or QLoRA step of a Qwen3 with random weights, made of jaxtune's parts that need neither data nor a run."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu.quantized import format_named
from gpu.qwen3 import ALPHA, RANK
from jaxtune.lora.inject import inject
from jaxtune.models import families, parameters
from jaxtune.models.families import qwen3
from jaxtune.models.mark import mark
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.build import Trained, build
from jaxtune.parallel.layout import AXES, TOKENS
from jaxtune.precision.recipes import RECIPES
from jaxtune.quant import Format, QuantizedArray
from jaxtune.step import Batch, Gradients, State, accumulated_gradients, initial_state, make_train_step

LORA = SimpleNamespace(rank=RANK, alpha=ALPHA, dropout=0.0, use_rslora=False, target_modules="all-linear")
ADAMW = SimpleNamespace(weight_decay=0.0, no_decay="norm", beta1=0.9, beta2=0.999, epsilon=1e-8)


class Lora(NamedTuple):
    """A model on the current mesh, and its step. Nothing is on the device before `values` is called."""

    gradients: Gradients
    step: Callable[..., Any]
    state: Callable[[dict], State]  # from the trained parameters
    values: Callable[[], tuple[dict, dict]]  # (trained in float32, frozen), random


def one_device_mesh(device: jax.Device) -> jax.sharding.Mesh:
    """One device under all axes."""
    return jax.make_mesh((1,) * len(AXES), AXES, devices=[device])


def lora(config: dict, *, remat: Any, rate: float, recipe: str = "bf16", quant: str | None = None) -> Lora:
    """LoRA on every linear of the model of a config.json, with AdamW; `quant`: the format of those linears."""
    spec = qwen3.read_spec(config)
    if quant is not None:
        spec = mark(spec, families.linears(spec), "quantized")
    graph, declared = parameters.declare(inject(spec, LORA))
    precision = RECIPES[recipe]
    dtypes = {name: jnp.dtype("float32") if p.trained else precision.dtype for name, p in declared.items()}
    of_optimizer = {
        name: Trained((name,) * max(1, len(p.layers)), bool(p.layers)) for name, p in declared.items() if p.trained
    }
    optimizer = build(ADAMW, of_optimizer, len(spec.layers))
    gradients = accumulated_gradients(graph, cross_entropy, precision, remat, 0)
    step = make_train_step(gradients, optimizer, lambda _: jnp.float32(rate), 1.0, precision)

    def values() -> tuple[dict, dict]:
        plain = {name: p for name, p in declared.items() if not p.quantized}
        made = parameters.randomize(plain, dtypes, 0)
        trained = {name: made.pop(name) for name, p in declared.items() if p.trained}
        if quant is not None:
            stacks = {name: p for name, p in declared.items() if p.quantized}
            made |= randomly_quantized(stacks, format_named(quant), precision.dtype)
        return trained, made

    return Lora(gradients, step, lambda trained: initial_state(optimizer, trained), values)


def randomly_quantized(
    stacks: dict[str, parameters.Parameter], format: Format, dtype: jnp.dtype
) -> dict[str, QuantizedArray]:
    """Random matrices of a format; only one of them at a time exists as it was before."""

    def matrices(parameter: parameters.Parameter, key: jax.Array) -> QuantizedArray:
        def one(key: jax.Array) -> QuantizedArray:
            return format.quantize(parameter.init(key, parameter.shape[1:], jnp.float32).astype(dtype))

        return jax.lax.map(one, jax.random.split(key, len(parameter.layers)))

    def make_all() -> dict[str, QuantizedArray]:
        keys = jax.random.split(jax.random.key(0), len(stacks))
        return {name: matrices(parameter, key) for (name, parameter), key in zip(stacks.items(), keys)}

    places = {
        name: jax.tree.map(lambda leaf: leaf.sharding, format.abstract(p.shape, dtype, p.axes))
        for name, p in stacks.items()
    }
    return jax.jit(make_all, out_shardings=places)()


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
