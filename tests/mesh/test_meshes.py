"""The same training on every mesh: losses and parameters equal those on one device.

`rows.csv` is a pairwise covering array: a fault that needs two levels together, such as NF4 and the tensor axis, shows
in some row. tests/nightly trains a larger model for longer.
"""

import csv
import itertools
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import pytest
from mesh.harness import (
    ADAPTERS,
    CLASSIFICATION,
    DECISION,
    DISTILLED,
    MESHES,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    PREFERENCE,
    REMAT,
    REWARDED,
    ROWS,
    SCORED,
    STORAGE,
    Case,
    assert_equal,
    assert_equals_one_device,
    config_of,
    fields,
    is_refused,
    one_device,
    train,
)

from jaxtune.config import schema
from jaxtune.errors import UserError
from jaxtune.models.layers import mlp
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.training.assembly import assemble, forward_of, task_of
from jaxtune.training.step import make_eval_step
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import frozen_parameters, initial_parameters

with (Path(__file__).parent / "rows.csv").open(newline="") as file:
    CASES = [Case(**row) for row in csv.DictReader(file)]

LEVELS = {
    "axis": ("data", "fsdp", "stage", "context", "sequence", "tensor"),  # a mesh has every level that it spreads over
    # NVFP4 products are emulated here, and XLA needs a minute to compile such a step: nightly trains with them, and
    # test_low_precision_meshes tests the products themselves.
    "storage": tuple(STORAGE.keys() - {"nvfp4 operands"}),
    "adapter": ADAPTERS,
    "optimizer": tuple(OPTIMIZERS),
    "objective": tuple(OBJECTIVES),
    "remat": REMAT,
    "model": tuple(MODELS),
}
# Factors that never interact in the program: the optimizer sees gradients, whichever layers made them, of
# parameters that are not quantized; the decoder names the arrays saved for the backward pass, whatever its weights are;
# and the objective sees hidden states and the head, which is stored unchanged.
APART = [
    {"optimizer", "storage"},
    {"optimizer", "objective"},
    {"optimizer", "remat"},
    {"storage", "remat"},
    {"storage", "objective"},
    {"model", "optimizer"},
    {"model", "objective"},
]

Pair = frozenset[tuple[str, str]]


def pairs_of(case: Case) -> set[Pair]:
    """Pairs of levels that a row covers."""
    levels = [("axis", axis) for axis in LEVELS["axis"] if getattr(MESHES[case.mesh], axis) != 1]
    levels += list(case._asdict().items())[1:]
    return {frozenset(pair) for pair in itertools.combinations(levels, 2)}


def is_wanted(pair: Pair) -> bool:
    """Whether the pair's factors interact and the product does not refuse it."""
    factors = {factor for factor, _ in pair}
    if len(factors) == 1 or factors in APART:
        return False
    levels = {factor: level for factor, level in pair if factor != "axis"}
    return not is_refused(Case("fsdp=8", adapter="lora")._replace(**levels))


def test_a_classifier_equals_one_device():
    """Its head is trained in full together with adapters."""
    assert_equals_one_device(Case("data=2 fsdp=2 tensor=2", adapter="lora", objective=CLASSIFICATION))


@pytest.mark.parametrize(
    ("mesh", "adapter", "objective"),
    [
        ("data=2 fsdp=2 tensor=2", "none", PREFERENCE),
        ("data=2 context=2 sequence=2", "lora", PREFERENCE),
        ("data=2 fsdp=2 stage=2", "lora", SCORED),
    ],
)
def test_preferences_equal_one_device(mesh, adapter, objective):
    """A row is a pair, and devices may share its positions. The reference is a copy, no adapters, or a column."""
    assert_equals_one_device(Case(mesh, adapter=adapter, objective=objective))


@pytest.mark.parametrize(
    ("mesh", "adapter"),
    [
        ("data=2 fsdp=2 tensor=2", "none"),
        ("data=2 context=2 sequence=2", "lora"),
        ("data=2 fsdp=2 stage=2", "none"),
    ],
)
def test_distillation_equals_one_device(mesh, adapter):
    """The teacher's predictions are columns of several values a position; the vocabulary may be sharded."""
    assert_equals_one_device(Case(mesh, adapter=adapter, objective=DISTILLED))


@pytest.mark.parametrize(("mesh", "adapter"), [("data=2 fsdp=2 tensor=2", "none"), ("data=2 fsdp=2 stage=2", "lora")])
def test_decisions_equal_one_device(mesh, adapter):
    """Options are scored by rows of a head whose vocabulary may be sharded, also at the end of a pipeline."""
    assert_equals_one_device(Case(mesh, adapter=adapter, objective=DECISION))


@pytest.mark.parametrize(
    ("mesh", "adapter"), [("data=2 fsdp=2 tensor=2", "lora"), ("data=2 context=2 sequence=2", "none")]
)
def test_rewarded_completions_equal_one_device(mesh, adapter):
    """Sequence-level ratios are over a whole row. The reference is the model without adapters, or a copy."""
    assert_equals_one_device(Case(mesh, adapter=adapter, objective=REWARDED))


