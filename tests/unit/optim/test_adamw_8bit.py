"""AdamW with 8-bit moments: rounding, update rule (against float64), memory, and training compared with AdamW."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.parameters import Parameter
from jaxtune.models.places import Place
from jaxtune.models.structure.layer_spec import Treatment
from jaxtune.optim import rules
from jaxtune.optim.adamw_8bit import adamw_8bit, block_of, float32_moments, undivided_moments
from jaxtune.optim.rules import Hyperparameters, Rule
from jaxtune.parallel.layout import RULES, Layout, Rules
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP, TABLES, UNSIGNED_DYNAMIC_MAP, decode, encode

BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8
RULE = adamw_8bit(BETA1, BETA2, EPSILON)
MAPS = {"mu": DYNAMIC_MAP, "nu": UNSIGNED_DYNAMIC_MAP}


def bounds(table: np.ndarray) -> np.ndarray:
    return (table[:-1] + table[1:]) / np.float32(2)


@pytest.mark.parametrize(("signed", "table"), [(True, DYNAMIC_MAP), (False, UNSIGNED_DYNAMIC_MAP)])
def test_codes_are_the_nearest_of_the_map(signed, table):
    """Checked at every bound, one float32 above and below it, and at a million values of all sizes.

    Also at each change of a float32's high 17 bits: only there does `encode` use another line to find the bound.
    """
    rng = np.random.default_rng(0)
    sizes = 10.0 ** -rng.uniform(0, 9, 500_000)
    special = [0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0]
    middle = bounds(table)
    values = [table, middle, np.nextafter(middle, np.float32(2)), np.nextafter(middle, np.float32(-2))]
    high = np.arange(26000, 32513, dtype=np.int32) << 15
    ends = np.concatenate([high, high - 1]).view(np.float32)
    values = np.concatenate(
        [*values, ends, -ends, rng.uniform(-1, 1, 500_000), sizes * rng.uniform(-1, 1, 500_000), special]
    )
    values = values.astype(np.float32) if signed else np.abs(values).astype(np.float32)
    codes = np.asarray(jax.jit(lambda values: encode(values, TABLES[signed]))(values))
    expected = np.searchsorted(middle, values)
    np.testing.assert_array_equal(codes, expected if signed else np.maximum(expected, values > 0))
    np.testing.assert_array_equal(decode(codes, TABLES[signed]), table[codes])


def weights(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Draw normal weights, with rows of very different size."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(2 * rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


def spread(absmax: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the scale of each element."""
    rows, columns = block_of(shape)
    absmax = absmax.reshape(-1, absmax.shape[-1])
    return absmax.repeat(rows, 0).repeat(columns, 1).reshape(shape)


def in_float64(gradient, state, parameter, at: Hyperparameters):
    """Return (parameter, unrounded moments) by Loshchilov & Hutter's algorithm 2, from moments in 8 bits."""
    mu, nu = (
        MAPS[name][moment.codes] * np.float64(spread(moment.absmax, parameter.shape)) for name, moment in state.items()
    )
    mu, nu = BETA1 * mu + (1 - BETA1) * gradient, BETA2 * nu + (1 - BETA2) * np.square(gradient, dtype=np.float64)
    mean, square = mu / (1 - BETA1 ** (at.count + 1)), nu / (1 - BETA2 ** (at.count + 1))
    direction = mean / (np.sqrt(square) + EPSILON)
    return parameter - at.rate * at.multiplier * (direction + at.decay * parameter), {"mu": mu, "nu": nu}


