"""The Mosaic GPU attention kernels compiled for a Hopper GPU: wgmma, registers, shared memory, shards of a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.flash_attention.differentiate import attention
from pallas_kernels.flash_attention.mosaic import mosaic_backward, mosaic_forward
from pallas_kernels.flash_attention.variant import Variant
from pallas_kernels.gpus import GPUS

COVERS = ("pallas_kernels",)

OP = attention(mosaic_forward.forward, mosaic_backward.backward)


def variant(head_dim: int, soft_cap: float | None = None) -> Variant:
    return Variant(head_dim**-0.5, soft_cap, causal=True, window=None, query_offset=0)


def gradients(q, k, v, first, end, sinks, variant):
    """Through both outputs, so that all three kernels are used."""

    def loss(q, k, v):
        out, lse = OP(q, k, v, first, end, sinks, variant)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("head_dim", "soft_cap"), [(64, None), (64, 30.0), (128, None)])
def test_wgmma_without_spills(head_dim, soft_cap, dtype):
    """Packed rows, eight query heads to two key heads, a length that is not a multiple of the blocks."""
    q, k = (jax.ShapeDtypeStruct((2, 1000, heads, head_dim), dtype) for heads in (8, 2))
    bound, sinks = jax.ShapeDtypeStruct((2, 1000), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    function = partial(gradients, variant=variant(head_dim, soft_cap))
    kernels = aot.compile_for("h100", function, q, k, k, bound, bound, sinks).kernels
    assert {kernel.name for kernel in kernels} == {f"flash_attention_{name}" for name in ("forward", "dq", "dkdv")}
    for kernel in kernels:
        assert kernel.wgmma > 0 and kernel.mma_sync == 0, kernel
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_memory <= GPUS["h100"].shared_memory_per_block, kernel
        assert kernel.occupancy > 0, kernel


def test_shards_of_an_explicit_mesh():
    """As in a model: inside a shard_map over rows and heads."""
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    heads, rows = P("fsdp", None, "tensor"), P("fsdp")

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    @partial(jax.shard_map, in_specs=(heads, heads, heads, rows, rows), out_specs=heads)
    def attend(q, k, v, first, end):
        first, end = (jax.lax.pcast(bound, ("tensor",), to="varying") for bound in (first, end))
        return OP(q, k, v, first, end, None, variant(128))[0]

    def loss(*inputs):
        return jnp.sum(attend(*inputs).astype(jnp.float32) ** 2)

    q, k = (array((4, 512, heads_, 128), jnp.bfloat16, heads) for heads_ in (8, 4))
    bound = array((4, 512), jnp.int32, rows)
    compiled = aot.compile_for("h100", jax.grad(loss, (0, 1, 2)), q, k, k, bound, bound, mesh=mesh)
    # Two rows and four of the eight query heads (two of the four key heads) on each device.
    grids = {kernel.name.removeprefix("flash_attention_"): kernel.grid for kernel in compiled.kernels}
    assert grids == {"forward": (4, 2, 4), "dq": (4, 2, 4), "dkdv": (2, 2, 4)}
    assert not compiled.collectives
