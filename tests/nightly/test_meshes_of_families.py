"""The tiny config of every family on four devices; tests/mesh has one of each kind of layer, on eight."""

import numpy as np
import pytest
from family_configs import FAMILIES
from mesh.test_family_meshes import one_device, spec_of, train

from jaxtune.parallel.options import MeshOptions

TAKES_LONG = True
COVERS = ("jaxtune/models", "jaxtune/parallel", "jaxtune/training/assembly.py", "jaxtune/training/step.py")


@pytest.mark.parametrize("family", FAMILIES)
def test_four_devices_equal_one(family):
    axes = MeshOptions(fsdp=1, expert=2, tensor=2) if spec_of(family).has_experts else MeshOptions(fsdp=2, tensor=2)
    expected, _ = one_device(family, False, 2)
    found, _ = train(family, False, axes, 4, parts=2)
    assert np.abs(found / expected - 1).max() <= 1e-6
