"""Adapters initialised from the weights train as expected on any mesh and on a quantized base."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from tiny import random_values, spec

from jaxtune.config import checks
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.adapter_start import begin_adapters
from jaxtune.weights.base import Base


def trained(mesh, quant=None, recipe="fp32", steps=3, **lora):
    """Return (losses, initial values of the adapters' parameters, final state)."""
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=32),
        lora=LoraOptions(enabled=True, alpha=4.0, **{"rank": 2} | lora),
        quant=QuantOptions(quant, block_size="channel" if quant else None),
        precision=PrecisionOptions(recipe, exclude="[kv]_proj" if recipe == "fp8_hybrid" else None),
        optim=OptimOptions(weight_decay=0.0),
    )
    program = assemble(Base(spec(2)), config, mesh)
    model = program.model
    values: dict = random_values(model.whole) | random_values(model.trained | model.starts)
    for name, parameter in model.quantized.items():
        values[name] = parameter.storage.make(values[name], parameter.axes)
    drawn, frozen = ({name: values[name] for name in names} for names in (program.state.trained, program.frozen))
    drawn |= {name: jnp.zeros_like(value) for name, value in drawn.items() if name.endswith("lora_b")}
    begun, frozen = begin_adapters(model, config, drawn, frozen)
    first = {name: np.asarray({**begun, **frozen}[name]) for name in model.trained | model.starts}
    state = jax.jit(program.start)(begun)
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(4, 32), mesh))
    step, losses = jax.jit(program.step), []
    for _ in range(steps):
        state, metrics = step(state, frozen, batch, jnp.float32(1e-2))
        losses.append(float(metrics["loss"]))
    return losses, first, state


@pytest.mark.parametrize(
    ("options", "quant"),
    [
        pytest.param({"use_dora": True, "dropout": 0.1}, "int8", id="dora on int8", marks=pytest.mark.nightly),
        pytest.param({"init": "pissa"}, None, id="pissa", marks=pytest.mark.nightly),
        pytest.param(
            {"init": "olora", "use_dora": True, "rank_pattern": ("mlp=4",)},
            "int8",
            id="olora, dora, ranks",
            marks=pytest.mark.nightly,
        ),
        pytest.param({"freeze_a": True}, None, id="A frozen"),
    ],
)
def test_a_mesh_trains_as_one_device_and_the_model_begins_as_it_is(options, quant, one_device):
    losses, first, state = trained(one_device, quant, **options)
    if not options.get("dropout"):
        assert losses[0] == pytest.approx(trained(one_device, quant, steps=1)[0][0], rel=1e-6)
    assert losses[-1] < losses[0]
    moved = {name.rpartition(".")[2] for name, value in state.trained.items() if np.abs(value - first[name]).max() > 0}
    parts = {"lora_a", "lora_b", "magnitude"} if options.get("use_dora") else {"lora_a", "lora_b"}
    assert moved == parts - ({"lora_a"} if options.get("freeze_a") else set())
    with jax.set_mesh(mesh := make_mesh(MeshOptions(fsdp=2, tensor=2), jax.devices()[:4])):
        on_mesh, begun, _ = trained(mesh, quant, **options)
    np.testing.assert_allclose(on_mesh, losses, rtol=2e-6)
    for name, value in begun.items():
        np.testing.assert_allclose(value, first[name], atol=1e-5, err_msg=name)


def test_a_rank_that_the_weight_does_not_have_and_weights_in_another_format_are_refused(one_device):
    with pytest.raises(UserError, match=r"lora.rank=512, lora.init='pissa': .* is of rank \d+ at most"):
        trained(one_device, init="pissa", rank=512)
    for path in (None, "an/adapter"):
        with pytest.raises(UserError, match="stored in the format of its products by precision.recipe='fp8_hybrid'"):
            trained(one_device, recipe="fp8_hybrid", use_dora=True, path=path)


@pytest.mark.parametrize(
    ("option", "value"), [("use_dora", True), ("init", "pissa"), ("freeze_a", True), ("modules_to_save", ("lm_head",))]
)
def test_a_pipeline_has_none_of_them(option, value):
    config = Config(lora=LoraOptions(enabled=True, **{option: value}), mesh=MeshOptions(stage=2))
    assert any(f"lora.{option} = {value!r}: not available with mesh.stage" in p.text for p in checks.check(config))
