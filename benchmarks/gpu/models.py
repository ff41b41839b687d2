"""The training step of a Qwen model with random weights, made of jaxtune's parts that need neither data nor a run."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu.quantized import format_named
from gpu.qwen3 import ALPHA, RANK
from jaxtune.config.schema import Lora, Optim, Precision
from jaxtune.lora.inject import inject
from jaxtune.models import families, parameters
from jaxtune.models.mark import mark, selected
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.build import Optimizer, Trained, build
from jaxtune.parallel.layout import AXES, TOKENS
from jaxtune.precision.operands import abstract_operands, make_operands
from jaxtune.precision.recipes import Recipe, linears_of, numbers_of, recipe_of
from jaxtune.quant import Format
from jaxtune.run.step import Batch, Gradients, State, accumulated_gradients, initial_state, make_train_step

LORA = Lora(enabled=True, rank=RANK, alpha=ALPHA)
RATE = 1e-4


class Training(NamedTuple):
    """A model on the current mesh, and its step. Nothing is on the device before `values` is called."""

    trained: dict[str, jax.ShapeDtypeStruct]
    optimizer: Optimizer
    gradients: Gradients
    step: Callable[..., Any]
    state: Callable[[dict], State]  # from the trained parameters
    values: Callable[[], tuple[dict, dict]]  # (trained, frozen), random


def one_device_mesh(device: jax.Device) -> jax.sharding.Mesh:
    """One device under all axes."""
    return jax.make_mesh((1,) * len(AXES), AXES, devices=[device])


def training(
    config: dict,
    *,
    remat: Any = "none",
    lora: bool = True,
    quant: str | None = None,
    precision: Any = Precision(),
    optim: Any = Optim(learning_rate=RATE),
) -> Training:
    """The model of a config.json with adapters on every linear, or trained whole, at a constant learning rate.

    `quant`: the format of frozen linears. `precision` and `optim`: sections of the config, as a recipe has them.
    """
    spec = families.read_spec({"model_type": "qwen3"} | config)
    if quant is not None:
        spec = mark(spec, families.linears(spec), "quantized")
    if numbers_of(precision) is not None:
        spec = mark(spec, selected(spec, precision, "precision"), "low_precision")
    if lora:
        spec = inject(spec, LORA)
    graph, declared = parameters.declare(spec)
    recipe = recipe_of(precision, linears_of(precision, declared))
    named = {
        name: Trained(families.hf_names(spec.family, p), bool(p.layers)) for name, p in declared.items() if p.trained
    }
    products = jnp.float32 if precision.recipe == "fp32" else jnp.bfloat16
    optimizer = build(optim, named, len(spec.layers), products)
    gradients = accumulated_gradients(graph, cross_entropy, recipe, remat, 0)
    rate = optim.learning_rate
    step = make_train_step(gradients, optimizer, lambda _: jnp.float32(rate), optim.max_grad_norm, recipe)

    of_trained = jnp.dtype(LORA.dtype if lora else precision.master_dtype)
    dtypes = {name: of_trained if p.trained else recipe.dtype for name, p in declared.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(declared[name].shape, of_trained, sharding=declared[name].sharding) for name in named
    }

    def values() -> tuple[dict, dict]:
        few_bits = {name: p for name, p in declared.items() if not p.trained and (p.quantized or p.low_precision)}
        made = parameters.randomize({name: p for name, p in declared.items() if name not in few_bits}, dtypes, 0)
        trained = {name: made.pop(name) for name in named}
        return trained, made | random_in_few_bits(few_bits, None if quant is None else format_named(quant), recipe)

    return Training(
        abstract, optimizer, gradients, step, lambda trained: initial_state(optimizer, trained, recipe), values
    )


def random_in_few_bits(
    stacks: dict[str, parameters.Parameter], format: Format | None, recipe: Recipe
) -> dict[str, Any]:
    """Random frozen matrices in a format, else operands of the recipe; one at a time exists as it was before."""
    linears = recipe.linears

    def stored(weight: jax.Array, axes: tuple[str | None, ...]) -> Any:
        if format is not None:
            return format.quantize(weight)
        assert linears is not None
        return make_operands(weight, linears.numbers, axes)

    def matrices(parameter: parameters.Parameter, key: jax.Array) -> Any:
        def one(key: jax.Array) -> Any:
            weight = parameter.init(key, parameter.shape[1:], jnp.float32).astype(recipe.dtype)
            return stored(weight, parameter.axes[1:])

        return jax.lax.map(one, jax.random.split(key, len(parameter.layers)))

    def make_all() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), len(stacks))
        return {name: matrices(parameter, key) for (name, parameter), key in zip(stacks.items(), keys)}

    def abstract(p: parameters.Parameter) -> Any:
        if format is not None:
            return format.abstract(p.shape, recipe.dtype, p.axes)
        assert linears is not None
        return abstract_operands(linears.numbers, p.shape, recipe.dtype, p.axes)

    places = {name: jax.tree.map(lambda leaf: leaf.sharding, abstract(p)) for name, p in stacks.items()}
    made = jax.jit(make_all, out_shardings=places)()
    return made if linears is None else {name: linears.frozen(weight) for name, weight in made.items()}


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
