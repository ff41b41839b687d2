"""Effects of `precision` options outside the products: delayed scales, excluded layers, sums."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from flax import nnx
from jax.extend.core import jaxprs_in_params
from tiny import layer, random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions
from jaxtune.errors import UserError
from jaxtune.lora.lora import LoRA
from jaxtune.models.decoder import Decoder
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear
from jaxtune.models.parameters import declare
from jaxtune.models.stack import Block
from jaxtune.models.structure.layer_spec import Treatment
from jaxtune.models.treatment import multiply, select_linears, treat_linears
from jaxtune.parallel.layout import by_residual, by_token
from jaxtune.precision.options import Fp8Options, Nvfp4Options, PrecisionOptions
from jaxtune.precision.recipes import check_device, linears_of, matmul_format, recipe_of
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base
from pallas_kernels.gpus import GPUS, Device

DOWN = [f"model.layers.{number}.mlp.down_proj" for number in range(3)]
SPEC = treat_linears(spec(layers=3), DOWN, multiplied=matmul_format(PrecisionOptions("fp8_hybrid")))


def delayed_scales(**options):
    """Return (Linears, name of its only parameter)."""
    weights = {name: p for name, p in declare(SPEC)[1].items() if p.treatment.multiplied is not None}
    linears = linears_of(PrecisionOptions("fp8_hybrid", fp8=Fp8Options(**options)), weights)
    assert linears is not None
    (name,) = linears.parameters
    return linears, name


def test_a_delayed_scale_fits_the_largest_of_the_last_amax_history_steps(one_device):
    linears, name = delayed_scales(amax_history=2)
    amax = linears.initial_amax()
    np.testing.assert_array_equal(linears.scales(amax, jnp.int32(0))[name], np.ones((3, 2)))
    seen = []
    for largest in (1.0, 7.0, 3.0, 2.0):
        amax = linears.extend_history(amax, {name: jnp.full((3, 2), largest)}, jnp.bool(True))
        seen.append(np.asarray(linears.scales(amax, jnp.int32(9))[name]) * [448.0, 57344.0])
    np.testing.assert_allclose(seen, np.broadcast_to(np.reshape([1.0, 7.0, 7.0, 3.0], (4, 1, 1)), (4, 3, 2)), rtol=1e-6)


def test_a_step_that_is_not_finite_leaves_the_history(one_device):
    linears, name = delayed_scales(amax_history=2)
    amax = linears.extend_history(linears.initial_amax(), {name: jnp.ones((3, 2))}, jnp.bool(True))
    after = linears.extend_history(amax, {name: jnp.full((3, 2), jnp.inf)}, jnp.bool(False))
    np.testing.assert_array_equal(after[name], amax[name])


def test_first_steps_have_scales_of_their_own(one_device):
    """A scale of 0 stands for the tensor's own."""
    linears, name = delayed_scales(amax_history=2, online_scale_steps=3)
    scales = [float(linears.scales(linears.initial_amax(), jnp.int32(step))[name].max()) for step in range(5)]
    assert scales == [0, 0, 0, 1, 1]


def test_current_scaling_carries_nothing(one_device):
    linears, _ = delayed_scales(scaling="current")
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
    """Their meaning is tested with the products."""
    sections = {"fp8": Fp8Options, "nvfp4": Nvfp4Options}
    precision = PrecisionOptions(recipe, **{section: sections[section](**{name: value})})
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
    every = select_linears(SPEC, PrecisionOptions("fp8_hybrid"), "precision")
    assert len(every) == 3 * 7
    expected = {name for name in every if not re.search(left_out, name)}
    assert select_linears(SPEC, PrecisionOptions("fp8_hybrid", **options), "precision") == expected


def test_leaving_out_what_is_not_there_is_an_error():
    with pytest.raises(UserError, match="precision.exclude='nothing' matches none"):
        select_linears(SPEC, PrecisionOptions("fp8_hybrid", exclude="nothing"), "precision")


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{"exclude": r"layers\.1\..*down_proj"}, {"skip_last_layers": 1}])
def test_what_is_left_out_of_bf16_and_fp16_is_marked_float32(recipe, options):
    whole = spec(layers=3)
    assert multiply(whole, PrecisionOptions(recipe)) == whole
    layers = multiply(whole, PrecisionOptions(recipe, **options)).layers
    in_float32 = [{name for name, treatment in one.treatments if treatment.float32} for one in layers]
    assert in_float32[0] == set() and len(in_float32[1]) + len(in_float32[2]) == (1 if "exclude" in options else 7)
    assert "mlp.down.weight" in in_float32[1 if "exclude" in options else 2]
    with pytest.raises(UserError, match="leaves out every linear layer.*another precision.recipe"):
        multiply(whole, PrecisionOptions(recipe, exclude="layers"))


