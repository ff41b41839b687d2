"""Mamba-2 compiled for GPUs: every kernel uses the matrix unit, nothing is spilled, and a layer has few kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.test_kernels import ARCHITECTURES, MATRIX_UNIT
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, report
from pallas_kernels.gpus import GPUS
from pallas_kernels.mamba2_scan import RESIDUALS, mamba2_scan

COVERS = ("pallas_kernels", ":!pallas_kernels/flash_attention", "tests/aot/test_kernels.py")
SHAPES = ((2, 100, 4, 64), (2, 100, 4), (4,), (2, 100, 2, 128), (2, 100, 2, 128), (4,), (2, 100))
DTYPES = (jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bool_)


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_every_kernel_uses_the_matrix_unit(gpu):
    instruction = MATRIX_UNIT[GPUS[gpu].capability[0]]
    for case in report.cases_for(gpu):
        if case.op == "mamba2_scan":
            kernels = report.compiled(case, gpu).kernels
            names = {kernel.name.removeprefix("mamba2_").partition("__")[0] for kernel in kernels}
            # Gradients need the states, but not the outputs.
            if case.direction == "forward":
                assert names == {"states", "outputs"}
            else:
                assert names == {"states", "d_states", "readers", "writers"}
            for kernel in kernels:
                assert getattr(kernel, instruction) > 0 and kernel.spill_bytes == 0, kernel


def test_inside_a_shard_map():
    """Batch and heads are sharded, which the interpreter cannot run: only the shard's kernels, and no collectives.

    Gradients of rates and skips are summed over the batch.
    """
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    tokens, heads, of_head, rows = P("data", None, "tensor"), P("data", "tensor"), P("tensor"), P("data")
    specs = (tokens, tokens, of_head, tokens, tokens, of_head, rows)
    op = jax.shard_map(mamba2_scan, in_specs=specs, out_specs=(tokens, heads))

    def loss(*arrays):
        out, last = op(*arrays)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(last**2)

    arrays = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(SHAPES, DTYPES, specs)
    )
    compiled = aot.compile_for("h100", jax.grad(loss, argnums=range(6)), *arrays, mesh=mesh)
    grids = {kernel.name: kernel.grid for kernel in compiled.kernels}
    assert grids["mamba2_writers"] == (2, 1, 1) and grids["mamba2_d_states"] == (2, 2, 1)
    assert set(compiled.collectives) == {"all-reduce"}


@pytest.mark.parametrize(("saved", "runs"), [((RESIDUALS,), 1), ((), 2)])
def test_saved_residuals_spare_the_second_forward_pass(saved, runs):
    """As in a model: in a loop over layers, with rematerialisation."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
    def layer(x, write, step, rate, skip, starts):
        return x + mamba2_scan(x, step, rate, write, write, skip, starts)[0]

    def loss(x, writes, *arrays):
        x, _ = jax.lax.scan(lambda x, write: (layer(x, write, *arrays), None), x, writes)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    x, step, rate, write, _, skip, starts = map(jax.ShapeDtypeStruct, SHAPES, DTYPES)
    writes = jax.ShapeDtypeStruct((3, *write.shape), write.dtype)
    compiled = aot.compile_for("h100", jax.grad(loss, (0, 1)), x, writes, step, rate, skip, starts)
    assert compiled.hlo.count('name = "mamba2_d_states"') == 1
    assert compiled.hlo.count('name = "mamba2_states"') == runs
