"""Features of families other than Qwen3 on eight devices: parts of fused modules, other norms and ropes, experts."""

import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Mapping
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh.harness import MESHES, OPTIMIZERS, ROWS, SEQUENCE, fetch_arrays, fields, micro_batches
from safetensors.numpy import load_file
from tiny import family_spec, layer, read_model, spec, write_model_folder

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, TrainOptions
from jaxtune.exports.write import export_full
from jaxtune.lora.options import LoraOptions
from jaxtune.models.layers.lookup import lookup, lookup_in_parts
from jaxtune.models.options import ExpertsOptions as Options
from jaxtune.models.parameters import Parameter, randomize
from jaxtune.models.structure.layer_spec import ClampedSilu, Experts, FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import DeltaNet, Heads, Hybrid, Latent, Mamba2, Rope, ShortConv
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.objectives.options import MtpOptions
from jaxtune.optim.options import OptimizerName, OptimOptions
from jaxtune.parallel import layout
from jaxtune.parallel.layout import AXES
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.parallel.options import MeshOptions, ParallelOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble, compile_step
from jaxtune.weights.base import Base
from pallas_kernels.grouped_matmul.groups import arrange

HEADS = dataclasses.replace(layer().mixer, heads=8, kv_heads=4)
SPARSE = dataclasses.replace(layer(), mixer=HEADS, feed_forward=Experts(64, count=4, active=2, normalized=True))
FUSED = dataclasses.replace(layer(intermediate=64), mixer=dataclasses.replace(HEADS, qk_norm=None))
NORMED_AFTER = dataclasses.replace(FUSED, mixer=dataclasses.replace(HEADS, qk_norm="whole"), norms="after")
SIDE_BY_SIDE = dataclasses.replace(
    FUSED,
    mixer=dataclasses.replace(
        FUSED.mixer,
        rope=Rope(1e4, original_positions=16, interleaved=True, fraction=0.5, query_growth=0.1),
        soft_cap=5.0,
    ),
    feed_forward=FeedForward(64, bias=True, activation="gelu_tanh", gated=False),
    norms="shared",
    residual_scale=0.5,
)
MIXED = Experts(
    64,
    count=8,
    active=2,
    normalized=True,
    scores="sigmoid",
    scale=1.5,
    corrected=True,
    groups=4,
    active_groups=2,
    float32=True,
    shared=32,
)
LATENT = dataclasses.replace(
    SPARSE,
    mixer=Heads(
        8,
        8,
        24,
        Rope(1e4, original_positions=16, interleaved=True, query_growth=0.1),
        latent=Latent(rank=16, query_rank=32, rope_dim=8, value_dim=16),
    ),
    feed_forward=MIXED,
)
FURTHER = dataclasses.replace(FUSED, predictor=True)
CLAMPED = Experts(64, count=4, active=2, normalized=True, activation=ClampedSilu(1.7, 0.5), router_bias=True, bias=True)
SINKS = dataclasses.replace(SPARSE, mixer=dataclasses.replace(FUSED.mixer, sinks=True), feed_forward=CLAMPED)
GATED = dataclasses.replace(FUSED, mixer=dataclasses.replace(HEADS, gated="fused"))
GATED_APART = dataclasses.replace(GATED, mixer=dataclasses.replace(HEADS, gated="separate"))
NET = DeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=8, kernel=4)
NETS = dataclasses.replace(
    FUSED, mixer=NET, feed_forward=Experts(64, count=4, active=2, normalized=True, shared=32, shared_gate=True)
)
FUSED_NETS = dataclasses.replace(NETS, mixer=dataclasses.replace(NET, fused=True), feed_forward=FUSED.feed_forward)
SPACE = Mamba2(heads=8, head_dim=8, groups=2, state=8, kernel=4, step_limit=(1e-3, math.inf))
MAMBA = dataclasses.replace(layer(), mixer=SPACE, feed_forward=None)
# Devices of the tensor axis share one group.
MAMBA_WHOLE = dataclasses.replace(MAMBA, mixer=dataclasses.replace(SPACE, groups=1))
RECODED = dataclasses.replace(MIXED, activation="relu2", gated=False, latent=16)
CONV = dataclasses.replace(layer(intermediate=64), mixer=ShortConv(64, kernel=3, bias=True))
CONV_OF_EXPERTS = dataclasses.replace(
    SPARSE, mixer=ShortConv(64, kernel=3), feed_forward=dataclasses.replace(SPARSE.feed_forward, scores="sigmoid")
)
LOCAL = dataclasses.replace(
    FUSED,
    mixer=dataclasses.replace(HEADS, window=16, qk_norm="head", v_norm=True, scale=1.0),
    feed_forward=Experts(32, count=4, active=2, normalized=True, activation="gelu_tanh", shared=64, parallel=True),
    norms="both",
    scaled=True,
)
GLOBAL = dataclasses.replace(
    LOCAL,
    mixer=dataclasses.replace(
        LOCAL.mixer,
        kv_heads=2,
        head_dim=16,
        window=None,
        keys_as_values=True,
        rope=Rope(1e6, kind="proportional", fraction=0.25),
    ),
)
HYBRID = dataclasses.replace(
    FUSED,
    mixer=Hybrid(FUSED.mixer, dataclasses.replace(SPACE, factors=(0.5, 1.5, 0.8, 1.2, 0.9), normed=False)),
    feed_forward=FeedForward(64, gate_factor=0.8, out_factor=1.5),
)


