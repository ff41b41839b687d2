"""Effects of `optim` options outside the update rule: the dtype of the state, and separate rates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.optim.build import Trained, UpdateInputs, build
from jaxtune.optim.options import MuonOptions, NormuonOptions, OptimOptions

NAMES = {
    "matrix": tuple(f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)),
    "norm": tuple(f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)),
    "embedding": ("model.embed_tokens.weight",),
}
SHAPES = {"matrix": (2, 32, 64), "norm": (2, 64), "embedding": (64, 32)}


def after(optim, gradients, steps=1, sizes=(1.0,)):
    """Return (parameters, state) after updates from zero parameters, by the gradients times each size in turn."""
    leads = {name: (2,) if len(NAMES[name]) > 1 else () for name in gradients}
    trained = {name: Trained(NAMES[name], lead, is_matrix=name == "matrix") for name, lead in leads.items()}
    optimizer = build(optim, trained, 2)

    @jax.jit
    def update(parameters, state, number, size):
        step = UpdateInputs(jnp.float32(optim.learning_rate), size, jnp.bool(True), jax.random.key(number))
        return optimizer.update(gradients, state, parameters, step)

    parameters = jax.tree.map(jnp.zeros_like, gradients)
    state = optimizer.init(parameters)
    for number in range(steps):
        parameters, state = update(parameters, state, number, jnp.float32(sizes[number % len(sizes)]))
    return parameters, state


def some_gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("adamw", "float32"), *((name, "bfloat16") for name in ("adamw", "sgd", "lion", "muon", "normuon"))],
)
def test_moments_are_kept_in_state_dtype(one_device, name, dtype):
    _, state = after(OptimOptions(name=name, state_dtype=dtype), some_gradients())
    dtypes = {
        str(leaf.dtype)
        for parameter, rule_state in state.rules.items()
        for leaf in jax.tree.leaves(rule_state)
        if leaf.shape == SHAPES[parameter]
    }
    assert dtypes == {dtype}


def test_moments_in_bfloat16_are_rounded_stochastically(one_device):
    """Rounded to the nearest, a moment would not change by a thousandth: it would stay constant."""
    optim = OptimOptions(beta1=0.999, learning_rate=1e-3, state_dtype="bfloat16")
    ones = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    _, state = after(optim, ones, steps=400)
    for moment in jax.tree.leaves(state.rules["matrix"]):
        assert abs(float(moment.astype(jnp.float32).mean()) / (1 - 0.999**400) - 1) < 0.01


def test_muon_has_a_learning_rate_of_its_own_for_matrices(one_device):
    gradients = some_gradients()
    same, _ = after(OptimOptions(name="muon", learning_rate=1e-3), gradients)
    separate, _ = after(OptimOptions(name="muon", learning_rate=1e-3, muon=MuonOptions(learning_rate=0.02)), gradients)
    np.testing.assert_allclose(separate["matrix"], 20 * same["matrix"], rtol=1e-4)
    for name in ("norm", "embedding"):
        np.testing.assert_array_equal(separate[name], same[name])
        assert jnp.abs(same[name]).min() > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"beta1": 0.5}),
        ("adamw", {"beta2": 0.5}),
        ("adamw", {"epsilon": 0.5}),
        ("adamw_8bit", {"beta2": 0.5}),
        ("sgd", {"beta1": 0.5}),
        ("lion", {"beta1": 0.5}),
        ("lion", {"beta2": 0.5}),
        ("muon", {"muon": MuonOptions(momentum=0.5)}),
        ("muon", {"muon": MuonOptions(nesterov=False)}),
        ("muon", {"muon": MuonOptions(ns_steps=2)}),
        ("muon", {"muon": MuonOptions(adjust_lr="match_rms_adamw")}),
        ("normuon", {"normuon": NormuonOptions(momentum=0.5)}),
        ("normuon", {"normuon": NormuonOptions(beta2=0.5)}),
        ("normuon", {"normuon": NormuonOptions(ns_steps=2)}),
        ("normuon", {"normuon": NormuonOptions(cautious_wd=False)}),
    ],
)
def test_every_option_reaches_the_update(one_device, name, options):
    optim = OptimOptions(name=name, learning_rate=0.1, weight_decay=0.5)
    random = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
    gradients = {"matrix": jnp.asarray(random)}
    sizes = (1.0, -0.003, -0.3)
    plain, _ = after(optim, gradients, 3, sizes)
    changed, _ = after(dataclasses.replace(optim, **options), gradients, 3, sizes)
    assert jnp.abs(changed["matrix"] - plain["matrix"]).max() > 1e-3 * jnp.abs(plain["matrix"]).max()
