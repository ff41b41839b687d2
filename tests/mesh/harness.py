"""The same claim for every mesh and every kind of training: it equals the same training on one device."""

import dataclasses
import functools
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from runs import write_model_folder

from jaxtune.columns import HEAD_ROWS, NOT_AN_OPTION
from jaxtune.config.checks import check
from jaxtune.config.schema import (
    Config,
    DataOptions,
    Dataset,
    MemoryOptions,
    ModelOptions,
    RolloutOptions,
    TrainOptions,
)
from jaxtune.data.rows.deal import deal_row
from jaxtune.lora.options import LoraOptions
from jaxtune.objectives.options import DecisionOptions, DistillOptions, GrpoOptions, PreferenceOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.optim.schedules import learning_rates
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.parallel.options import MeshOptions, ParallelOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions, ServeOptions
from jaxtune.training.assembly import assemble, compile_step
from jaxtune.weights.base import read_base
from jaxtune.weights.values import frozen_parameters, initial_parameters

ROWS, SEQUENCE, STEPS = 8, 24, 3
# fsdp=4 tensor=2 can share blocks of 64 x 64, and some of the adapters have 8-bit moments.
SIZES = dict(hidden_size=256, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=32)

MESHES = {
    "data=8": MeshOptions(data=8, fsdp=1),
    "fsdp=8": MeshOptions(fsdp=8),
    "data=2 fsdp=4": MeshOptions(data=2, fsdp=4),
    "fsdp=4 tensor=2": MeshOptions(fsdp=4, tensor=2),
    "data=2 fsdp=2 tensor=2": MeshOptions(data=2, fsdp=2, tensor=2),
    "tensor=8": MeshOptions(fsdp=1, tensor=8),  # more devices than key/value heads
    "sequence=8": MeshOptions(fsdp=1, sequence=8),
    "data=2 sequence=2 tensor=2": MeshOptions(data=2, fsdp=1, sequence=2, tensor=2),
    "fsdp=2 sequence=2 tensor=2": MeshOptions(fsdp=2, sequence=2, tensor=2),
    "context=8": MeshOptions(fsdp=1, context=8),
    "data=2 context=2 sequence=2": MeshOptions(data=2, fsdp=1, context=2, sequence=2),
    "fsdp=2 context=2 tensor=2": MeshOptions(fsdp=2, context=2, tensor=2),
    "stage=2 context=2 sequence=2": MeshOptions(fsdp=1, stage=2, context=2, sequence=2),
    "data=2 fsdp=2 stage=2": MeshOptions(data=2, fsdp=2, stage=2),
    "stage=2 sequence=2 tensor=2": MeshOptions(fsdp=1, stage=2, sequence=2, tensor=2),
}
# Storage of the base's linear layers; operands are stored in the products' format, also in training without adapters.
STORAGE: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": PrecisionOptions("bf16")},
    "nf4": {"quant": QuantOptions("nf4")},
    "fp8": {"quant": QuantOptions("fp8", block_size=64)},
    "nvfp4": {"quant": QuantOptions("nvfp4")},
    "mxfp4": {"quant": QuantOptions("mxfp4")},
    "int8": {"quant": QuantOptions("int8")},
    "fp8 operands": {"precision": PrecisionOptions("fp8_hybrid")},
    "nvfp4 operands": {"precision": PrecisionOptions("nvfp4")},
}
# Trained as served quantized; in test_quantized_meshes.py only.
SERVED = {"served int4": {"serve": ServeOptions("int4", 32)}, "served nvfp4": {"serve": ServeOptions("nvfp4")}}
ADAPTERS = ("none", "lora")


class Named(NamedTuple):
    """A kind of model, its sizes, and its linear layers by use.

    `adapted` have adapters; `others` are neither adapted, trained nor quantized.
    """

    kind: str
    sizes: dict[str, Any]
    adapted: tuple[str, ...] = ("k_proj", "down_proj")
    others: str = r"[qvo]_proj|gate_proj|up_proj"


