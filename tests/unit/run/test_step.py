"""The step: AdamW as in torch, clipping, decay by name, non-finite steps, program size."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from jax.extend.core import jaxprs_in_params
from nightly_rows import nightly
from tiny import random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.models.layers import mlp
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.objectives.objective import Sums
from jaxtune.objectives.options import RolloutOptions
from jaxtune.optim.build import Trained, build
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.precision.recipes import RECIPES
from jaxtune.training.assembly import Program, assemble
from jaxtune.training.state import State, initial_state
from jaxtune.training.step import GradientSums, StepOptions, make_train_step
from jaxtune.weights.base import Base

AS_FOR_USERS = True  # tests/conftest.py: compiled by XLA's own choice of code generator


def program_of(
    mesh, layers=4, remat="block", precision="fp32", lora=None, unroll=False, exclude=None, **sections
) -> Program:
    """Return the program of a tiny model, made from its spec only; by default with adapters."""
    config = Config(
        model=ModelOptions(dtype="bfloat16" if precision == "bf16" else "float32"),
        data=DataOptions(seq_len=24),
        lora=LoraOptions(enabled=True, rank=2) if lora is None else lora,
        precision=PrecisionOptions(precision, exclude=exclude),
        memory=MemoryOptions(remat, unroll),
        **sections,
    )
    return assemble(Base(spec(layers)), config, mesh)


def compiled_step(program: Program, batch) -> str:
    """Return the optimised HLO of a whole step."""
    return jax.jit(program.step).lower(program.state, program.frozen, batch, jnp.float32(1e-3)).compile().as_text()


def test_the_program_does_not_grow_with_the_layers(one_device):
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(1, 32), one_device))

    def instructions(layers: int) -> int:
        text = compiled_step(program_of(one_device, layers), batch)
        return len(re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = ", text, re.M))

    assert instructions(32) <= 1.05 * instructions(4)


def test_a_longer_training_or_another_rate_is_not_compiled_again(one_device):
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(1, 32), one_device))

    def lowered(steps: int, rate: float) -> str:
        made = program_of(
            one_device, train=TrainOptions(max_steps=steps), optim=OptimOptions(learning_rate=rate, schedule="cosine")
        )
        return jax.jit(made.step).lower(made.state, made.frozen, batch, jnp.float32(rate)).as_text()

    assert lowered(10, 1e-3) == lowered(20, 2e-3)


def test_no_array_is_sequence_by_sequence(one_device):
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(1, 2048), one_device))
    text = compiled_step(program_of(one_device), batch)
    assert not re.search(r"\[[\d,]*2048,2048[\],]", text)


@pytest.mark.parametrize(
    "policies",
    [
        pytest.param((("block",), ("offload",)), id="most"),
        pytest.param(
            (("ffn",), ("qkv",), ("dots",), ("attention+qkv",), ("none", True), ("block", True), ("offload", True)),
            id="others",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_remat_policy_in_a_loop_or_without_gives_the_same_gradients(one_device, policies):
    lora = LoraOptions(enabled=True, rank=2, dropout=0.3)
    declared = program_of(one_device, 2, lora=lora).model.parameters
    values = random_values(declared)
    values |= {name: jnp.ones_like(value) * 0.1 for name, value in values.items() if name.endswith("lora_b")}
    trained = {name: value for name, value in values.items() if declared[name].trained}
    frozen = {name: value for name, value in values.items() if not declared[name].trained}
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 24), one_device, [10, 12]))

    def gradients(remat, unroll=False):
        computed = program_of(one_device, 2, remat=remat, unroll=unroll, lora=lora).gradients
        # LLVM fuses adjacent multiplies and adds, which differs from program to program.
        plain = jax.jit(computed, compiler_options={"xla_backend_optimization_level": 0})
        return plain(trained, frozen, batch, jnp.int32(3)).gradients

    expected = gradients("none")
    assert all(jnp.abs(gradient).max() > 0 for gradient in expected.values())
    for policy in policies:
        for name, gradient in gradients(*policy).items():
            assert jnp.abs(gradient - expected[name]).max() <= 1e-6 * jnp.abs(expected[name]).max(), (policy, name)


def scans_over_layers(remat, mesh):
    """Return the forward and the backward scan over layers of a bfloat16 LoRA step on 2 rows of 24 tokens."""
    program = program_of(mesh, remat=remat, precision="bf16", lora=LoraOptions(enabled=True, rank=2, dropout=0.3))
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 24), mesh))
    traced = jax.make_jaxpr(program.gradients)(program.state.trained, program.frozen, batch, jnp.int32(0))
    scans = [e for e in equations(traced.jaxpr) if e.primitive.name == "scan" and e.params["length"] == 4]
    return sorted(scans, key=lambda scan: scan.params["reverse"])


def equations(jaxpr):
    """Yield every equation, also from inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


