"""A linear layer in FP8 or NVFP4 on eight devices equals the one on a single device: scales, product and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh.products import LAYERS, MESHES, NUMBERS, SHAPES, assert_eight_devices_equal_one, case, compute_products

from jaxtune.models.parameters import Parameter
from jaxtune.models.places import Place
from jaxtune.models.structure.layer_spec import Treatment
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.weights.mesh_division import undivided_blocks


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(("mesh", "axes"), [("fsdp tensor", ("mlp", "embed")), ("sequence", ("embed", "mlp"))])
def test_eight_devices_equal_one(mesh, numbers, axes):
    assert_eight_devices_equal_one(mesh, numbers, axes)


@pytest.mark.parametrize("axes", SHAPES, ids=["out", "in"])
def test_numbers_that_fp8_holds_are_multiplied_exactly_on_any_mesh(axes):
    w, x, dy = case(axes, dyadic=True)
    for mesh, devices in ((MeshOptions(fsdp=1), 1), (MESHES["fsdp tensor"], 8), (MESHES["sequence"], 8)):
        _, y, dx, dw, _ = compute_products(NUMBERS["fp8"], axes, mesh, devices, dyadic=True)
        np.testing.assert_array_equal(y, np.einsum("bsi,loi->lbso", x, w))
        np.testing.assert_array_equal(dx, np.einsum("bso,loi->bsi", dy, w))
        np.testing.assert_array_equal(dw, np.broadcast_to(np.einsum("bso,bsi->oi", dy, x), w.shape))


def test_a_shard_holds_its_part_of_the_codes():
    make_mesh(MESHES["fsdp tensor"], jax.devices())
    for numbers in NUMBERS.values():
        operands = numbers.abstract((LAYERS, 96, 64), jnp.float32, (None, "mlp", "embed"))
        for operand in (operands.forward, operands.backward):
            if operand is not None:
                size = operand.codes.size
                assert np.prod(operand.codes.sharding.shard_shape(operand.codes.shape)) == size // 4


def test_a_mesh_that_splits_a_block_of_16_is_refused():
    """Even if it is the only block, because values would be rotated, or scaled, across rows."""

    def parameter(rows, columns):
        zeros = jax.nn.initializers.zeros
        axes = ("layers", "kv_heads", "embed")
        places = Place("layers.0.k_proj.weight"), Place("layers.1.k_proj.weight")
        stack = "linear", "attention.k.weight", (0, 1), (2,), places, Treatment()
        return Parameter((2, rows, columns), axes, zeros, *stack)

    mesh = make_mesh(MeshOptions(fsdp=4, tensor=2))
    for numbers in NUMBERS.values():
        assert undivided_blocks({"k": parameter(32, 64)}, {"k": numbers}, mesh, "another mesh") == []
        (complaint,) = undivided_blocks({"k": parameter(16, 64)}, {"k": numbers}, mesh, "another mesh")
        assert complaint.startswith("mesh.tensor=2 does not divide the 16 features of kv_heads in blocks of 16")