def block_absmax(moment: np.ndarray) -> np.ndarray:
    rows, columns = block_of(moment.shape)
    o, i = moment.reshape(-1, moment.shape[-1]).shape
    return np.abs(moment).reshape(o // rows, rows, i // columns, columns).max((1, 3))


@pytest.mark.parametrize("shape", [(32, 512), (64, 192), (8192,)], ids=str)
def test_an_update_is_adamw_of_moments_in_8_bits(one_device, shape):
    """20 updates, each against float64 from the same state: parameter, scales, and codes except at ties."""
    parameter, update = jnp.asarray(weights(shape)), jax.jit(RULE.update)
    state, differ = jax.jit(RULE.init)(parameter), 0
    for count in range(20):
        gradient, at = weights(shape, count + 1), Hyperparameters(count, 1e-2, 0.5, 0.1)
        before = jax.tree.map(np.asarray, (state, parameter))
        parameter, state = update(jnp.asarray(gradient), state, parameter, at)
        expected, moments = in_float64(gradient, *before, at)
        np.testing.assert_allclose(
            parameter - before[1], expected - before[1], rtol=2e-5, atol=2e-7 * np.abs(expected).max()
        )
        for name, moment in moments.items():
            absmax = block_absmax(moment)
            np.testing.assert_allclose(state[name].absmax, absmax.reshape(state[name].absmax.shape), rtol=1e-6)
            codes = np.searchsorted(bounds(MAPS[name]), np.float32(moment / spread(absmax, shape)))
            codes = np.maximum(codes, (moment > 0) & (name == "nu"))
            distance = np.abs(codes - np.asarray(state[name].codes, int))
            assert distance.max() <= 1
            differ += distance.sum()
    print(shape, "codes that differ:", differ, "of", 40 * math.prod(shape))
    assert differ <= 1e-4 * 40 * math.prod(shape)


def test_both_moments_take_2_03_bytes_a_parameter(one_device):
    state = jax.eval_shape(RULE.init, jax.ShapeDtypeStruct((128, 4096), jnp.float32))
    taken = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert taken / (128 * 4096) == 2 + 2 * 4 / 256


@pytest.mark.parametrize(
    ("model", "hidden", "intermediate", "queries", "keys", "layers", "vocabulary", "taken"),
    [
        ("Llama 3 8B", 4096, 14336, 4096, 1024, 32, 128256, "2.03"),
        ("Qwen3-0.6B", 1024, 3072, 2048, 1024, 28, 151936, "2.06"),
        ("Qwen2.5-0.5B", 896, 4864, 896, 128, 24, 151936, "2.07"),
        ("SmolLM2-135M", 576, 1536, 576, 192, 30, 49152, "2.10"),
    ],
)
def test_the_readme_has_the_bytes_of_real_models(
    model, hidden, intermediate, queries, keys, layers, vocabulary, taken, one_device
):
    of_a_layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    of_a_layer += [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate), (hidden,), (hidden,)]
    shapes = [(vocabulary, hidden), (hidden,), *(of_a_layer * layers)]
    states = {shape: jax.eval_shape(RULE.init, jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in set(shapes)}
    size = {
        shape: sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        for shape, state in states.items()
    }
    assert f"{sum(size[shape] for shape in shapes) / sum(map(math.prod, shapes)):.2f}" == taken
    page = (Path(__file__).parents[3] / "docs" / "reference" / "number_formats.md").read_text("utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `adamw_8bit` |")]
    assert f"{taken} of {model}" in row


def test_small_and_odd_parameters_are_adamw_itself(one_device):
    """Below 4096 elements, rows that no block divides, and vectors of that kind."""
    assert block_of((63, 64)) is block_of((100, 4099)) is block_of((4099,)) is block_of((64, 16 * 257)) is None
    adamw = rules.adamw(BETA1, BETA2, EPSILON)
    parameter, gradient, at = (
        jnp.asarray(weights((63, 64))),
        jnp.asarray(weights((63, 64), 1)),
        Hyperparameters(3, 1e-2, 1.0, 0.1),
    )
    for expected, actual in zip(
        jax.tree.leaves(adamw.update(gradient, adamw.init(parameter), parameter, at)),
        jax.tree.leaves(RULE.update(gradient, RULE.init(parameter), parameter, at)),
        strict=True,
    ):
        np.testing.assert_array_equal(expected, actual)


@pytest.mark.parametrize("width", [64, 100, 256, 896, 1152, 1536, 2048, 2560, 3584, 5120, 11008, 18944, 29568])
def test_a_block_lies_in_a_row(width):
    """On real models 8 devices can share the rows."""
    rows, columns = block_of((152, width))
    assert rows == 1 and 16 <= columns <= 256 and width % columns == 0
    assert width < 128 or width // columns % 8 == 0


def test_short_rows_are_together_in_a_block():
    """Adapters have rows as long as their rank."""
    assert [block_of((4096, rank)) for rank in (4, 8, 15, 16)] == [(64, 4), (32, 8), (16, 15), (1, 16)]
    assert block_of((992, 8)) == (31, 8), "32 blocks, 4 on each of 8 devices"


@given(st.integers(1, 6000), st.integers(1, 6000))
def test_blocks_divide_the_matrix(height, width):
    block = block_of((height, width))
    if block is not None:
        assert height % block[0] == 0 and width % block[1] == 0 and math.prod(block) <= 256


def test_the_first_moments_are_written_down_not_computed(one_device):
    """XLA would fold a computation on constants: for a model's moments that took seconds and filled the log."""
    program = jax.jit(RULE.init).lower(jnp.zeros((64, 2048))).as_text()
    assert "broadcast" in program and "reduce" not in program and "divide" not in program


def test_zero_and_tiny_gradients_leave_the_parameter(one_device):
    """A block of zeros has absmax 0 and the codes of 0; squares that underflow cause no division by zero."""
    parameter = jnp.asarray(weights((32, 256)))
    state = jax.jit(RULE.init)(parameter)
    assert {name: np.unique(moment.codes).tolist() for name, moment in state.items()} == {"mu": [127], "nu": [0]}
    for size in (0.0, 1e-30, 0.0):
        after, new = jax.jit(RULE.update)(
            jnp.full_like(parameter, size), state, parameter, Hyperparameters(0, 1e-2, 1.0, 0.0)
        )
        np.testing.assert_allclose(after, parameter, rtol=1e-6)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
        if not size:
            jax.tree.map(np.testing.assert_array_equal, new, state)