def test_factors_of_a_model_are_not_rounded_to_bfloat16(one_device):
    """As in transformers: Granite's factor on what a layer adds, 0.22, would be 0.1% smaller; and logits of Cohere."""
    y = jax.reshard(jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 64)), jnp.bfloat16), by_token(None))
    call, factor = ForwardOptions(y.dtype), 0.22
    expected = (y.astype(jnp.float32) * factor).astype(y.dtype)
    block: Any = SimpleNamespace(layer=dataclasses.replace(layer(), residual_scale=factor))
    nothing = jax.reshard(jnp.zeros_like(y), by_residual())
    np.testing.assert_array_equal(Block._add(block, nothing, y, None, call, "mixer"), expected)
    decoder: Any = SimpleNamespace(norm=lambda x: x, spec=dataclasses.replace(SPEC, logit_scale=factor))
    np.testing.assert_array_equal(Decoder.apply_final_norm(decoder, y), expected)


def test_the_scale_of_an_adapter_is_not_rounded_to_bfloat16(one_device):
    """A scale of 1/3 would be 0.2% larger in training than in the exported adapter."""
    treated = dataclasses.replace(layer(), treatments=(("mlp.down.weight", Treatment(adapter=LoRA(3, 1.0))),))
    graph, _ = nnx.split(Linear(SPEC, treated, "mlp.down", (3, 64), ("embed", "mlp")))
    values = {("weight",): jnp.zeros((3, 64)), ("lora_a",): jnp.eye(3, 64), ("lora_b",): jnp.eye(3)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 64)), jnp.bfloat16)
    y = nnx.merge(graph, nnx.from_flat_state(values))(jax.reshard(x, by_token()), ForwardOptions(x.dtype))
    np.testing.assert_array_equal(y, (x[..., :3].astype(jnp.float32) / 3).astype(jnp.bfloat16))