ACTIVATIONS = {(2, 24, 16): 2, (2, 24, 8): 2, (2, 24, 32): 2, (2, 24, 2): 7}  # of q and o, k and v, gate and up, x A^T
WITHOUT_QKV = {(2, 24, 16): 1, (2, 24, 8): 0}
KEPT = {
    "none": {"bfloat16": ACTIVATIONS | {(2, 24, 2, 8): 1}, "float32": {(2, 2, 24): 1}},
    "ffn": {"bfloat16": ACTIVATIONS | {(2, 24, 32): 0, (2, 24, 2, 8): 1}, "float32": {(2, 2, 24): 1}},
    "qkv": {"bfloat16": ACTIVATIONS | WITHOUT_QKV | {(2, 24, 2, 8): 1}, "float32": {(2, 2, 24): 1}},
    "dots": {"bfloat16": ACTIVATIONS},
    "attention+qkv": {"bfloat16": ACTIVATIONS | WITHOUT_QKV},
    "block": {},
    "offload": {},
}


@pytest.mark.parametrize("remat", KEPT)
def test_a_layer_keeps_its_input_and_what_the_policy_names(one_device, remat):
    """Each array once, in the dtype of the step; no copy of a weight and no elementwise result."""
    forward, _ = scans_over_layers(remat, one_device)
    residuals = [value.aval for value in forward.outvars if value.aval.shape[0] == 4]  # the carry is 2 rows
    expected = Counter({("bfloat16", (2, 24, 16)): 1})
    for dtype, shapes in KEPT[remat].items():
        expected.update({(dtype, shape): count for shape, count in shapes.items()})
    assert Counter((value.dtype.name, value.shape[1:]) for value in residuals) == expected
    assert all((value.memory_space == jax.memory.Space.Host) == (remat == "offload") for value in residuals)


def test_long_rows_pass_the_feed_forward_tile_by_tile(one_device, monkeypatch):
    """The gradients are the same, and no array has the whole row and the inner width, forward or backward."""
    values = {}
    for tokens_at_once in (2**14, 16):  # 2 rows of 24: three tiles of 8 positions
        monkeypatch.setattr(mlp, "TILE", tokens_at_once)
        program = program_of(one_device, remat="offload")
        batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 24), one_device, [10, 12]))
        start = random_values(program.model.parameters)
        trained, frozen = ({name: start[name] for name in part} for part in (program.state.trained, program.frozen))
        traced = jax.make_jaxpr(program.gradients)(trained, frozen, batch, jnp.int32(0))
        inner = [e for e in equations(traced.jaxpr) for value in e.outvars if value.aval.shape == (2, 24, 32)]
        assert bool(inner) == (tokens_at_once > 48)
        values[tokens_at_once] = jax.jit(program.gradients)(trained, frozen, batch, jnp.int32(0)).gradients
    whole, tiled = values.values()
    for name, gradient in whole.items():
        np.testing.assert_allclose(tiled[name], gradient, atol=2e-6 * jnp.abs(gradient).max(), err_msg=name)


@pytest.mark.nightly
def test_tiles_leave_the_amax_of_delayed_scales_as_it_is(one_device, monkeypatch):
    """An amax arrives as the gradient of a scale, and gradients of tiles are added."""
    amaxes = []
    for tokens_at_once in (2**14, 16):
        monkeypatch.setattr(mlp, "TILE", tokens_at_once)
        program = program_of(
            one_device, remat="offload", precision="fp8_hybrid", lora=LoraOptions(), exclude="[kv]_proj"
        )
        batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 24), one_device, [10, 12]))
        state = program.start(random_values(program.model.parameters))
        amaxes.append(jax.jit(program.step)(state, {}, batch, jnp.float32(1e-3))[0].scaling.amax)
    whole, tiled = amaxes
    assert whole and all(amax.max() > 0 for amax in whole.values())
    jax.tree.map(np.testing.assert_array_equal, tiled, whole)