def test_tiles_of_positions_that_devices_share_equal_one_device(monkeypatch):
    """Each device has 4 rows of 12 positions here: with 16 tokens at a time, three tiles of 4 positions."""
    monkeypatch.setattr(mlp, "TILE", 16)
    assert_equals_one_device(Case("fsdp=2 sequence=2 tensor=2", remat="offload"))


# On each version of jax: the row that XLA of jax 0.10 would abort on.
EVERY_JAX = {case: [pytest.mark.every_jax] for case in CASES if "stage" in case.mesh and case.optimizer == "normuon"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=", ".join(case), marks=EVERY_JAX.get(case, [])) for case in CASES]
)
def test_equals_one_device(case):
    if is_aborted_by_xla(case):
        with pytest.raises(UserError, match=r"XLA of jax .* aborts the process.*; use mesh.fsdp, another optimizer"):
            train(case, MESHES[case.mesh], 8)
        return
    assert_equals_one_device(case)


def is_aborted_by_xla(case: Case) -> bool:
    """Whether this jax's XLA fails a check in its partitioner on such a step, which the product refuses."""
    staged = MESHES[case.mesh].stage > 1
    return (
        jax.__version_info__ < (0, 11) and staged and case.model == "hybrid" and case.optimizer in ("muon", "normuon")
    )


def test_every_pair_of_levels_that_can_be_trained_is_covered_by_some_row():
    """A new level fails here until a row has it with each level of the other factors."""
    levels = [(factor, level) for factor, names in LEVELS.items() for level in names]
    wanted = {pair for pair in map(frozenset, itertools.combinations(levels, 2)) if is_wanted(pair)}
    covered = set().union(*map(pairs_of, CASES))
    assert not {tuple(sorted(pair)) for pair in wanted - covered}
    assert {case.mesh for case in CASES} == set(MESHES)
    assert not [case for case in CASES if is_refused(case)]


def test_a_quantized_base_without_an_adapter_is_the_only_pair_that_is_refused():
    refused = {
        (storage, adapter)
        for storage in STORAGE
        for adapter in ADAPTERS
        if is_refused(Case("data=8", storage, adapter))
    }
    assert refused == {(storage, "none") for storage, sections in STORAGE.items() if "quant" in sections}


def test_optimizers_and_rematerialisation_have_every_level_of_the_schema():
    assert set(OPTIMIZERS) == set(get_args(get_type_hints(schema.OptimOptions)["name"]))
    # A model without experts cannot recompute them; other parts of a block lie between "none" and "block".
    parts = {"experts", "ffn", "qkv", "attention+qkv"}
    assert {*REMAT, *parts, "auto"} == set(get_args(get_type_hints(schema.MemoryOptions)["remat"]))


def test_a_batch_accumulated_row_by_row_equals_it_at_once():
    case = Case("", "float32", "lora", remat="none")
    assert_equal(train(case, MeshOptions(), 1, accumulate=8), one_device(case))


def test_a_dimension_that_does_not_divide_is_told_with_sizes_that_would():
    mesh = MeshOptions(tensor=3)
    config = config_of(Case(""), mesh, schema.TrainOptions(), False)
    with pytest.raises(UserError) as told:
        declare_model(read_base(config), config, make_mesh(mesh, jax.devices()[:6]))
    assert str(told.value).splitlines() == [
        "the mesh does not divide the model or its rows:",
        "  mesh.tensor=3 does not divide heads=8; these would: [1, 2, 4]",
        "  mesh.tensor=3 does not divide kv_heads=4; these would: [1, 2, 4]",
        "  mesh.tensor=3 does not divide mlp=128; these would: [1, 2, 4]",
        "  mesh.tensor=3 does not divide vocabulary=512; these would: [1, 2, 4]",
    ]


def test_a_mesh_that_does_not_fit_says_so():
    with pytest.raises(UserError, match="span 3 devices and there are 8"):
        make_mesh(MeshOptions(data=3, fsdp=1), jax.devices())


def test_the_calibration_of_decisions_equals_one_device():
    """Its sums are arrays, over rows, positions and temperatures."""
    case = Case("", objective=DECISION)

    def summary(mesh: MeshOptions, devices: int) -> dict[str, float]:
        made = make_mesh(mesh, jax.devices()[:devices])
        length = schema.TrainOptions(max_steps=1, micro_batch_size=ROWS // data_shards(made))
        config = config_of(case, mesh, length, False)
        program = assemble(read_base(config), config, made)
        task = task_of(program.model, config)
        step = jax.jit(make_eval_step(forward_of(config, program.model), task))
        rows = fields(1, made.shape["context"])
        batch = {
            name: jax.device_put(rows[name][0].reshape(leaf.shape), leaf.sharding)
            for name, leaf in program.batch.items()
        }
        start = initial_parameters(program.model, config), frozen_parameters(program.model, config)
        return task.summarise(jax.device_get(step(*start, batch)).metrics)

    expected = summary(MeshOptions(), 1)
    found = summary(MESHES["data=2 context=2 sequence=2"], 8)
    assert found == pytest.approx(expected, rel=1e-5) and expected["ece"] > 0 and "temperature_score" in expected
