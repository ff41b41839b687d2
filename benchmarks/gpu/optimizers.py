"""One update of all parameters of Qwen3 by each optimizer, in turns with optax's AdamW; no model runs.

An update must read the gradients, and read and write parameters and state; the state of `adamw_8bit` is two codes a
weight and a float32 for each 256 elements of a moment. The bandwidth is these bytes over the time. Other states have
the dtype of the weights, also in optax; jaxtune rounds bfloat16 stochastically, optax to nearest. Muon and NorMuon also
multiply matrices, which the bytes do not count.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gpu import models
from gpu.qwen3 import CONFIGS
from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from jaxtune.optim.build import UpdateInputs
from pallas_kernels.gpus import GPUS

NAMES = ("adamw_8bit", "adamw", "normuon", "muon")
SIZES = ("0.6B", "1.7B")
DTYPES = ("bfloat16", "float32")
SMOKE_CASES = (("adamw_8bit", "tiny", "float32"),)
ROOM = 0.75  # of the GPU's memory, for the gradients and two sets of parameters and state: the contender's and optax's

# Parameters and state, which an update returns changed.
Held = tuple[Any, Any]


def piece(smoke: bool) -> Piece:
    """The jobs: optimizers by models and weight dtypes."""
    cases = SMOKE_CASES if smoke else [(name, size, dtype) for size in SIZES for dtype in DTYPES for name in NAMES]
    jobs = [
        Job(name, f"{size}-{dtype}", __name__, {"name": name, "size": size, "dtype": dtype, "smoke": smoke})
        for name, size, dtype in cases
    ]
    columns = (
        ("layers", "layers", "d"),
        ("bytes/weight", "bytes_per_parameter", ".2f"),
        ("ms", "milliseconds", ",.2f"),
        ("GB/s", "gb_per_second", ",.0f"),
        ("of the GPU %", "bandwidth_percent", ".0f"),
        ("optax ms", "optax_milliseconds", ",.2f"),
        ("over optax", "over_optax", ".2f"),
    )
    title = "an update of all parameters, in turns with optax's AdamW; time over optax's"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
    return Piece("optimizers", title, jobs, columns, 0.04, 60, environment, fresh=True)


def measure(name: str, size: str, dtype: str, smoke: bool) -> Row:
    """Time an update and optax's, with as many layers as fit."""
    device = jax.devices()[0]
    jax.set_mesh(models.one_device_mesh(device))
    room = (device.memory_stats() or {}).get("bytes_limit", float("inf")) * ROOM
    optim = models.OptimOptions(name=name, learning_rate=models.RATE, weight_decay=0.1, state_dtype=dtype)
    precision = models.PrecisionOptions(master_dtype=dtype)
    reference = optax.adamw(models.RATE, weight_decay=0.1)

    for layers in range(CONFIGS[size]["num_hidden_layers"], 0, -1):
        config = CONFIGS[size] | {"num_hidden_layers": layers}
        built = models.training(config, lora=False, optim=optim, precision=precision)
        trained = built.state.trained
        states = built.state.optimizer, jax.eval_shape(reference.init, trained)
        held, held_by_optax = (size_of((trained, state)) for state in states)
        if size_of(trained) + held + held_by_optax <= room:
            break
    else:
        return {"refused": f"one layer of {size} does not fit {room / 1e9:.0f} GB"}

    parameters = models.values(built)[0]
    gradients = random_gradients(parameters)

    def by_jaxtune(gradients: Any, held: Held) -> Held:
        now, state = held
        step = UpdateInputs(jnp.float32(models.RATE), jnp.float32(1.0), jnp.bool(True), jax.random.key(0))
        return built.optimizer.update(gradients, state, now, step)

    def by_optax(gradients: Any, held: Held) -> Held:
        now, state = held
        changes, state = reference.update(gradients, state, now)
        return optax.apply_updates(now, changes), state

    calls = {
        "own": in_place(by_jaxtune, gradients, jax.tree.map(jnp.copy, parameters), built.optimizer.init),
        "optax": in_place(by_optax, gradients, parameters, reference.init),
    }
    seconds = seconds_per_call(calls, *((2, 0.0) if smoke else (7, 0.1)))
    count = sum(leaf.size for leaf in jax.tree.leaves(gradients))
    moved = size_of(gradients) + 2 * held
    row: Row = {
        "layers": layers,
        "parameters": count,
        "bytes_per_parameter": moved / count,
        "state_bytes_per_parameter": size_of(states[0]) / count,
        "milliseconds": seconds["own"] * 1e3,
        "gb_per_second": moved / seconds["own"] / 1e9,
        "optax_milliseconds": seconds["optax"] * 1e3,
        "over_optax": seconds["own"] / seconds["optax"],
    }
    bandwidth = next((gpu.memory_bandwidth for gpu in GPUS.values() if gpu.kind == device.device_kind), None)
    if bandwidth is not None:
        row["bandwidth_percent"] = 100 * moved / seconds["own"] / bandwidth
    return row


def size_of(tree: Any) -> int:
    """Return the bytes of a tree's arrays, which may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@jax.jit
def random_gradients(parameters: Any) -> Any:
    """Return normally distributed gradients with the parameters' shapes and dtypes."""
    leaves, tree = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([1e-3 * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves)])


def in_place(update: Callable[[Any, Held], Held], gradients: Any, parameters: Any, init: Callable) -> Call:
    """Return a call that updates parameters and state in place (donated), each time from the previous result."""
    compiled = jax.jit(update, donate_argnums=1, compiler_options=compiler_options())
    held: Held = (parameters, jax.jit(init)(parameters))

    def run() -> Held:
        nonlocal held
        held = compiled(gradients, held)
        return held

    return Call(run, jax.block_until_ready)
