"""What options of `precision` change besides the products themselves: delayed scales, what is left out, sums."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_values, spec

from jaxtune.config.schema import Fp8, Nvfp4, Precision
from jaxtune.errors import UserError
from jaxtune.models.mark import selected
from jaxtune.models.parameters import declare
from jaxtune.models.spec import Layer
from jaxtune.precision.recipes import check_device, linears_of, recipe_of
from jaxtune.run.step import accumulated_gradients
from pallas_kernels.gpus import GPUS, Device

SPEC = spec(layers=(Layer(low_precision=frozenset({"mlp.down.weight"})),) * 3)


def delayed(**options):
    """(Linears, name of the one that it is about)."""
    linears = linears_of(Precision("fp8_hybrid", fp8=Fp8(**options)), declare(SPEC)[1])
    assert linears is not None
    (name,) = linears.parameters
    return linears, name


def test_a_delayed_scale_fits_the_largest_of_the_last_amax_history_steps(one_device):
    linears, name = delayed(amax_history=2)
    amax = linears.initial_amax()
    np.testing.assert_array_equal(linears.scales(amax, jnp.int32(0))[name], np.ones((3, 2)))
    seen = []
    for largest in (1.0, 7.0, 3.0, 2.0):
        amax = linears.extended(amax, {name: jnp.full((3, 2), largest)}, jnp.bool(True))
        seen.append(np.asarray(linears.scales(amax, jnp.int32(9))[name]) * [448.0, 57344.0])
    np.testing.assert_allclose(seen, np.broadcast_to(np.reshape([1.0, 7.0, 7.0, 3.0], (4, 1, 1)), (4, 3, 2)), rtol=1e-6)


def test_a_step_that_is_not_finite_leaves_the_history(one_device):
    linears, name = delayed(amax_history=2)
    amax = linears.extended(linears.initial_amax(), {name: jnp.ones((3, 2))}, jnp.bool(True))
    after = linears.extended(amax, {name: jnp.full((3, 2), jnp.inf)}, jnp.bool(False))
    np.testing.assert_array_equal(after[name], amax[name])


def test_first_steps_have_scales_of_their_own(one_device):
    """A scale of 0 asks for the tensor's own."""
    linears, name = delayed(amax_history=2, online_scale_steps=3)
    scales = [float(linears.scales(linears.initial_amax(), jnp.int32(step))[name].max()) for step in range(5)]
    assert scales == [0, 0, 0, 1, 1]


def test_current_scaling_carries_nothing(one_device):
    linears, _ = delayed(scaling="current")
    assert linears.initial_amax() == {}


@pytest.mark.parametrize(
    ("recipe", "section", "name", "value"),
    [
        ("fp8_hybrid", "fp8", "hadamard", True),
        ("nvfp4", "nvfp4", "stochastic_rounding", False),
        ("nvfp4", "nvfp4", "hadamard", False),
        ("nvfp4", "nvfp4", "four_over_six", False),
    ],
)
def test_the_numbers_are_those_asked_for(one_device, recipe, section, name, value):
    """What they mean is tested with the products."""
    sections = {"fp8": Fp8, "nvfp4": Nvfp4}
    precision = Precision(recipe, **{section: sections[section](**{name: value})})
    linears = linears_of(precision, declare(SPEC)[1])
    assert linears is not None and getattr(linears.numbers, name) is value


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, r"^$"),
        ({"exclude": r"layers\.1\.mlp|down_proj"}, r"layers\.1\.mlp|down_proj"),
        ({"skip_first_layers": 1}, r"layers\.0\."),
        ({"skip_last_layers": 2}, r"layers\.[12]\."),
    ],
)
def test_what_is_left_out_of_few_bits(options, left_out):
    every = selected(SPEC, Precision("fp8_hybrid"), "precision")
    assert len(every) == 3 * 7
    expected = {name for name in every if not re.search(left_out, name)}
    assert selected(SPEC, Precision("fp8_hybrid", **options), "precision") == expected


def test_leaving_out_what_is_not_there_is_an_error():
    with pytest.raises(UserError, match="precision.exclude='nothing' matches none"):
        selected(SPEC, Precision("fp8_hybrid", exclude="nothing"), "precision")


def test_gradients_are_summed_in_gradient_dtype(one_device):
    graph, declared = declare(SPEC)
    parameters = random_values(declared)
    batch = {"tokens": jnp.ones((3, 1, 8), jnp.int32), "row": jnp.zeros((3, 1), jnp.int32)}

    def objective(decoder, micro, **_):
        return jnp.sum(decoder.head_weight) / 3, jnp.int32(1)

    def gradient(dtype):
        recipe = recipe_of(Precision("fp32", gradient_dtype=dtype), None)
        compute = accumulated_gradients(graph, objective, recipe, "none", 0)
        return jax.jit(compute)(parameters, {}, batch, jnp.int32(0)).gradients["embed.weight"]

    exact, rounded = gradient("float32"), gradient("bfloat16")
    assert exact.dtype == "float32" and rounded.dtype == "bfloat16"
    np.testing.assert_allclose(exact, 1.0, rtol=1e-6)
    np.testing.assert_allclose(rounded.astype("float32"), 1.0, rtol=2**-7)


def test_a_recipe_says_where_it_cannot_run_or_is_emulated():
    a100, h100, b200 = (Device("gpu", GPUS[name].kind, GPUS[name].capability) for name in ("a100", "h100", "b200"))
    cpu = Device("cpu", "cpu", None)
    with pytest.raises(UserError, match=r"A100.*has no FP8 units.*use precision.recipe='bf16'"):
        check_device("fp8_hybrid", a100)
    assert check_device("fp8_hybrid", h100) is check_device("nvfp4", b200) is check_device("bf16", a100) is None
    for recipe, device in (("fp8_hybrid", cpu), ("nvfp4", cpu), ("nvfp4", h100)):
        assert "is emulated on" in str(check_device(recipe, device))