def test_rare_gradients_move_a_parameter_no_further_than_in_adamw(one_device):
    """Rows of an embedding have gradients in few steps, and exact zeros in all others."""
    rng = np.random.default_rng(0)
    parameter = jnp.zeros((256, 64))
    sizes = 10.0 ** rng.uniform(-4, 0, (256, 64))

    def largest_step(rule: Rule) -> float:
        draws, at, largest = np.random.default_rng(1), parameter, 0.0
        state, update = jax.jit(rule.init)(parameter), jax.jit(rule.update)
        for count in range(60):
            present = draws.random((256, 1)) < 0.1
            gradient = jnp.asarray(present * sizes * draws.normal(size=sizes.shape), jnp.float32)
            before = at
            at, state = update(gradient, state, at, Hyperparameters(count, 1.0, 1.0, 0.0))
            largest = max(largest, float(jnp.abs(at - before).max()))
        return largest

    assert largest_step(RULE) <= 1.5 * largest_step(rules.adamw(BETA1, BETA2, EPSILON))


def declare(shape, axes, layers) -> Parameter:
    """Return a trained matrix, or a stack of `layers`."""
    places, lead = tuple(Place(f"{layer}.up_proj.weight") for layer in layers or (0,)), (len(layers),) if layers else ()
    init = jax.nn.initializers.zeros
    return Parameter(shape, axes, init, "linear", "mlp.up.weight", layers, lead, places, Treatment())


def test_a_mesh_that_splits_a_block_is_refused():
    """300 columns are 2 blocks: 8 devices cannot share them."""
    mesh = make_mesh(MeshOptions(fsdp=8))
    wide = declare((2, 64, 300), ("layers", "mlp", "embed"), (0, 1))
    small = declare((2, 3, 300), ("layers", None, None), (0, 1))
    assert undivided_moments({"small": small}, mesh) == []
    assert undivided_moments({"even": declare((64, 4096), ("mlp", "embed"), ())}, mesh) == []
    (complaint,) = undivided_moments({"wide": wide, "small": small}, mesh)
    assert complaint == (
        "mesh.fsdp=8 does not divide embed=300 in blocks of 150, which optim.name='adamw_8bit' has; these would: "
        "[1, 2] (mesh.data takes the rest)"
    )
    whole = Layout(embed=())
    with RULES(Rules(parameters=whole)):
        assert undivided_moments({"wide": wide}, mesh) == [complaint]
    with RULES(Rules(optimizer=whole)):
        assert undivided_moments({"wide": wide}, mesh) == []


def test_moments_that_stay_float32_are_named():
    shapes = {"odd": ((2, 64, 257), (0, 1)), "small": ((63, 64), ()), "even": ((64, 64), ())}
    parameters = {name: declare(shape, (None,) * len(shape), layers) for name, (shape, layers) in shapes.items()}
    assert float32_moments(parameters) == ["odd [64, 257]"]


def test_it_trains_as_adamw_does(one_device):
    """300 steps of a next-token model of two tokens: the mean loss of each 50 within 1% of AdamW's."""
    vocabulary, width, rows = 32, 128, 128
    chain = np.random.default_rng(0).dirichlet(np.full(vocabulary, 0.1), 2 * vocabulary).cumsum(1)

    def loss_of(parameters, first, second, target):
        hidden = jnp.concatenate([parameters["embed"][first], parameters["embed"][second]], 1) @ parameters["up"].T
        logits = jax.nn.gelu(hidden) @ parameters["down"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1).mean()

    def losses(rule: Rule) -> np.ndarray:
        rng = np.random.default_rng(1)
        shapes = {"embed": (vocabulary, width), "up": (2 * width, 2 * width), "down": (vocabulary, 2 * width)}
        parameters = {name: jnp.float32(0.1 * rng.normal(size=shape)) for name, shape in shapes.items()}
        states = jax.jit(lambda: {name: rule.init(parameter) for name, parameter in parameters.items()})()

        @jax.jit
        def step(parameters, states, count, *tokens):
            loss, gradients = jax.value_and_grad(loss_of)(parameters, *tokens)
            at = Hyperparameters(count, jnp.float32(3e-3), 1.0, 0.01)
            after = {name: rule.update(gradients[name], states[name], parameters[name], at) for name in parameters}
            return loss, *({name: pair[part] for name, pair in after.items()} for part in (0, 1))

        values = []
        for count in range(300):
            first, second = rng.integers(0, vocabulary, (2, rows))
            target = (chain[first + second % 2 * vocabulary] > rng.random((rows, 1))).argmax(1)
            loss, parameters, states = step(parameters, states, count, first, second, target)
            values.append(loss.item())
        return np.asarray(values)

    expected, means = (losses(rule(0.9, 0.999, 1e-8)).reshape(6, 50).mean(1) for rule in (rules.adamw, adamw_8bit))
    print("means of 50 losses: AdamW", expected, "in 8 bits", means)
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(means, expected, rtol=0.01)