@pytest.mark.parametrize("devices", [nightly(1), 4])
def test_a_run_that_samples_computes_no_micro_batch_of_padding(devices):
    """The padding's weights are NaN here. With four devices, two have no row in the last micro-batch with tokens."""
    made = make_mesh(MeshOptions(data=devices, fsdp=1), jax.devices()[:devices])
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=24),
        precision=PrecisionOptions("fp32"),
        train=TrainOptions(micro_batch_size=4 // devices, grad_accum_steps=3),
        rollout=RolloutOptions(("r.py:r",), max_new_tokens=4),
    )
    with jax.set_mesh(made):
        program = assemble(Base(spec(2)), config, made, objective=cross_entropy())
        full = {name: np.asarray(x) for name, x in make_batch(tokens(4, 24), made).items()}
        there = np.arange(4)[:, None] < 2
        half = {name: x if name == "row" else np.where(there, x, 0) for name, x in full.items()}
        padding = {name: np.zeros_like(x) for name, x in full.items()} | {"loss_weight": full["loss_weight"] * np.nan}
        values = random_values(program.model.parameters)

        def gradients(*micro_batches):
            by_rows = lambda x: jax.device_put(x, jax.NamedSharding(made, P(None, *by_token()[: x.ndim - 1])))  # noqa: E731
            batch = {name: by_rows(np.stack([micro[name] for micro in micro_batches])) for name in full}
            return jax.device_get(jax.jit(program.gradients)(values, {}, batch, jnp.int32(0)).gradients)

        expected, found = gradients(full, half), gradients(full, half, padding)
    assert all(np.abs(gradient).max() > 0 for gradient in expected.values())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), found, expected)


@pytest.mark.parametrize(
    ("positions", "most", "parts"), [(24, 24, 1), (24, 23, 2), (24, 7, 4), (7, 3, 7), (2**19, 2**14, 32)]
)
def test_tiles_are_the_fewest_equal_parts(positions, most, parts):
    assert mlp.equal_parts(positions, most) == parts


@pytest.mark.parametrize(("remat", "products"), [("none", 7), ("dots", 7), ("block", 13)])
def test_no_weight_is_multiplied_again_without_remat(one_device, remat, products):
    """Seven backward products of frozen weights; with remat of the block all forward products except the last, too."""
    weights = {(16, 16), (8, 16), (32, 16), (16, 32)}
    _, backward = scans_over_layers(remat, one_device)
    dots = [e for e in equations(backward.params["jaxpr"].jaxpr) if e.primitive.name == "dot_general"]
    assert sum(any(value.aval.shape in weights for value in dot.invars) for dot in dots) == products


def step_on(gradient_of, optim: OptimOptions, parameters, names, max_norm=0.0, steps=5, averaged=False):
    """Return the state and metrics after steps whose gradient is `gradient_of(step)`; several names are a stack."""
    optimizer = build(optim, {key: Trained(one, (len(one),) if len(one) > 1 else ()) for key, one in names.items()}, 3)

    def gradients(trained, frozen, batch, step, *_):
        return GradientSums(gradient_of(step), Sums(jnp.float32(1.0), jnp.int32(1)))

    options = StepOptions(max_grad_norm=max_norm, ema_decay=optim.ema_decay or 0.0)
    step = make_train_step(gradients, optimizer, RECIPES["fp32"], options)
    state = initial_state(optimizer, parameters)._replace(average=parameters if averaged else {})
    batch = {"segment_ids": jnp.ones((1, 1, 1), jnp.int32)}
    rows = []
    for _ in range(steps):
        state, metrics = jax.jit(step)(state, {}, batch, jnp.float32(optim.learning_rate))
        rows.append(metrics)
    return state, rows


@pytest.mark.every_jax
def test_adamw_equals_torch():
    torch = pytest.importorskip("torch", reason="the reference is torch's AdamW (Python 3.11 here)")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4)).astype(np.float32)
    grads = rng.normal(size=(5, 3, 4)).astype(np.float32)
    optim = OptimOptions(learning_rate=1e-2, weight_decay=0.1, beta2=0.95, epsilon=1e-6)
    parameter = torch.nn.Parameter(torch.tensor(start))
    reference = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6)
    for grad in grads:
        parameter.grad = torch.tensor(grad) * 2.0
        torch.nn.utils.clip_grad_norm_([parameter], 1.5)
        reference.step()
    names = {"w": ("model.layers.0.mlp.up_proj.weight",) * 3}
    state, metrics = step_on(lambda s: {"w": jnp.asarray(grads)[s] * 2.0}, optim, {"w": jnp.asarray(start)}, names, 1.5)
    np.testing.assert_allclose(state.trained["w"], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics[0]["grad_norm"], 2 * np.linalg.norm(grads[0]), rtol=1e-6)