MODELS = {
    "dense": Named("Qwen3", {}),
    "moe": Named(
        "Qwen3Moe",
        dict(
            moe_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "hybrid": Named(
        "Qwen3_5Text",
        # With a smaller epsilon, the norms of a delta net's small inputs would consist mostly of rounding.
        dict(
            rms_norm_eps=1e-2,
            linear_num_key_heads=8,
            linear_num_value_heads=8,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        ),
        ("k_proj", "down_proj", "out_proj"),
        r"[qvo]_proj|gate_proj|up_proj|in_proj",
    ),
}
# Allowed relative difference of losses: 8-bit moments and signs of gradients jump if a sum in another order
# crosses a boundary.
OPTIMIZERS = {
    "adamw": 1e-6,
    "sgd": 1e-6,
    "adafactor": 1e-5,  # for parameters too narrow for factors, the first update is the sign of the gradient
    "schedule_free": 1e-6,
    "muon": 1e-5,
    "normuon": 1e-5,
    "lion": 1e-5,
    "adamw_8bit": 1e-4,
}
# Lion moves every element by the full rate, in a direction that may depend on rounding: losses diverge at AdamW's rate.
RATE, RATES = 1e-3, {"lion": 3e-5}
LOW_PRECISION = 5e-3  # the same for recipes that round activations to bfloat16
NORM = 1e-5  # allowed for the first gradient norm, before any update
PARAMETERS = 1e-4  # allowed relative to a parameter's largest element, unless the optimizer jumps
OBJECTIVES = {"cross_entropy": 0.0, "z-loss": 1e-2}
# In place of an objective: another head, pairs of answers, rewarded completions, a teacher, questions. They have
# separate tests.
CLASSIFICATION, PREFERENCE, SCORED = "classification", "preference", "preference, reference scored before"
REWARDED, DISTILLED, TOP_K = "rewarded completions", "distillation", 5
DECISION = "decision"
REMAT = ("none", "dots", "block", "offload")
HELD = tempfile.TemporaryDirectory()  # models, until the process ends


class Case(NamedTuple):
    """A training on a mesh; the values are names defined above."""

    mesh: str
    storage: str = "float32"
    adapter: str = "none"
    optimizer: str = "adamw"
    objective: str = "cross_entropy"
    remat: str = "block"
    model: str = "dense"


class Trained(NamedTuple):
    """Losses and gradient norms, the initial values, and the trained parameters."""

    losses: np.ndarray
    norms: np.ndarray
    start: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


def assert_equals_one_device(case: Case, steps: int = STEPS, whole: bool = False) -> np.ndarray:
    """Assert that a training on eight devices equals the training on one, and return its losses.

    A `whole` model has two stacks, and adapters on every linear layer. Rows form several micro-batches if possible.
    """
    expected = one_device(case, steps, whole)
    mesh = MESHES[case.mesh]
    found = train(case, mesh, 8, steps, whole, micro_batches(mesh))
    bound = LOW_PRECISION if "precision" in STORAGE.get(case.storage, {}) else OPTIMIZERS[case.optimizer]
    if case.storage in SERVED:  # as 8-bit moments
        bound = OPTIMIZERS["adamw_8bit"]
    assert_equal(found, expected, bound)
    return found.losses


def micro_batches(mesh: MeshOptions) -> int:
    """Micro-batches of a step: a few, or fewer if a device would have less than a row."""
    return min(4 if mesh.stage > 1 else 2, ROWS // (mesh.data * mesh.fsdp * mesh.expert))


def assert_equal(found: Trained, expected: Trained, bound: float = 1e-6) -> None:
    """Compare losses within a relative bound, codes and scales exactly, and parameters unless the optimizer jumps."""
    assert found.start.keys() == expected.start.keys()
    for name, value in expected.start.items():
        np.testing.assert_allclose(found.start[name], value, rtol=1e-6, err_msg=name)
    assert np.abs(found.losses / expected.losses - 1).max() <= bound
    assert np.abs(found.norms / expected.norms - 1)[0] <= max(bound, NORM)
    for name, value in expected.parameters.items() if bound == 1e-6 else ():
        assert np.abs(found.parameters[name] - value).max() <= PARAMETERS * np.abs(value).max(), name


def one_device(case: Case, steps: int = STEPS, whole: bool = False) -> Trained:
    """The reference for training on any mesh and with any rematerialisation."""
    return _trained_once(case._replace(mesh="", remat="none"), steps, whole)


@functools.cache
def _trained_once(case: Case, steps: int, whole: bool) -> Trained:
    return train(case, MeshOptions(), 1, steps, whole)


def train(
    case: Case,
    mesh: MeshOptions,
    devices: int,
    steps: int = STEPS,
    whole: bool = False,
    accumulate: int = 1,
    parallel: ParallelOptions = ParallelOptions(),
    offloaded: tuple[str, ...] = (),
) -> Trained:
    """Run the program of a training on the given number of devices."""
    made = make_mesh(mesh, jax.devices()[:devices], parallel)
    rows = ROWS // accumulate // data_shards(made)
    config = config_of(
        case, mesh, TrainOptions(max_steps=steps, micro_batch_size=rows, grad_accum_steps=accumulate), whole
    )
    memory = dataclasses.replace(config.memory, **{f"offload_{part}": True for part in offloaded})
    config = dataclasses.replace(config, parallel=parallel, memory=memory)
    program = assemble(read_base(config), config, made)
    compiled = compile_step(program, config)
    name_stacks = re.findall(r'op_name="(.*?)"', compiled.as_text())
    assert scopes_of(case, made, accumulate) <= {*re.findall(r"\w+", " ".join(name_stacks))}
    frozen, start = frozen_parameters(program.model, config), initial_parameters(program.model, config)
    rates = learning_rates(config.optim, steps)
    before = fetch_arrays({**frozen, **start})
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    state, losses, norms = jax.jit(program.start, out_shardings=shardings)(start), [], []
    for number in range(steps):
        rows = fields(steps, made.shape["context"])
        if config.preference.loss is not None:  # a row is a pair
            rows = rows | {"loss_weight": (~rows["last"]).astype(np.float32)}
        batch = {
            name: jax.device_put(rows[name][number].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.batch.items()
        }
        state, metrics = compiled(state, frozen, batch, rates[number])
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    return Trained(np.array(losses), np.array(norms), before, fetch_arrays(state.trained))


def scopes_of(case: Case, made: jax.sharding.Mesh, accumulate: int) -> set[str]:
    """Return the scopes (jax.named_scope) of the parts of a case's step, which profilers show."""
    scopes = {"layers", "attention", "rope", "mlp", "norm", "embedding", "head", "loss", "optimizer"}
    scopes |= {"moe": {"experts", "router"}, "hybrid": {"delta_net"}}.get(case.model, set())
    scopes |= {"adapters"} if case.adapter == "lora" else set()
    scopes |= {"dequantization"} if "quant" in STORAGE.get(case.storage, {}) else set()
    scopes |= {"operands"} if "operands" in case.storage and case.adapter == "none" else set()
    scopes |= {"gradient_accumulation"} if accumulate > 1 else set()
    return scopes | ({"collectives"} if made.shape["fsdp"] > 1 else set())


def fetch_arrays(values: Any) -> dict[str, np.ndarray]:
    """Fetch arrays by path; a quantized parameter has several."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(values)}


def config_of(case: Case, mesh: MeshOptions, length: TrainOptions, whole: bool) -> Config:
    """Return the config of a case.

    Compile time goes mostly to linear layers that are trained, adapted or quantized. Unless the model is whole, only
    two are: one with outputs and one with inputs sharded over the tensor axis.
    """
    adapters, named = case.adapter == "lora", MODELS[case.model]
    targets = "all-linear" if whole else named.adapted
    others = None if whole else named.others
    served = SERVED.get(case.storage, {})
    stored = {} if served else STORAGE[case.storage]
    sections = {name: dataclasses.replace(section, exclude=others) for name, section in stored.items()} | served
    # AdamW would move an element with a gradient near 0 in a direction that depends on the gradient's rounding.
    rate = RATES.get(case.optimizer, RATE)
    head: Any = {"head": "classification", "num_labels": 3} if case.objective == CLASSIFICATION else {}
    epsilon = {"epsilon": 1e-4} if case.optimizer in ("adamw", "schedule_free") else {}
    return Config(
        model=ModelOptions(path=str(folder(case.model, not adapters, whole)), dtype="float32", **head),
        data=DataOptions(datasets=(Dataset(path="made here"),), seq_len=SEQUENCE),
        train=dataclasses.replace(
            length,
            z_loss=OBJECTIVES.get(case.objective, 0.0),
            label_smoothing=0.1 if case.objective == "z-loss" else 0.0,
            freeze=None if adapters else others,
        ),
        optim=OptimOptions(case.optimizer, learning_rate=rate, schedule="constant", weight_decay=0.1, **epsilon),
        lora=LoraOptions(enabled=True, rank=16, dropout=0.0 if served else 0.2, target_modules=targets)
        if adapters
        else LoraOptions(),
        mesh=mesh,
        memory=MemoryOptions(case.remat),
        preference=PreferenceOptions(
            "sigmoid" if case.objective in (PREFERENCE, SCORED) else None,
            precompute_reference=case.objective == SCORED,
        ),
        # Tokens in no order, on both sides of a vocabulary that is sharded over two devices.
        decision=DecisionOptions("rps", tuple(np.random.default_rng(0).permutation(256)[:HEAD_ROWS].tolist()))
        if case.objective == DECISION
        else DecisionOptions(),
        distill=DistillOptions("made here", "js", top_k=TOP_K, weight=0.5)
        if case.objective == DISTILLED
        else DistillOptions(),
        rollout=RolloutOptions(("rewards.py:made_here",) if case.objective == REWARDED else ()),
        grpo=GrpoOptions("grpo", "sequence", clip_low=0.02, beta=0.1, iterations=2)
        if case.objective == REWARDED
        else GrpoOptions(),
        **{"precision": PrecisionOptions("fp32"), **sections},
    )


def is_refused(case: Case) -> bool:
    """Whether the product refuses such a config on every mesh."""
    return bool(check(config_of(case, MESHES[case.mesh], TrainOptions(max_steps=STEPS), False)))


@functools.cache
def folder(model: str, tied: bool, whole: bool) -> Path:
    """A model of two layers, equal and windowed without adapters; a whole model has three, the last in its own stack.

    A hybrid model has two pairs of a delta net and attention.
    """
    kinds = ["full_attention", "sliding_attention"]
    layers = [kinds[0], kinds[0], kinds[1]] if whole else [kinds[tied]] * 2
    if model == "hybrid":
        layers = ["linear_attention", "full_attention"] * 2
    named, path = MODELS[model], Path(HELD.name) / f"{model} tied={tied} whole={whole}"
    path.mkdir()
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": layers} if model == "dense" else {}
    layers_of = {"layer_types": layers} if model == "hybrid" else windows
    sizes = {**SIZES, **named.sizes, "num_hidden_layers": len(layers), **layers_of}
    return write_model_folder(path, named.kind, tie_word_embeddings=tied, **sizes)


@functools.cache
def fields(steps: int, devices: int = 1) -> dict[str, np.ndarray]:
    """Ragged packed rows, each with a different number of targets; the same in every step, so that they can be learned.

    They are distributed over the given number of devices.
    """
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(0, 256, (1, ROWS, SEQUENCE)).astype(np.int32), steps, axis=0)
    length = np.repeat(rng.integers(2, SEQUENCE, (1, ROWS, 1)), steps, axis=0)
    index = np.arange(SEQUENCE)
    start = np.where(index < length, 0, length)
    columns = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=2),
        "positions": (index - start).astype(np.int32),
        "segment_ids": (1 + (index >= length)).astype(np.int32),
        "key_start": start.astype(np.int32),
        "loss_weight": (index < length - 1).astype(np.float32),
        "last": (index == length - 1) | (index == SEQUENCE - 1),
        "reference_log_prob": np.where(index < length, -60.0, -70.0).astype(np.float32) + tokens[..., :1] % 7,
        "advantage": np.where(index < length, 1.0, -0.5).astype(np.float32) + tokens[..., :1] % 3,
        "old_log_prob": np.full(tokens.shape, -5.5, np.float32) + tokens % 3 / 50,
        "label": ((tokens[..., :1] + (index >= length)) % 3).astype(np.float32),
        "further_targets": np.roll(tokens, -2, axis=2)[..., None],  # of one module
        "further_loss_weight": (index < length - 2).astype(np.float32)[..., None],
        "option_shares": np.where(np.arange(HEAD_ROWS) == 2 + tokens[..., :1, None] % 4, 1.0, 0.0).astype(np.float32)
        + np.where((np.arange(HEAD_ROWS) < 2) | (np.arange(HEAD_ROWS) > 5), NOT_AN_OPTION, 0.0).astype(np.float32)
        + np.zeros((*tokens.shape, 1), np.float32),
        "teacher_tokens": (tokens[..., None] + 41 * np.arange(TOP_K)) % 256,  # anywhere in the vocabulary
        "teacher_log_probs": np.log(rng.dirichlet(np.ones(TOP_K + 1), tokens.shape)).astype(np.float32),
    }
    number = {"row": np.arange(steps * ROWS, dtype=np.int32).reshape(steps, ROWS)}
    if devices == 1:
        return columns | number
    each = [deal_row({name: x[at] for name, x in columns.items()}, devices) for at in np.ndindex(steps, ROWS)]
    stacked = {name: np.stack([row[name] for row in each]) for name in each[0]}
    return {name: x.reshape(*tokens.shape, *x.shape[2:]) for name, x in stacked.items()} | number
