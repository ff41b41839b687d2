"""Backends of a mixture of experts give the same numbers, however experts are stored or adapted."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from flax import nnx
from nightly_rows import nightly
from tiny import layer, random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import score
from jaxtune.models.options import ExpertsOptions as Options
from jaxtune.models.structure.layer_spec import ClampedSilu, Experts
from jaxtune.parallel.layout import by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.parallel.random import Noise
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.base import Base
from jaxtune.weights.model import declare_model
from pallas_kernels.grouped_matmul import arrange

PLAIN = Experts(128, count=6, active=2, normalized=True)
CLAMPED = dataclasses.replace(PLAIN, activation=ClampedSilu(1.7, 0.5), router_bias=True, bias=True)
ADAPTERS = LoraOptions(enabled=True, rank=4, dropout=0.3)
ONE, EIGHT, APART = MeshOptions(), MeshOptions(fsdp=4, tensor=2), MeshOptions(data=2, fsdp=1, expert=2, tensor=2)


def base_of(experts: Experts) -> Base:
    family = "gpt_oss" if experts.bias else "qwen3_moe"
    mixer = dataclasses.replace(layer().mixer, heads=4, kv_heads=2, qk_norm=None if experts.bias else "head")
    return Base(spec((dataclasses.replace(layer(), mixer=mixer, feed_forward=experts),), family=family, hidden=256))


def numbers(
    experts: Experts,
    backend: str,
    layout: MeshOptions = ONE,
    lora: LoraOptions = LoraOptions(),
    quant: QuantOptions = QuantOptions(),
    factor: float | None = None,
):
    """Return the output and gradients (input, trained weights) of a layer's experts. factor: capacity factor."""
    quant = dataclasses.replace(quant, exclude="self_attn" if quant.format else None)
    mesh = make_mesh(layout, jax.devices()[: 1 if layout == ONE else 8])
    config = Config(
        ModelOptions(dtype="float32"),
        DataOptions(seq_len=32),
        lora=lora,
        quant=quant,
        precision=PrecisionOptions("fp32"),
    )
    model = declare_model(base_of(experts), config, mesh)
    values = {name: store(model.parameters[name], value) for name, value in random_values(model.parameters).items()}
    module = bind(model.graph, values).stacks[0].blocks[0].mlp
    graph, adapters, rest = nnx.split(module, nnx.LoRAParam, ...)
    adapters, rest = jax.tree.map(lambda stack: stack[0], (adapters, rest))
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, 8, 32, 256)).astype(np.float32)
    x[: len(x) // 2] = x[0, 1]  # same tokens, same experts: devices are loaded unequally
    x, dy = (put(array, by_token(None)) for array in (x, dy))
    valid, rows = put(np.ones((8, 32), bool), by_token()), put(np.arange(8, dtype=np.int32), jax.P(by_token()[0]))

    @jax.jit
    def both(adapters, rest, x, dy, valid, rows):
        call = ForwardOptions(
            jnp.dtype("float32"), noise=Noise(jax.random.key(0), rows), experts=backend, capacity_factor=factor
        )

        def output(trained, x):
            parts = (trained, rest) if lora.enabled else (adapters, trained)
            return nnx.merge(graph, *parts)(x, call, valid, x)[0]

        y, back = jax.vjp(output, adapters if lora.enabled else rest, x)
        return y, *back(dy)

    return jax.device_get(jax.tree.leaves(both(adapters, rest, x, dy, valid, rows)))


def put(value: np.ndarray, layout: jax.P) -> jax.Array:
    return jax.device_put(value, jax.NamedSharding(jax.sharding.get_mesh(), layout))


def store(parameter, value):
    """Return a parameter's value as it is stored, quantized or not."""
    if parameter.storage is None:
        return value
    matrices = [
        parameter.storage.make(matrix, parameter.matrix_axes) for matrix in value.reshape(-1, *parameter.matrix)
    ]
    whole = jax.tree.map(lambda *parts: jnp.stack(parts).reshape(*parameter.lead, *parts[0].shape), *matrices)
    return jax.tree.map(lambda part, of: jax.device_put(part, of.sharding), whole, parameter.abstract())


# Of sums of 256 products (the hidden size) in another order. An AMD EPYC without AVX-512 differed by 1.2e-6.
ROUNDING = np.finfo(np.float32).eps * np.sqrt(256)


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        assert np.abs(one - other).max() <= ROUNDING * np.abs(other).max()


@pytest.mark.parametrize("experts", [PLAIN, CLAMPED], ids=["plain", "clamped, with biases"])
def test_all_parameters_get_the_gradients_of_every_token_through_every_expert(experts):
    expected = numbers(experts, "dense")
    assert all(np.abs(gradient).max() > 0 for gradient in expected)
    assert_equal(numbers(experts, "loop"), expected)
    assert_equal(numbers(experts, "loop", EIGHT), expected)


@pytest.mark.parametrize(
    "quant",
    [
        QuantOptions(),
        QuantOptions("nf4"),
        *map(nightly, (QuantOptions("nvfp4"), QuantOptions("mxfp4"), QuantOptions("fp8", 64))),
    ],
    ids=lambda q: q.format,
)
def test_adapters_drop_the_same_elements_on_any_mesh(quant):
    expected = numbers(PLAIN, "dense", lora=ADAPTERS, quant=quant)
    assert_equal(numbers(PLAIN, "loop", EIGHT, lora=ADAPTERS, quant=quant), expected)


@pytest.mark.parametrize(
    ("lora", "quant"),
    [(LoraOptions(), QuantOptions()), nightly(ADAPTERS, QuantOptions("mxfp4"))],
    ids=["full", "adapters"],
)
def test_no_token_is_dropped_whatever_the_capacity(lora, quant):
    """Experts have biases; a factor below even routing takes rounds, and devices with other rows need more rounds."""
    expected = numbers(CLAMPED, "dense", lora=lora, quant=quant)
    for factor in (2.0, 0.3):
        assert_equal(numbers(CLAMPED, "loop", APART, lora, quant, factor), expected)


def test_what_cannot_run_is_refused(one_device):
    with pytest.raises(UserError, match=r"experts.backend='kernel': .* cpu .*: it needs an NVIDIA GPU"):
        numbers(PLAIN, "kernel")
    for backend, named in (
        (Options("loop"), "backend='loop'"),
        (Options(router_loss=0.0), "router_loss=0.0"),
        (Options(router_z_loss=0.1), "router_z_loss=0.1"),
    ):
        with pytest.raises(UserError, match=f"experts.{named}: the model, a qwen3, has no experts"):
            declare_model(Base(spec(1)), Config(experts=backend), one_device)
    with pytest.raises(UserError, match="memory.remat='experts': the model, a qwen3, has no experts"):
        declare_model(Base(spec(1)), Config(memory=MemoryOptions("experts")), one_device)


def test_experts_in_low_precision_are_not_divided():
    mesh = make_mesh(MeshOptions(fsdp=4, expert=2), jax.devices())

    def declared(exclude: str | None):
        precision = PrecisionOptions("fp8_hybrid", exclude=exclude)
        config = Config(ModelOptions(dtype="float32"), DataOptions(seq_len=32), precision=precision)
        return declare_model(base_of(PLAIN), config, mesh)

    with pytest.raises(UserError, match="mesh.expert=2: with precision.recipe='fp8_hybrid' each device needs all"):
        declared(None)
    assert declared("experts").linears is not None


@pytest.mark.nightly
def test_products_of_experts_alone_can_be_computed_again(one_device):
    """The backward pass saves less, by exactly these products, and the gradients are the same."""
    rows, length = 2, 16
    config = Config(ModelOptions(dtype="float32"), DataOptions(seq_len=length), precision=PrecisionOptions("fp32"))
    model = declare_model(base_of(PLAIN), config, one_device)
    values, batch = random_values(model.parameters), make_batch(tokens(rows, length), one_device)

    def loss(values, remat):
        call = ForwardOptions(jnp.dtype("float32"), remat=remat, experts="loop")
        return score(bind(model.graph, values), batch, call).loss.sum()

    def saved(remat):
        residuals = jax.eval_shape(lambda values: jax.vjp(partial(loss, remat=remat), values)[1], values)
        return sum(array.size for array in jax.tree.leaves(residuals))

    groups = arrange(jnp.zeros(rows * length * PLAIN.active, jnp.int32), PLAIN.count, "xla").item_of.size
    gate_up_down = groups * (2 * PLAIN.size + base_of(PLAIN).spec.hidden)
    assert saved("none") - saved("experts") == gate_up_down
    assert saved("experts") > saved("block")
    assert_equal(
        *(jax.tree.leaves(jax.jit(jax.grad(partial(loss, remat=remat)))(values)) for remat in ("none", "experts"))
    )
