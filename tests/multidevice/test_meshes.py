"""The same training on every mesh: losses and parameters equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.config.schema import Mesh, Optim
from jaxtune.models.parameters import declare, randomize
from jaxtune.models.spec import Adapter, Layer, ModelSpec, Rope
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.build import Trained, build
from jaxtune.parallel.layout import TOKENS
from jaxtune.parallel.mesh import make_mesh
from jaxtune.precision.recipes import RECIPES
from jaxtune.run.step import accumulated_gradients, initial_state, make_train_step

LINEARS = frozenset(
    [f"attention.{name}" for name in ("q", "k", "v", "o")] + [f"mlp.{name}" for name in ("gate", "up", "down")]
)
ROWS, SEQUENCE, STEPS = 8, 24, 20


def spec(lora: bool) -> ModelSpec:
    layer = Layer(adapters=LINEARS if lora else frozenset())
    windowed = Layer(window=8, adapters=layer.adapters)
    return ModelSpec(
        family="qwen3",
        vocabulary=300,
        hidden=32,
        intermediate=64,
        heads=8,
        kv_heads=2,
        head_dim=8,
        layers=(layer, layer, windowed),
        rope=Rope(1e4),
        norm_epsilon=1e-6,
        max_positions=64,
        tied=not lora,
        qk_norm=True,
        initializer_range=0.1,
        adapter=Adapter(rank=4, scale=2.0, dropout=0.2) if lora else None,
    )


@functools.cache
def fields() -> dict[str, np.ndarray]:
    """Ragged packed rows: a different number of targets in each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, (STEPS, ROWS, SEQUENCE)).astype(np.int32)
    length = rng.integers(2, SEQUENCE, (STEPS, ROWS, 1))
    index = np.arange(SEQUENCE)
    start = np.where(index < length, 0, length)
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=2),
        "positions": (index - start).astype(np.int32),
        "segment_ids": (1 + (index >= length)).astype(np.int32),
        "key_start": start.astype(np.int32),
        "loss_weight": (index < length - 1).astype(np.float32),
        "row": np.arange(STEPS * ROWS, dtype=np.int32).reshape(STEPS, ROWS),
    }


def train(mesh: Mesh, lora: bool, devices: int = 8, accumulate: int = 1, optimizer: str = "adamw"):
    """Losses of 20 steps, and the trained parameters afterwards."""
    made = make_mesh(mesh, jax.devices()[:devices])
    model = spec(lora)
    graph, declared = declare(model)
    values = randomize(declared, dict.fromkeys(declared, jnp.dtype("float32")), seed=0)
    trained = {name: value for name, value in values.items() if declared[name].trained}
    frozen = {name: value for name, value in values.items() if not declared[name].trained}
    rules = build(
        Optim(name=optimizer, weight_decay=0.1),
        {name: Trained((name,) * max(1, len(declared[name].layers)), bool(declared[name].layers)) for name in trained},
        len(model.layers),
        jnp.float32,
    )
    recipe = RECIPES["fp32"]
    gradients = accumulated_gradients(graph, cross_entropy, recipe, "block", seed=0)
    step = jax.jit(make_train_step(gradients, rules, lambda _: jnp.float32(1e-3), 1.0, recipe), donate_argnums=0)
    state, losses = initial_state(rules, trained), []
    for number in range(STEPS):
        batch = {}
        for name, values in fields().items():
            value = values[number].reshape(accumulate, ROWS // accumulate, *values.shape[2:])
            spec_ = jax.P(None, *TOKENS) if value.ndim == 3 else jax.P(None, TOKENS[0])
            batch[name] = jax.device_put(value, jax.NamedSharding(made, spec_))
        state, metrics = step(state, frozen, batch)
        losses.append(metrics["loss"].item())
    return np.array(losses), {name: np.asarray(value) for name, value in state.trained.items()}


@functools.cache
def one_device(lora: bool, optimizer: str = "adamw"):
    return train(Mesh(), lora, devices=1, optimizer=optimizer)


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [
        pytest.param(Mesh(data=8, fsdp=1), False, marks=pytest.mark.slow, id="data=8"),
        pytest.param(Mesh(fsdp=8), False, marks=pytest.mark.slow, id="fsdp=8"),
        pytest.param(Mesh(data=2, fsdp=4), True, marks=pytest.mark.slow, id="data=2 fsdp=4, lora"),
        pytest.param(Mesh(fsdp=4, tensor=2), False, marks=pytest.mark.slow, id="fsdp=4 tensor=2"),
        pytest.param(Mesh(fsdp=4, tensor=2), True, id="fsdp=4 tensor=2, lora"),
    ],
)
def test_equals_one_device(mesh, lora):
    expected_losses, expected = one_device(lora)
    losses, parameters = train(mesh, lora)
    assert np.abs(losses / expected_losses - 1).max() <= 1e-6
    for name, value in expected.items():
        assert np.abs(parameters[name] - value).max() <= 1e-4 * np.abs(value).max(), name


# Of the loss: moments in 8 bits and signs of gradients jump where a sum in another order takes them over an edge.
OPTIMIZERS = {
    "sgd": 1e-6,
    "adafactor": 1e-6,
    "schedule_free": 1e-6,
    "muon": 1e-5,
    "normuon": 1e-5,
    "lion": 1e-4,
    "adamw_8bit": 1e-4,
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_one_device(optimizer):
    expected, _ = one_device(False, optimizer)
    losses, _ = train(Mesh(fsdp=4, tensor=2), False, optimizer=optimizer)
    apart = np.abs(losses / expected - 1).max()
    print(optimizer, apart)
    assert apart <= OPTIMIZERS[optimizer]
    assert losses[-1] < losses[0]


def test_a_batch_accumulated_row_by_row_equals_it_at_once():
    expected_losses, expected = one_device(True)
    losses, parameters = train(Mesh(), True, devices=1, accumulate=8)
    assert np.abs(losses / expected_losses - 1).max() <= 1e-6
    for name, value in expected.items():
        assert np.abs(parameters[name] - value).max() <= 1e-4 * np.abs(value).max(), name


def test_a_dimension_that_does_not_divide_is_told_with_sizes_that_would():
    from jaxtune.models.parameters import undivided

    mesh = make_mesh(Mesh(tensor=8))
    _, declared = declare(spec(False))
    assert undivided(spec(False), declared, mesh) == ["mesh.tensor=8 does not divide kv_heads=2; these would: [1, 2]"]


def test_a_mesh_that_does_not_fit_says_so():
    from jaxtune.errors import UserError

    with pytest.raises(UserError, match="span 3 devices and there are 8"):
        make_mesh(Mesh(data=3, fsdp=1))
