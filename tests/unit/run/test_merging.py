"""ReLoRA: adapters are merged into the weights, the model's output does not change, and the state holds everything."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from nightly_rows import nightly
from tiny import random_values, spec

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble
from jaxtune.training.memory import parts_of
from jaxtune.weights.base import Base


def assemble_run(mesh, quant=None, rank=2, noise=0.0, **lora):
    """Return (program, its first state, its frozen parameters, a batch)."""
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=32),
        lora=LoraOptions(enabled=True, rank=rank, alpha=4.0, **lora),
        quant=QuantOptions(quant, block_size="channel" if quant else None, noise=noise),
        precision=PrecisionOptions("fp32"),
        optim=OptimOptions(weight_decay=0.0),
    )
    program = assemble(Base(spec(2)), config, mesh)
    values: dict = random_values(program.model.parameters)
    for name, parameter in program.model.quantized.items():
        values[name] = parameter.storage.make(values[name], parameter.axes)
    state = jax.jit(program.start)({name: values[name] for name in program.state.trained})
    state = state._replace(base={name: values[name] for name in program.state.base})
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 32), mesh))
    return program, state, {name: values[name] for name in program.frozen}, batch


def plain(weight) -> np.ndarray:
    return np.asarray(weight.dequantize() if isinstance(weight, QuantizedArray) else weight, np.float32)


@pytest.mark.parametrize(
    ("reset", "quant"), [nightly(False, None), nightly(False, "int8"), nightly(True, None), (True, "int8")]
)
def test_the_adapters_of_a_step_are_in_the_base_after_it(one_device, quant, reset):
    program, state, frozen, batch = assemble_run(one_device, quant, merge_interval=2, reset_on_merge=reset)
    unmerged = assemble_run(one_device, quant)
    step, without = jax.jit(program.step), jax.jit(unmerged[0].step)
    rate, unmerged_state = jnp.float32(1e-2), unmerged[1]
    for _ in range(2):
        state, _ = step(state, frozen, batch, rate)
        unmerged_state, _ = without(unmerged_state, unmerged[2], batch, rate)
    scale = 4.0 / 2
    assert set(state.base) == {name for name in unmerged[2] if ".attention." in name or ".mlp." in name} - {
        name for name in unmerged[2] if "norm" in name
    }
    for name, merged in state.base.items():
        parts = program.model.adapter_of(name)
        a, b = (np.asarray(unmerged_state.trained[parts[part]]) for part in ("lora_a", "lora_b"))
        expected = plain(unmerged[2][name]) + scale * np.einsum("lor,lri->loi", b, a)
        tolerance = 0.01 * np.abs(expected).max() if quant else 1e-6
        np.testing.assert_allclose(plain(merged), expected, atol=tolerance)
        assert not np.asarray(state.trained[parts["lora_b"]]).any()
        assert np.abs(np.asarray(state.trained[parts["lora_a"]]) - a).max() > 0.01
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer.rules) if leaf.ndim]
    assert any(np.asarray(leaf).any() for leaf in moments) != reset
    assert int(state.optimizer.count) == (0 if reset else 2)
    # The model's output is the same except for rounding, so the next loss is, too.
    _, metrics = step(state, frozen, batch, rate)
    _, whole = without(unmerged_state, unmerged[2], batch, rate)
    assert abs(float(metrics["loss"]) - float(whole["loss"])) < (0.05 if quant else 1e-5)


def test_between_merges_the_base_stays_and_on_a_mesh_it_is_the_same():
    parameters = []
    for devices, sizes in ((1, {}), (4, {"fsdp": 2, "tensor": 2})):
        mesh = make_mesh(MeshOptions(**{"fsdp": 1, **sizes}), jax.devices()[:devices])
        program, state, frozen, batch = assemble_run(mesh, merge_interval=2)
        step = jax.jit(program.step)
        first = {name: np.asarray(value) for name, value in state.base.items()}
        for number in range(1, 4):
            before = {name: np.asarray(value) for name, value in state.base.items()}
            state, _ = step(state, frozen, batch, jnp.float32(1e-2))
            same = all(np.array_equal(before[name], value) for name, value in state.base.items())
            assert same == (number % 2 == 1)
        assert any((first[name] != np.asarray(value)).any() for name, value in state.base.items())
        parameters.append({name: np.asarray(value) for name, value in (state.base | state.trained).items()})
    for name, one in parameters[0].items():
        np.testing.assert_allclose(parameters[1][name], one, atol=2e-5)


def test_noise_is_of_the_step_alone_and_falls_with_the_learning_rate(one_device):
    losses = {}
    for deviation in (0.0, 0.05):
        program, state, frozen, batch = assemble_run(one_device, "int8", noise=deviation)
        step = jax.jit(program.step)
        second = state._replace(step=state.step + 1)
        for name, at, rate in (
            ("first", state, 1e-4),
            ("again", state, 1e-4),
            ("next", second, 1e-4),
            ("still", state, 0),
        ):
            losses[deviation, name] = float(step(at, frozen, batch, jnp.float32(rate))[1]["loss"])
    plain = losses[0.0, "first"]
    assert losses[0.05, "first"] == losses[0.05, "again"] and losses[0.05, "still"] == plain == losses[0.0, "next"]
    assert len({plain, losses[0.05, "first"], losses[0.05, "next"]}) == 3
    assert abs(losses[0.05, "first"] - plain) < 0.1


def test_what_cannot_be_merged_is_refused(one_device):
    config = Config(
        lora=LoraOptions(enabled=True, merge_interval=2),
        data=DataOptions(seq_len=32),
        optim=OptimOptions(ema_decay=0.9),
    )
    with pytest.raises(UserError, match=r"lora.merge_interval=2: not with an average \(optim.ema_decay\)"):
        assemble(Base(spec(2)), config, one_device)
    schedule_free = OptimOptions(name="schedule_free", schedule="constant")
    with pytest.raises(UserError, match="not with optim.name='schedule_free'"):
        assemble(Base(spec(2)), dataclasses.replace(config, optim=schedule_free), one_device)


def test_a_device_is_told_by_its_parts():
    """The log's lines before training, for two devices that share the weights."""
    mesh = make_mesh(MeshOptions(fsdp=2), jax.devices()[:2])
    program, *_ = assemble_run(mesh, "int8", merge_interval=2)
    parts = parts_of(program)
    named = {"adapters", "frozen weights", "quantized weights", "optimizer state", "batch"}
    assert {part for part, size in parts.items() if size} == named
    whole = sum(p.shape[0] * p.shape[1] * p.shape[2] for p in program.model.quantized.values())
    assert whole // 2 < parts["quantized weights"] < whole, "half the weights, at a byte each, and scales"
    assert parts["optimizer state"] == pytest.approx(2 * parts["adapters"], abs=16)
