"""Training of a mixture of experts; its output is compared with transformers in tests/parity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from nightly_rows import nightly
from tiny import layer, random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.models.options import ExpertsOptions as Options
from jaxtune.models.parameters import randomize
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.models.treatment import treat
from jaxtune.optim.options import OptimOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base

SPARSE = dataclasses.replace(layer(), feed_forward=Experts(size=16, count=4, active=2, normalized=True))
SPEC = spec((layer(), SPARSE, SPARSE), family="qwen3_moe", router_loss=0.01)
EXPERTS = "stacks.1.blocks.0.mlp.experts.up.weight"


def trained(mesh, model=SPEC, dtype="float32", **sections):
    """Return (program, parameters before, parameters after three steps, metrics of each step)."""
    config = Config(
        model=ModelOptions(dtype=dtype), data=DataOptions(seq_len=32), memory=MemoryOptions("none"), **sections
    )
    program = assemble(Base(model), config, mesh)
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 32), mesh))
    start, frozen = (randomize(of, 0) for of in (program.model.trained, program.model.frozen))
    state, rows = program.start(start), []
    for _ in range(3):
        state, metrics = jax.jit(program.step)(state, frozen, batch, jnp.float32(1e-2))
        rows.append(metrics)
    return program, start, state.trained, rows


@pytest.mark.parametrize("name", ["adamw", nightly("adafactor"), nightly("adamw_8bit"), nightly("muon")])
def test_every_expert_of_every_layer_is_trained(one_device, name):
    program, start, after, rows = trained(
        one_device, optim=OptimOptions(name, learning_rate=1e-2), precision=PrecisionOptions("fp32")
    )
    assert program.model.parameters[EXPERTS].shape == (2, 4, 16, 16)
    moved = np.abs(np.asarray(after[EXPERTS] - start[EXPERTS])).max(axis=(2, 3))
    assert moved.shape == (2, 4) and (moved > 1e-4).all()
    assert rows[-1]["loss"] < rows[0]["loss"] and 0.9 < rows[0]["router_loss"] < 4.0
    # A token goes to two of four experts: at least two share the load, and the busiest has at most twice the mean.
    assert 1 < rows[0]["expert_load_max"] <= 2 and 0.5 <= rows[0]["expert_load_entropy"] < 1


def test_experts_have_adapters_of_their_own(one_device):
    program, start, after, _ = trained(
        one_device, lora=LoraOptions(enabled=True, rank=2), precision=PrecisionOptions("fp32")
    )
    name = EXPERTS.replace("weight", "lora_b")
    assert after[name].shape == (2, 4, 16, 2) and np.asarray(after[name]).any(axis=(2, 3)).all()
    assert [place.name for place in program.model.parameters[name].places][5] == (
        "model.layers.2.mlp.experts.1.up_proj.lora_B.weight"
    )
    assert not any("router" in name for name in start)


@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "adamw_8bit"), nightly("float32", "adamw")])
def test_a_router_is_in_float32_and_what_corrects_it_is_never_trained(one_device, dtype, optimizer):
    experts = dataclasses.replace(SPARSE.feed_forward, scores="sigmoid", corrected=True, shared=16, float32=True)
    corrected = spec((dataclasses.replace(SPARSE, feed_forward=experts),) * 2, family="glm4_moe")
    program, start, after, rows = trained(
        one_device,
        corrected,
        dtype,
        optim=OptimOptions(optimizer, learning_rate=1e-2),
        precision=PrecisionOptions(master_dtype=dtype),
    )
    router, correction = (f"stacks.0.blocks.0.mlp.router.{part}" for part in ("weight", "correction"))
    assert correction in program.model.frozen
    assert {program.model.parameters[name].dtype for name in (router, correction)} == {jnp.dtype("float32")}
    assert after[router].dtype == jnp.float32 and np.asarray(after[router] != start[router]).any(-1).all()
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_correction_of_each_layer_moves_by_its_own_load_alone(one_device):
    """The correction of experts always chosen falls by the rate, of others it rises; a non-finite step changes none."""
    experts = dataclasses.replace(SPARSE.feed_forward, scores="sigmoid", corrected=True, float32=True)
    sparse = dataclasses.replace(SPARSE, feed_forward=experts)
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=16),
        train=TrainOptions(grad_accum_steps=2),
        optim=OptimOptions(weight_decay=0.1, no_decay="norm"),
        experts=Options("dense", bias_update_rate=0.25),
    )
    layers = (sparse, layer(), sparse, layer(), sparse)  # a period of two, and a stack of one
    program = assemble(Base(spec(layers, family="glm4_moe")), config, one_device)
    trained = random_values(program.model.trained)
    favoured = {0: (0, 1), 2: (1, 3), 4: (0, 2)}  # 10 is more than any score
    corrections = {name: p.layers for name, p in program.model.trained.items() if p.kind == "correction"}
    assert sorted(layer for layers in corrections.values() for layer in layers) == [0, 2, 4]
    for name, numbers in corrections.items():
        start = [[10.0 * (expert in favoured[number]) for expert in range(4)] for number in numbers]
        trained[name] = jax.device_put(np.array(start, np.float32), trained[name].sharding)
    rows = make_batch(tokens(2, 16), one_device)
    batch = {
        n: jax.device_put(np.asarray(rows[n]).reshape(leaf.shape), leaf.sharding) for n, leaf in program.batch.items()
    }
    step, start = jax.jit(program.step), program.start(trained)
    after, metrics = step(start, {}, batch, jnp.float32(1e-3))
    for name, numbers in corrections.items():
        expected = [[9.75 if expert in favoured[number] else 0.25 for expert in range(4)] for number in numbers]
        assert np.array_equal(after.trained[name], expected)
    assert metrics["expert_load_max"] == metrics["expert_load_worst"] == 2
    broken, _ = step(start, {}, batch | {"loss_weight": batch["loss_weight"] * jnp.nan}, jnp.float32(1e-3))
    assert all(np.array_equal(broken.trained[name], trained[name]) for name in corrections)


def test_a_rate_that_moves_no_correction_is_refused(one_device):
    for sections in ({}, {"train": TrainOptions(freeze="correction_bias")}):
        corrected = "freeze" in str(sections)
        experts = dataclasses.replace(SPARSE.feed_forward, scores="sigmoid", corrected=corrected)
        sparse = (dataclasses.replace(SPARSE, feed_forward=experts),)
        base = Base(spec(sparse, family="glm4_moe" if corrected else "qwen3_moe"))
        config = Config(data=DataOptions(seq_len=32), experts=Options(bias_update_rate=0.1), **sections)
        with pytest.raises(
            UserError, match=r"experts\.bias_update_rate=0\.1: this .* trains no correction of a router"
        ):
            assemble(base, config, one_device)


def test_experts_in_one_tensor_are_adapted_by_the_names_that_transformers_gives_them(one_device):
    sparse = dataclasses.replace(SPARSE, mixer=dataclasses.replace(SPARSE.mixer, qk_norm=None))
    base = Base(spec((sparse, sparse), family="granitemoe"))

    def adapted(*modules: str) -> dict[str, str]:
        """Return the place of each A."""
        lora = LoraOptions(enabled=True, rank=2, target_modules=modules)
        trained = assemble(base, Config(data=DataOptions(seq_len=32), lora=lora), one_device).model.trained
        return {name: p.places[0].name for name, p in trained.items() if name.endswith("lora_a")}

    layer = "model.layers.0"
    assert adapted("q_proj", "down_proj") == {
        "stacks.0.blocks.0.attention.q.lora_a": f"{layer}.self_attn.q_proj.lora_A.weight",
        "stacks.0.blocks.0.mlp.experts.down.lora_a": f"{layer}.block_sparse_moe.experts.lora_A.weight",
    }
    assert set(adapted("gate_up_proj").values()) == {f"{layer}.block_sparse_moe.experts.lora_A.weight"}
    with pytest.raises(UserError, match="output_linear"):  # as the files name it
        adapted("output_linear")


@pytest.mark.nightly
def test_low_precision_has_a_scale_of_every_expert(one_device):
    program, _, _, rows = trained(one_device, precision=PrecisionOptions("fp8_hybrid", exclude="self_attn"))
    assert program.state.scaling.amax[EXPERTS].shape[:3] == (2, 4, 2)
    assert np.isfinite([float(row["loss"]) for row in rows]).all()


def test_experts_are_treated_together(one_device):
    with pytest.raises(
        UserError, match=r"experts\.1\.up_proj\.weight is selected and .* is not: they are one parameter"
    ):
        treat(SPEC, ["model.layers.1.mlp.experts.1.up_proj.weight"], trained=False)
