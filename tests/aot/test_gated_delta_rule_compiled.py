"""The gated delta rule compiled for GPUs: every product uses the matrix unit, and nothing is spilled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.test_kernels import ARCHITECTURES, MATRIX_UNIT
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, report
from pallas_kernels.gated_delta_rule import RESIDUALS, gated_delta_rule
from pallas_kernels.gpus import GPUS

COVERS = ("pallas_kernels", ":!pallas_kernels/flash_attention", "tests/aot/test_kernels.py")


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_every_kernel_uses_the_matrix_unit(gpu):
    instruction = MATRIX_UNIT[GPUS[gpu].capability[0]]
    for case in report.cases_for(gpu):
        if case.op == "gated_delta_rule" and case.inputs == "Qwen3-Next":
            kernels = report.compiled(case, gpu).kernels
            names = {kernel.name.removeprefix("gated_delta_").partition("__")[0] for kernel in kernels}
            backward = {"backward", "pairs", "heads"} if case.direction == "backward" else set()
            assert names == {"within", "forward"} | backward
            for kernel in kernels:
                assert getattr(kernel, instruction) > 0 and kernel.spill_bytes == 0, kernel


def test_inside_a_shard_map():
    """Batch and heads are sharded, which the interpreter cannot run: only the shard's kernels, and no communication."""
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    tokens, heads, rows = P("data", None, "tensor"), P("data", "tensor"), P("data")
    specs = (tokens,) * 5 + (rows,)
    op = jax.shard_map(gated_delta_rule, in_specs=specs, out_specs=(tokens, heads))

    def loss(*arrays):
        out, last = op(*arrays)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(last**2)

    shapes = ((2, 100, 2, 64),) * 2 + ((2, 100, 4, 64),) + ((2, 100, 4),) * 2 + ((2, 100),)
    dtypes = (jnp.bfloat16,) * 3 + (jnp.float32,) * 2 + (jnp.bool_,)
    arrays = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs)
    )
    compiled = aot.compile_for("h100", jax.grad(loss, argnums=range(5)), *arrays, mesh=mesh)
    grids = {kernel.name: kernel.grid for kernel in compiled.kernels}
    assert grids["gated_delta_heads"] == (2, 2, 1) and grids["gated_delta_backward"] == (2, 2, 1)
    assert not compiled.collectives


@pytest.mark.parametrize(("saved", "runs"), [((RESIDUALS,), 1), ((), 2)])
def test_saved_residuals_spare_the_second_forward_pass(saved, runs):
    """As in a model: in a loop over layers, with rematerialisation."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
    def layer(v, q, decay, starts):
        return v + gated_delta_rule(q, q, v, decay, -decay, starts)[0]

    def loss(v, q, decay, starts):
        v, _ = jax.lax.scan(lambda v, q: (layer(v, q, decay, starts), None), v, q)
        return jnp.sum(v.astype(jnp.float32) ** 2)

    shapes = ((1, 128, 2, 64), jnp.bfloat16), ((3, 1, 128, 1, 64), jnp.bfloat16), ((1, 128, 2), jnp.float32)
    arrays = (jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((1, 128), jnp.bool_)))
    compiled = aot.compile_for("h100", jax.grad(loss, (0, 1)), *arrays)
    assert compiled.hlo.count('name = "gated_delta_backward"') == 1
    assert compiled.hlo.count('name = "gated_delta_forward"') == runs