@pytest.mark.parametrize(("recipe", "precision"), [("fp32", "HIGHEST"), ("bf16", "DEFAULT")])
def test_newton_schulz_multiplies_as_exactly_as_the_recipe_says(one_device, recipe, precision):
    """On a GPU, float32 products of default precision would use TF32."""
    parameters = {"w": jnp.ones((2, 8, 4))}
    optimizer = build(OptimOptions("muon"), {"w": Trained(("a", "b"), (2,), is_matrix=True)}, 2, RECIPES[recipe].dtype)

    def gradients(trained, *_):
        return GradientSums(trained, Sums(jnp.float32(1.0), jnp.int32(1)))

    step = make_train_step(gradients, optimizer, RECIPES[recipe])
    batch = {"segment_ids": jnp.ones((1, 1, 1), jnp.int32)}
    text = jax.jit(step).lower(initial_state(optimizer, parameters), {}, batch, jnp.float32(1e-3)).as_text()
    assert set(re.findall(r"dot_general.*precision = \[(\w+), ", text)) == {precision}


def test_decay_is_chosen_by_name_and_layer():
    names = {
        "stacked": tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)),
        "norm": ("model.norm.weight",),
    }
    start = {"stacked": jnp.ones((3, 2, 2)), "norm": jnp.ones((2,))}
    zeros = jax.tree.map(jnp.zeros_like, start)
    optim = OptimOptions(learning_rate=0.1, weight_decay=0.5, no_decay=r"norm|layers\.1\.")
    state, _ = step_on(lambda _: zeros, optim, start, names, steps=1)
    np.testing.assert_allclose(state.trained["norm"], 1.0)
    np.testing.assert_allclose(state.trained["stacked"][:, 0, 0], [0.95, 1.0, 0.95], rtol=1e-6)


def test_moments_of_bfloat16_parameters_decay(one_device):
    """In bfloat16 a second moment times 0.999 would never change."""
    names = {"w": ("w",)}
    start = {"w": jnp.ones(4, jnp.bfloat16)}
    once = lambda step: {"w": jnp.where(step == 0, 1.0, 0.0) * jnp.ones(4)}  # noqa: E731
    state, _ = step_on(once, OptimOptions(learning_rate=1e-3), start, names, steps=200)
    moments = state.optimizer.rules["w"]
    assert state.trained["w"].dtype == jnp.bfloat16 and moments["nu"].dtype == jnp.float32
    np.testing.assert_allclose(moments["nu"], 0.001 * 0.999**199, rtol=1e-4)


def test_the_average_follows_the_weights():
    start, names = {"w": jnp.arange(4.0)}, {"w": ("w",)}
    optim = OptimOptions("sgd", learning_rate=0.1, beta1=0.0, ema_decay=0.9)
    state, _ = step_on(lambda _: {"w": jnp.ones(4)}, optim, start, names, steps=3, averaged=True)
    weights = [np.arange(4.0) - 0.1 * step for step in range(4)]
    expected = 0.9**3 * weights[0] + 0.1 * sum(0.9 ** (3 - step) * weights[step] for step in (1, 2, 3))
    np.testing.assert_allclose(state.trained["w"], weights[3], rtol=1e-6)
    np.testing.assert_allclose(state.result["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    start = {"w": jnp.arange(4.0)}
    names = {"w": ("w",)}
    before, _ = step_on(lambda _: {"w": jnp.ones(4)}, OptimOptions(), start, names, steps=2)
    after, metrics = step_on(
        lambda step: {"w": jnp.where(step < 2, 1.0, bad) * jnp.ones(4)}, OptimOptions(), start, names, steps=3
    )
    assert int(after.step) == 3 and not np.isfinite(metrics[-1]["grad_norm"])
    before, after = (State(0, state.trained, state.optimizer) for state in (before, after))
    jax.tree.map(np.testing.assert_array_equal, before, after)