def sharing(layer: Layer, how: Literal["keeps", "takes"]) -> Layer:
    """Return a layer that keeps its keys and values, or takes those that were kept."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **{how: "sliding"}))


SCALED = {"norm": Norm(1e-5, centred=True, bias=True), "embedding_scale": 4.0, "logit_scale": 0.5, "logit_cap": 3.0}
SPECS = {
    "afmoe": spec((GATED_APART, GATED_APART), family="afmoe", hidden=64),
    "deepseek_v3": spec((LATENT, LATENT), family="deepseek_v3", hidden=64),
    "falcon_h1": spec((HYBRID, HYBRID), family="falcon_h1", hidden=64, tied=False),
    "gemma4_text": spec(
        (sharing(LOCAL, "keeps"), GLOBAL, sharing(LOCAL, "takes")),
        family="gemma4_text",
        hidden=64,
        norm=Norm(1e-6, rounded=False),
        layer_embedding=8,
    ),
    "gpt_oss": spec((SINKS, SINKS), family="gpt_oss", hidden=64, router_loss=0.1),
    "nemotron_h": spec(
        (MAMBA, dataclasses.replace(MAMBA, mixer=None, feed_forward=RECODED), MAMBA_WHOLE),
        family="nemotron_h",
        hidden=64,
        tied=False,
    ),
    "nemotron_h of one kind": spec((MAMBA, MAMBA), family="nemotron_h", hidden=64, tied=False),
    "lfm2_moe": spec((CONV, CONV_OF_EXPERTS), family="lfm2_moe", hidden=64),
    "olmo2": spec((NORMED_AFTER, NORMED_AFTER), family="olmo2", hidden=64),
    "starcoder2": spec((SIDE_BY_SIDE, SIDE_BY_SIDE), family="starcoder2", hidden=64, **SCALED),
    "phi3": spec((FUSED, FUSED), family="phi3", hidden=64),
    "qwen3_5_moe_text": spec((NETS, GATED), family="qwen3_5_moe_text", hidden=64),
    "qwen3_next": spec((FUSED_NETS, GATED), family="qwen3_next", hidden=64),
    "qwen3_moe": spec((SPARSE, SPARSE), family="qwen3_moe", hidden=64, router_loss=0.1),
    # The first has four layers that stages divide, and others around them that remain; the other has two periods.
    "deepseek_v3 longer": spec(
        (dataclasses.replace(LATENT, feed_forward=FUSED.feed_forward), *[LATENT] * 5), family="deepseek_v3", hidden=64
    ),
    "glm4_moe with a module": spec((FUSED,), family="glm4_moe", hidden=64, mtp=(FURTHER,)),
    "qwen3_5_moe_text longer": spec((NETS, GATED) * 2, family="qwen3_5_moe_text", hidden=64),
}


def spec_of(family: str) -> ModelSpec:
    """Return the spec of one of SPECS, or of a tiny config of `family_configs.FAMILIES`."""
    return SPECS.get(family) or family_spec(family)


# In addition to config.json, if all parameters are trained.
BALANCED = Options(router_loss=0.1, router_loss_over="sequence", router_z_loss=0.01, bias_update_rate=0.1)
OPTIONS = {"deepseek_v3": BALANCED, "deepseek_v3 longer": BALANCED}


EXPERTS_APART = {
    "expert=2": MeshOptions(fsdp=1, expert=2),
    "fsdp=2 expert=2": MeshOptions(fsdp=2, expert=2),
    "expert=4": MeshOptions(fsdp=1, expert=4),
    "expert=4 tensor=2": MeshOptions(fsdp=1, expert=4, tensor=2),
    "data=2 expert=2 tensor=2": MeshOptions(data=2, fsdp=1, expert=2, tensor=2),
    "fsdp=2 expert=2 sequence=2": MeshOptions(fsdp=2, expert=2, sequence=2),
    "expert=2 context=2 sequence=2": MeshOptions(fsdp=1, expert=2, context=2, sequence=2),
    "stage=2 expert=2 tensor=2": MeshOptions(fsdp=1, stage=2, expert=2, tensor=2),
}
PIPELINES = {"fsdp=2 stage=2": MeshOptions(fsdp=2, stage=2), "stage=2": MeshOptions(fsdp=1, stage=2)}


def train(
    family: str,
    lora: bool,
    mesh: MeshOptions,
    devices: int,
    collapsed: bool = False,
    parts: int = 1,
    chunks: int = 1,
    dispatch: Literal["all_gather", "all_to_all"] = "all_gather",
    optimizer: OptimizerName = "adamw",
) -> tuple[np.ndarray, dict]:
    """Return the losses of two steps of `parts` micro-batches, and the trained parameters.

    `collapsed`: all tokens go to the first experts. `chunks`: virtual stages of a stage. One device recomputes nothing
    in the backward pass: it is the reference for any rematerialisation.
    """
    parallel = ParallelOptions(virtual_stages=chunks)
    made = make_mesh(mesh, jax.devices()[:devices], parallel)
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=SEQUENCE),
        train=TrainOptions(micro_batch_size=ROWS // parts // data_shards(made), grad_accum_steps=parts),
        parallel=parallel,
        optim=OptimOptions(optimizer),
        lora=LoraOptions(enabled=lora, rank=4, dropout=0.1),
        precision=PrecisionOptions("fp32"),
        experts=dataclasses.replace(Options() if lora else OPTIONS.get(family, Options()), dispatch=dispatch),
        mtp=MtpOptions(0.5 if spec_of(family).mtp else 0.0),
        memory=MemoryOptions("none" if devices == 1 else "experts" if family == "qwen3_moe" else "auto"),
    )
    program = assemble(Base(spec_of(family)), config, made)
    trained, frozen = (values_of_layers(of) for of in (program.model.trained, program.model.frozen))
    if collapsed:  # the first of equal scores count as the largest
        routers = {name: p for name, p in program.model.frozen.items() if p.kind == "router"}
        assert routers
        frozen |= {name: jnp.zeros_like(frozen[name]) for name in routers}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    state, step = jax.jit(program.start, out_shardings=shardings)(trained), jax.jit(program.step)
    losses = []
    for number in range(2):
        rows = fields(2, made.shape["context"])
        batch = {
            name: jax.device_put(rows[name][number].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.batch.items()
        }
        state, metrics = step(state, frozen, batch, jnp.float32(1e-3))
        losses.append(float(metrics["loss"]))
    return np.array(losses), fetch_arrays(state.trained)


def values_of_layers(declared: Mapping[str, Parameter]) -> dict[str, jax.Array]:
    """Draw values that do not depend on how layers are stacked; by numpy, because jax's draws compile for seconds."""

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.normal(scale=0.02, size=shape).astype(np.float32) + np.float32("norm" in name or "scal" in name)

    values = {name: np.stack([draw(place.name, p.matrix) for place in p.places]) for name, p in declared.items()}
    return {name: jax.device_put(values[name].reshape(p.shape), p.sharding) for name, p in declared.items()}