@pytest.mark.parametrize("stored", ["float32", "nf4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_linear_layer_in_float32_rounds_only_its_result(one_device, dtype, stored):
    """Bias and adapter included, in both passes; other layers round each operand and each product."""
    rng = np.random.default_rng(0)
    shapes = {"weight": (16, 64), "bias": (16,), "lora_a": (4, 64), "lora_b": (16, 4)}
    values = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    if stored == "nf4":
        format = format_of(QuantOptions(format="nf4"), "mlp.down.weight")
        values["weight"] = format.make(values["weight"], ("embed", "mlp"))
    x, dy = (jnp.asarray(rng.normal(size=(2, 8, size)), dtype) for size in (64, 16))

    def results(float32):
        """Return the result, the gradient of x, and gradients of the float32 values."""
        treatment = Treatment(float32=float32, adapter=LoRA(rank=4, alpha=2.0))
        treated = dataclasses.replace(layer(), treatments=(("mlp.down.weight", treatment),))
        graph, _ = nnx.split(Linear(SPEC, treated, "mlp.down", (16, 64), ("embed", "mlp"), bias=True))
        frozen = {name: value for name, value in values.items() if not isinstance(value, jax.Array)}
        trained = {name: value for name, value in values.items() if name not in frozen}

        def run(x, trained):
            leaves = {(name,): value for name, value in {**frozen, **trained}.items()}
            return nnx.merge(graph, nnx.from_flat_state(leaves))(x, ForwardOptions(x.dtype))

        y, pull_back = jax.vjp(run, jax.reshard(x, by_token()), trained)
        return y, *pull_back(jax.reshard(dy, by_token()))

    weight, a, b = (
        np.asarray(v.dequantize() if isinstance(v, QuantizedArray) else v, np.float64)
        for v in (values[name] for name in ("weight", "lora_a", "lora_b"))
    )
    x64, dy64 = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    y64 = x64 @ weight.T + np.asarray(values["bias"]) + 0.5 * x64 @ a.T @ b.T
    dx64 = dy64 @ weight + 0.5 * dy64 @ b @ a
    da64 = 0.5 * np.einsum("bso,or,bsi->ri", dy64, b, x64)

    def error(actual, exact):
        assert actual.shape == exact.shape
        return np.abs(np.asarray(actual, np.float64) - exact).max() / np.abs(exact).max()

    half = jnp.finfo(dtype).eps / 2
    y, dx, gradients = jax.jit(results, static_argnums=0)(True)
    assert y.dtype == dx.dtype == dtype
    assert error(y, y64) <= 1.01 * half and error(dx, dx64) <= 1.01 * half and error(gradients["lora_a"], da64) <= 1e-6
    assert error(jax.jit(results, static_argnums=0)(False)[2]["lora_a"], da64) > half / 4
    program = jax.make_jaxpr(results, static_argnums=0)(True)
    assert {dot.params["precision"] for dot in dots(program)} == {(jax.lax.Precision.HIGHEST,) * 2}  # on a GPU not TF32


def dots(jaxpr):
    """Yield every matrix product of a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp32"])
def test_backward_products_are_in_the_recipe_s_dtype(one_device, recipe):
    """Low-precision recipes are tested with their products."""
    config = Config(data=DataOptions(seq_len=8), memory=MemoryOptions("none"), precision=PrecisionOptions(recipe))
    program = assemble(Base(spec((layer(intermediate=48),) * 3)), config, one_device)
    parameters = random_values(program.model.trained)
    batch = jax.tree.map(lambda array: array[None], make_batch(tokens(2, 8), one_device))
    traced = jax.make_jaxpr(program.gradients)(parameters, {}, batch, jnp.int32(0))
    products = [dot for dot in dots(traced) if any(48 in operand.aval.shape for operand in dot.invars)]
    assert len(products) >= 9  # 3 linear layers, forward and two backward
    dtypes = {operand.aval.dtype for dot in products for operand in (*dot.invars, *dot.outvars)}
    assert dtypes == {recipe_of(PrecisionOptions(recipe), None).dtype}


def test_gradients_are_summed_in_gradient_dtype(one_device):
    micro = make_batch(tokens(2, 8), one_device)
    batch = jax.tree.map(lambda array: jnp.stack([array] * 3), micro)

    def gradients(dtype, *counted):
        """Return a gradient for each of `counted`, the weights of equal micro-batches, by one program."""
        precision = PrecisionOptions("fp32", gradient_dtype=dtype)
        program = assemble(Base(spec(layers=1)), Config(data=DataOptions(seq_len=8), precision=precision), one_device)
        compiled, values = jax.jit(program.gradients), random_values(program.model.trained)
        weights = [batch["loss_weight"] * jnp.reshape(jnp.float32(which), (3, 1, 1)) for which in counted]
        summed = [compiled(values, {}, {**batch, "loss_weight": one}, jnp.int32(0)) for one in weights]
        return [each.gradients["embed.weight"] for each in summed]

    one, exact = gradients("float32", (1, 0, 0), (1, 1, 1))
    (rounded,) = gradients("bfloat16", (1, 1, 1))
    assert exact.dtype == "float32" and rounded.dtype == "bfloat16"
    assert np.all(np.any(exact, axis=1)[: SPEC.vocabulary])
    np.testing.assert_allclose(exact, 3 * one, rtol=1e-6)
    np.testing.assert_allclose(rounded.astype("float32"), exact, rtol=2**-7)


def test_a_recipe_says_where_it_cannot_run_or_is_emulated():
    a100, h100, b200 = (Device("gpu", GPUS[name].kind, GPUS[name].capability) for name in ("a100", "h100", "b200"))
    cpu = Device("cpu", "cpu", None)
    with pytest.raises(UserError, match=r"A100.*has no FP8 units.*use precision.recipe='bf16'"):
        check_device("fp8_hybrid", a100)
    assert check_device("fp8_hybrid", h100) is check_device("nvfp4", b200) is check_device("bf16", a100) is None
    for recipe, device in (("fp8_hybrid", cpu), ("nvfp4", cpu), ("nvfp4", h100)):
        assert "is emulated on" in str(check_device(recipe, device))
