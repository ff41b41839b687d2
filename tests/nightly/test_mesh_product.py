"""Twenty steps of a model of two stacks on meshes; tests/mesh runs three on every mesh, storage and optimizer."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch
from mesh.harness import MESHES, OPTIMIZERS, SIZES, STORAGE, Case, assert_equals_one_device, fetch_arrays
from mesh.products import MESHES as PRODUCT_MESHES
from mesh.products import NUMBERS, SHAPES, assert_eight_devices_equal_one
from runs import write_model_folder

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.models.parameters import randomize
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import read_base
from jaxtune.weights.values import frozen_parameters

# If these paths change, CI runs this file; otherwise it runs only at night.
TAKES_LONG = True
COVERS = (
    "jaxtune/parallel",
    "jaxtune/models",
    "jaxtune/optim",
    "jaxtune/precision",
    "jaxtune/quant",
    "jaxtune/training/assembly.py",
    "jaxtune/training/pipelined_step.py",
    "jaxtune/training/step.py",
    "pallas_kernels",
)
STEPS = 20

# The mesh with all axes, and one whose tensor axis divides what fsdp divides.
ALL_AXES, TENSOR = "data=2 fsdp=2 tensor=2", "fsdp=4 tensor=2"
QUANTIZED = [storage for storage, sections in STORAGE.items() if "quant" in sections]
CASES = [Case(mesh) for mesh in MESHES]
CASES += [Case(mesh, optimizer=name) for name in OPTIMIZERS if name != "adamw" for mesh in (ALL_AXES, TENSOR)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.optimizer}, {case.mesh}")
def test_every_mesh_and_every_optimizer_equal_one_device(case):
    losses = assert_equals_one_device(case, STEPS, whole=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("storage", STORAGE)
def test_adapters_on_every_storage_equal_one_device(storage):
    assert_equals_one_device(Case(ALL_AXES, storage, "lora"), STEPS, whole=True)


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """Write a model whose matrices divide into whole blocks on every axis."""
    return write_model_folder(tmp_path_factory.mktemp("square"), **{**SIZES, "intermediate_size": 256})


def gradients(path: Path, storage: str, mesh: MeshOptions, devices: int):
    """Return (quantized base, loss, adapter gradients), on the host."""
    made = make_mesh(mesh, jax.devices()[:devices])
    config = Config(
        model=ModelOptions(path=str(path), dtype="float32"),
        data=DataOptions(seq_len=32),
        lora=LoraOptions(enabled=True, rank=4),
        memory=MemoryOptions("block"),
        precision=PrecisionOptions("fp32"),
        **STORAGE[storage],
    )
    program = assemble(read_base(config), config, made)
    frozen = frozen_parameters(program.model, config)
    trained = randomize(program.model.trained, seed=1)
    trained = {name: value + 0.01 for name, value in trained.items()}  # so that B is not zero
    rows = np.random.default_rng(0).integers(0, 256, (4, 32))
    batch = jax.tree.map(lambda x: x[None], make_batch(rows, made, [20, 12]))
    with jax.default_matmul_precision("highest"):
        summed = jax.jit(program.gradients)(trained, frozen, batch, jnp.int32(0))
    return fetch_arrays(frozen), summed.sums.loss.item(), fetch_arrays(summed.gradients)


@pytest.mark.parametrize("storage", QUANTIZED)
def test_gradients_of_adapters_on_a_quantized_base_equal_one_device(square, storage):
    codes, loss, expected = gradients(square, storage, MeshOptions(fsdp=1), 1)
    sharded_codes, sharded_loss, found = gradients(square, storage, MESHES[ALL_AXES], 8)
    assert abs(sharded_loss - loss) <= 1e-6 * abs(loss)
    for name in codes:
        np.testing.assert_allclose(sharded_codes[name], codes[name], rtol=1e-6, err_msg=name)
    for name, gradient in found.items():
        # On one device, adapters that differ in their last bit have gradients that differ by up to 1.7e-5.
        assert np.abs(gradient - expected[name]).max() <= 3e-5 * np.abs(expected[name]).max(), name


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("mesh", PRODUCT_MESHES)
@pytest.mark.parametrize("axes", SHAPES, ids=["out", "in"])
def test_products_in_low_precision_equal_one_device(mesh, numbers, axes):
    assert_eight_devices_equal_one(mesh, numbers, axes)