@cache
def one_device(
    family: str, lora: bool, parts: int = 1, collapsed: bool = False, optimizer: OptimizerName = "adamw"
) -> tuple[np.ndarray, dict]:
    return train(family, lora, MeshOptions(), 1, collapsed, parts, optimizer=optimizer)


@pytest.mark.parametrize(
    ("family", "lora", "mesh"),
    [
        ("afmoe", False, "fsdp=4 tensor=2"),
        ("deepseek_v3", False, "data=2 expert=2 tensor=2"),
        ("deepseek_v3", True, "sequence=8"),
        ("deepseek_v3", False, "context=8"),
        ("gemma4_text", True, "data=2 expert=2 tensor=2"),
        ("gemma4_text", False, "fsdp=2 expert=2 sequence=2"),
        ("falcon_h1", False, "fsdp=2 sequence=2 tensor=2"),
        ("glm4_moe with a module", False, "fsdp=2 context=2 tensor=2"),
        ("gpt_oss", False, "fsdp=2 expert=2 sequence=2"),
        ("gpt_oss", True, "expert=2 context=2 sequence=2"),
        ("nemotron_h", False, "fsdp=2 sequence=2 tensor=2"),
        ("nemotron_h of one kind", True, "fsdp=2 sequence=2 tensor=2"),
        ("lfm2_moe", False, "fsdp=2 context=2 tensor=2"),
        ("olmo2", False, "fsdp=4 tensor=2"),
        ("phi3", True, "fsdp=4 tensor=2"),
        ("qwen3_5_moe_text", False, "data=2 fsdp=2 tensor=2"),
        ("qwen3_next", True, "sequence=8"),
        ("qwen3_next", False, "data=2 context=2 sequence=2"),
        ("starcoder2", True, "fsdp=4 tensor=2"),
        ("qwen3_moe", False, "expert=4"),
        ("qwen3_moe", True, "data=2 sequence=2 tensor=2"),
    ],
)
def test_equals_one_device(family, lora, mesh):
    axes = {**MESHES, **EXPERTS_APART}[mesh]
    parts = micro_batches(axes)
    expected, on_one = one_device(family, lora, parts)
    found, on_mesh = train(family, lora, axes, math.prod(dataclasses.astuple(axes)), parts=parts)
    assert np.abs(found / expected - 1).max() <= 1e-6
    corrections = [name for name in on_one if "correction" in name]
    assert bool(corrections) == (family == "deepseek_v3" and not lora)
    assert all(np.array_equal(on_mesh[name], on_one[name]) for name in corrections)


