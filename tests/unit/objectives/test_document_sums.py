"""Sums over the documents of packed rows, whichever devices have the rows and their positions."""

import jax
import numpy as np
import pytest

from jaxtune.objectives.document_sums import sum_documents, sum_own_document
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

LENGTHS = [[3, 1, 4], [8], [], [1, 1, 1, 5]]
IDS = np.array([np.pad(np.repeat(np.arange(1, len(row) + 1), row), (0, 16 - sum(row))) for row in LENGTHS], np.int32)
VALUES = np.random.default_rng(0).standard_normal(IDS.shape).astype(np.float32)
SUMS = np.array([[VALUES[row][ids == number].sum() for number in range(1, 7)] for row, ids in enumerate(IDS)])


@pytest.mark.parametrize("mesh", ["one device", "data=2 context=2 sequence=2"])
def test_sums_are_those_of_each_document(mesh):
    options = MeshOptions() if mesh == "one device" else MeshOptions(data=2, fsdp=1, context=2, sequence=2)
    made = make_mesh(options, jax.devices()[: 1 if mesh == "one device" else 8])
    with jax.set_mesh(made):
        values, ids = (jax.device_put(x, jax.NamedSharding(made, by_token())) for x in (VALUES, IDS))
        np.testing.assert_allclose(jax.jit(sum_documents, static_argnums=2)(values, ids, 6), SUMS, atol=1e-6)
        own = np.where(IDS > 0, np.take_along_axis(SUMS, np.maximum(IDS - 1, 0), 1), 0)
        np.testing.assert_allclose(jax.jit(sum_own_document)(values, ids), own, atol=1e-6)
        micro_batches = (jax.device_put(x[None], jax.NamedSharding(made, P(None, *by_token()))) for x in (VALUES, IDS))
        np.testing.assert_allclose(jax.jit(sum_own_document)(*micro_batches), own[None], atol=1e-6)
