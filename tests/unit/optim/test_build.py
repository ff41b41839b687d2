"""How rules run: in place, layer after layer, with bfloat16 rounding, rates and decays by layer, and a saved state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.checkpoint import CheckpointManager
from jaxtune.optim.build import Trained, UpdateInputs, build
from jaxtune.optim.driver import round_stochastically
from jaxtune.optim.options import OptimOptions

LAYERS = 3
NAMES = {
    "stack": Trained(tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(LAYERS)), (LAYERS,), is_matrix=True),
    "vector": Trained(tuple(f"model.layers.{i}.mlp.up_proj.bias" for i in range(LAYERS)), (LAYERS,)),
    "embed": Trained(("model.embed_tokens.weight",)),
}
EVERY = ["adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon"]


def parameters(dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"stack": (LAYERS, 128, 256), "vector": (LAYERS, 128), "embed": (256, 64)}
    return {name: jax.random.normal(key, shape).astype(dtype) for key, (name, shape) in zip(keys, shapes.items())}


def at(rate=1e-2, factor=1.0, finite=True, key=0) -> UpdateInputs:
    return UpdateInputs(jnp.float32(rate), jnp.float32(factor), jnp.bool_(finite), jax.random.key(key))


@functools.cache
def compiled(optim):
    """Return (init, update) of an optimizer, compiled once for all tests."""
    optimizer = build(optim, NAMES, LAYERS, jnp.float32)
    return jax.jit(optimizer.init), jax.jit(optimizer.update)


def update_from(optim, start, steps=3, **options):
    init, update = compiled(optim)
    state = init(start)
    for number in range(steps):
        start, state = update(parameters(seed=number + 1), state, start, at(key=number, **options))
    return start, state


@pytest.mark.parametrize("name", EVERY)
def test_each_layer_of_a_stack_is_updated_as_if_it_were_alone(one_device, name):
    optim = OptimOptions(name=name, weight_decay=0.1)
    together, _ = update_from(optim, parameters())
    layer_names = {"stack": Trained(NAMES["stack"].names[1:2], (1,), is_matrix=True)}
    optimizer = build(optim, layer_names, LAYERS, jnp.float32)
    alone = {"stack": parameters()["stack"][1:2]}
    state, update = optimizer.init(alone), jax.jit(optimizer.update)
    for number in range(3):
        gradient = {"stack": parameters(seed=number + 1)["stack"][1:2]}
        alone, state = update(gradient, state, alone, at(key=number))
    np.testing.assert_allclose(together["stack"][1], alone["stack"][0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_experts_of_layers_are_updated_as_one_stack(one_device, name):
    """Bit for bit: a parameter of 3 layers x 2 experts, and one of 6 layers."""
    names = tuple(f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(LAYERS) for e in range(2))
    results = []
    for lead in ((LAYERS, 2), (LAYERS * 2,)):
        optimizer = build(OptimOptions(name=name), {"up": Trained(names, lead, is_matrix=True)}, LAYERS, jnp.float32)
        start, gradient = (parameters(seed=seed)["stack"].reshape(*lead, 64, -1) for seed in (0, 1))
        state = jax.jit(optimizer.init)({"up": start})
        results.append(jax.jit(optimizer.update)({"up": gradient}, state, {"up": start}, at()))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(one.reshape(other.shape), other)


@pytest.mark.parametrize("name", EVERY)
def test_a_step_that_is_not_finite_changes_no_bit(one_device, name):
    optim = OptimOptions(name=name, weight_decay=0.1)
    before = update_from(optim, parameters())
    nan = jax.tree.map(lambda x: x * jnp.nan, parameters())
    after = compiled(optim)[1](nan, before[1], before[0], at(finite=False))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_rates_and_decays_are_chosen_by_name_and_layer(one_device):
    """SGD without momentum, because it shows rates and decays directly."""
    optim = OptimOptions(
        name="sgd",
        beta1=0.0,
        weight_decay=0.5,
        lr_multipliers=(r"layers\.1\.=0", r"embed=2"),
        decay_multipliers=(r"layers\.2\.mlp\.up_proj\.weight=3",),
        layerwise_lr_decay=0.5,
    )
    start = parameters()
    after, _ = update_from(optim, start, steps=1)
    gradients = parameters(seed=1)
    rates = np.array([0.125, 0.0, 0.5]) * 1e-2
    decays = np.array([0.5, 0.5, 1.5])
    expected = start["stack"] - rates[:, None, None] * (gradients["stack"] + decays[:, None, None] * start["stack"])
    np.testing.assert_allclose(after["stack"], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(after["vector"], start["vector"] - rates[:, None] * gradients["vector"], rtol=1e-5)
    embed = start["embed"] - 2 * 0.0625 * 1e-2 * gradients["embed"]
    np.testing.assert_allclose(after["embed"], embed, rtol=1e-5, atol=1e-7)


def test_a_parameter_may_have_a_rate_of_its_own(one_device):
    """It multiplies the factors of the layers."""
    start, gradients = parameters(), parameters(seed=1)
    with_rate = {name: one._replace(rate=4.0 if name == "stack" else 1.0) for name, one in NAMES.items()}
    optim = OptimOptions(name="sgd", beta1=0.0, weight_decay=0.0, layerwise_lr_decay=0.5)
    moved = {}
    for number, named in enumerate((NAMES, with_rate)):
        optimizer = build(optim, named, LAYERS)
        after, _ = optimizer.update(gradients, optimizer.init(start), start, at(1e-2))
        moved[number] = {name: np.asarray(start[name] - after[name]) for name in start}
    np.testing.assert_allclose(moved[1]["stack"], 4 * moved[0]["stack"], rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(moved[1]["vector"], moved[0]["vector"])


def test_steps_too_small_for_bfloat16_add_up(one_device):
    """1 - 1e-4 is 1 in bfloat16; a thousand such steps add up to 0.9."""
    start = {"embed": jnp.ones((256, 64), jnp.bfloat16)}
    optimizer = build(OptimOptions(name="sgd", beta1=0.0), {"embed": NAMES["embed"]}, LAYERS)
    ones = {"embed": jnp.ones((256, 64))}

    def body(number, carry):
        return optimizer.update(ones, carry[1], carry[0], at(1e-4)._replace(key=jax.random.key(number)))

    after, _ = jax.jit(lambda carry: jax.lax.fori_loop(0, 1000, body, carry))((start, optimizer.init(start)))
    assert after["embed"].dtype == jnp.bfloat16
    assert abs(float(after["embed"].astype(jnp.float32).mean()) - 0.9) < 2e-3


def test_stochastic_rounding_is_right_on_average_and_never_further_than_a_neighbour(one_device):
    x = jnp.array([1.001, -3.337e-5, 7.7e20, 0.0, 1.0, jnp.inf, -jnp.inf, jnp.nan])
    many = jax.vmap(lambda key: round_stochastically(x, key).astype(jnp.float32))(
        jax.random.split(jax.random.key(0), 4000)
    )
    finite = np.isfinite(x)
    np.testing.assert_allclose(many.mean(0)[finite], x[finite], rtol=3e-4)
    assert np.all(np.abs(many[:, finite] - x[finite]) <= np.abs(x[finite]) * 2.0**-7)
    np.testing.assert_array_equal(many[:, 3:5], np.broadcast_to(x[3:5], (4000, 2)))
    np.testing.assert_array_equal(many[:, ~finite], np.broadcast_to(x[~finite], (4000, 3)))


def test_the_8_bit_update_computes_with_one_layer_at_a_time(one_device):
    """Temporary memory is less than the moments of three layers of sixteen; the arguments are overwritten.

    In float32: a CPU updates a bfloat16 array through a float32 copy.
    """
    layers, rows, columns = 16, 128, 2048
    names = tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(layers))
    named = {"stack": Trained(names, (layers,), is_matrix=True)}
    optimizer = build(OptimOptions(name="adamw_8bit"), named, layers)
    place = jax.NamedSharding(one_device, jax.P(None, None, None))
    weights = {"stack": jax.ShapeDtypeStruct((layers, rows, columns), jnp.float32, sharding=place)}
    state = jax.eval_shape(optimizer.init, weights)
    moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.rules))
    assert moments <= 2.05 * layers * rows * columns
    step = jax.eval_shape(at)
    memory = jax.jit(optimizer.update, donate_argnums=(1, 2)).lower(weights, state, weights, step).compile()
    memory = memory.memory_analysis()
    of_a_layer = 2 * 4 * rows * columns
    assert memory.temp_size_in_bytes < 3 * of_a_layer
    assert memory.alias_size_in_bytes >= moments + 4 * layers * rows * columns


@pytest.mark.parametrize("name", EVERY)
def test_a_saved_state_goes_on_as_if_it_had_not_been_saved(one_device, tmp_path, name):
    """Bit for bit; also in bfloat16 with stochastic rounding."""
    narrow = name in ("adamw", "sgd", "lion", "muon", "normuon")
    optim = OptimOptions(name=name, state_dtype="bfloat16" if narrow else "float32")
    init, update = compiled(optim)

    def run(carry, steps):
        for number in steps:
            carry = update(parameters(seed=number + 1), carry[1], carry[0], at(key=number))
        return carry

    start = parameters(jnp.bfloat16)
    half = run((start, init(start)), range(2))
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(2, half, {})
    checkpoints.wait(final=True)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), half)
    restored = checkpoints.restore(abstract)
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, run(half, range(2, 4)), run(restored.state, range(2, 4)))