@pytest.mark.parametrize(
    "mesh",
    [MeshOptions(data=2, fsdp=2, tensor=2), MeshOptions(fsdp=2, context=2, sequence=2)],
    ids=["rows", "positions"],
)
def test_a_table_in_parts_is_looked_up_as_a_whole_one(mesh):
    made, rng = make_mesh(mesh, jax.devices()[:8]), np.random.default_rng(0)

    def put(value, of):
        return jax.device_put(value, jax.NamedSharding(made, of))

    table = put(rng.normal(size=(256, 64)).astype(np.float32), layout.spec("vocabulary", "embed"))
    tokens = put(rng.integers(0, 256, size=(8, 16)), layout.by_token())
    weights = put(rng.normal(size=(8, 16, 64)).astype(np.float32), layout.by_token(None))

    def found(look):
        def weighted(table):
            vectors = look(table)
            return jnp.sum(vectors * weights), vectors

        (_, vectors), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(table)
        return np.asarray(vectors), np.asarray(gradient)

    vectors, gradient = found(lambda table: lookup_in_parts(table, tokens))
    expected, summed = found(lambda table: lookup(jax.reshard(table, jax.P(None, None)), tokens))
    np.testing.assert_array_equal(vectors, expected)
    np.testing.assert_allclose(gradient, summed, atol=1e-5)


def test_the_embeddings_for_each_layer_are_never_whole_on_a_device():
    """Gemma 4's second table is larger than its layers; the first one is gathered."""
    model, mesh = SPECS["gemma4_text"], make_mesh(MeshOptions(fsdp=8), jax.devices()[:8])
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=SEQUENCE),
        train=TrainOptions(micro_batch_size=1),
        precision=PrecisionOptions("fp32"),
    )
    program = assemble(Base(model), config, mesh)
    collectives = re.findall(r"= (.*) (?:all|reduce)-\w+\(", compile_step(program, config).as_text())
    widths = model.hidden, len(model.layers) * model.layer_embedding
    first, second = (f"f32[{model.padded_vocabulary},{features}]" for features in widths)
    assert any(first in shapes for shapes in collectives)
    assert not [shapes for shapes in collectives if second in shapes]


def test_every_axis_and_every_pair_of_axes_has_a_mesh():
    meshes = [*MESHES.values(), *EXPERTS_APART.values(), *PIPELINES.values()]
    spread = {frozenset(axis for axis in AXES if getattr(mesh, axis) > 1) for mesh in meshes}
    assert {frozenset({axis}) for axis in AXES} <= spread
    pairs = itertools.combinations(AXES, 2)
    assert not [pair for pair in pairs if not any(axes.issuperset(pair) for axes in spread)]


@pytest.mark.parametrize(
    ("family", "lora", "mesh", "chunks"),
    [
        ("deepseek_v3 longer", False, "fsdp=2 stage=2", 2),
        ("deepseek_v3 longer", True, "stage=2", 1),
        ("nemotron_h of one kind", False, "fsdp=2 stage=2", 1),
        ("qwen3_5_moe_text longer", True, "stage=2", 1),
        ("qwen3_moe", False, "stage=2 expert=2 tensor=2", 1),
    ],
)
def test_a_pipeline_and_the_layers_around_it_equal_one_device(family, lora, mesh, chunks):
    expected, on_one = one_device(family, lora, 4)
    axes = {**PIPELINES, **EXPERTS_APART}[mesh]
    devices = math.prod(dataclasses.astuple(axes))
    found, on_stages = train(family, lora, axes, devices, parts=4, chunks=chunks)
    assert np.abs(found / expected - 1).max() <= 1e-6

    def moved(trained: dict) -> np.ndarray:
        """Router corrections of all layers; each is moved by the same rate or not at all."""
        return np.sort(np.concatenate([value for name, value in trained.items() if "correction" in name]), axis=None)

    assert any("correction" in name for name in on_one) == (family == "deepseek_v3 longer" and not lora)
    if family == "deepseek_v3 longer" and not lora:
        np.testing.assert_array_equal(moved(on_stages), moved(on_one))


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [("muon", "expert=2"), ("muon", "fsdp=2 expert=2"), ("normuon", "stage=2 expert=2 tensor=2")],
)
def test_orthogonalised_experts_equal_one_device(optimizer, mesh):
    axes = EXPERTS_APART[mesh]
    parts = micro_batches(axes)
    expected, _ = one_device("qwen3_moe", False, parts, optimizer=optimizer)
    devices = math.prod(dataclasses.astuple(axes))
    found, _ = train("qwen3_moe", False, axes, devices, parts=parts, optimizer=optimizer)
    assert np.abs(found / expected - 1).max() <= OPTIMIZERS[optimizer]


def test_devices_whose_experts_get_no_token_or_all_of_them_equal_one_device():
    expected, _ = one_device("qwen3_moe", True, collapsed=True)
    for dispatch in ("all_gather", "all_to_all"):
        mesh = EXPERTS_APART["expert=4 tensor=2"]
        found, _ = train("qwen3_moe", True, mesh, 8, collapsed=True, dispatch=dispatch)
        assert np.abs(found / expected - 1).max() <= 1e-6


@pytest.mark.parametrize(
    ("family", "lora", "mesh", "parts"),
    [
        ("gpt_oss", True, "expert=2 context=2 sequence=2", 2),
        ("qwen3_moe", False, "stage=2 expert=2 tensor=2", 4),
    ],
)
def test_tokens_sent_to_their_experts_equal_one_device(family, lora, mesh, parts):
    expected, _ = one_device(family, lora, parts)
    found, _ = train(family, lora, EXPERTS_APART[mesh], 8, parts=parts, dispatch="all_to_all")
    assert np.abs(found / expected - 1).max() <= 1e-6


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_plan_counts_as_many_items_of_experts_as_balanced_routing_sends(factor):
    """Also if a device sends fewer rows than the factor asks for, because no more can be for one device."""
    made = make_mesh(MeshOptions(fsdp=1, expert=2), jax.devices()[:2])
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=SEQUENCE),
        train=TrainOptions(micro_batch_size=1, grad_accum_steps=1),
        experts=Options(dispatch="all_to_all", capacity_factor=factor),
    )
    program = assemble(Base(SPECS["qwen3_moe"]), config, made)
    text = jax.jit(program.step).lower(*program.arguments).as_text(debug_info=True)
    # A device has 2 of 4 experts, and a token takes 2: it gets 2 * SEQUENCE items, in as many rows if the factor is 1.
    rows = arrange(jnp.zeros(2 * SEQUENCE * (1 if factor == 1.0 else 2), jnp.int32), 2)
    expected = rows.groups.filled(2 * SEQUENCE, len(rows.item_of))
    assert set(re.findall(r"filled=([\d.]+)", text)) == {f"{expected:.4f}"}


@pytest.mark.parametrize(("kind", "format"), [("Qwen3Moe", None), ("Qwen3Moe", "nf4"), ("GptOss", "mxfp4")])
def test_experts_are_read_where_they_are_divided_and_exported_as_from_one_device(tmp_path, kind, format):
    width = {"moe_intermediate_size": 64, "num_experts": 4}
    width = width if kind == "Qwen3Moe" else {"intermediate_size": 64, "num_local_experts": 4}
    folder = write_model_folder(tmp_path / "model", kind, hidden_size=256, head_dim=32, **width)
    lora = LoraOptions(enabled=format is not None, rank=2)
    held, written = [], []
    for mesh, devices in ((MeshOptions(), 1), (MeshOptions(fsdp=2, expert=2), 4)):
        made = make_mesh(mesh, jax.devices()[:devices])
        model, parameters, config = read_model(folder, made, lora=lora, quant=QuantOptions(format))
        experts = [name for name in parameters if ".experts." in name]
        assert experts
        for leaf in jax.tree.leaves([parameters[name] for name in experts]) if devices > 1 else ():
            assert leaf.sharding.shard_shape(leaf.shape)[1] == 2
        held.append(fetch_arrays(parameters))
        export_full(model, {**parameters, **randomize(model.new, 0)}, config, tmp_path / str(devices))
        written.append(load_file(tmp_path / str(devices) / "model.safetensors"))
    # Codes are the same; a mean over NF4's scales is summed in another order.
    for before, after in (held, written):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), before, after)
