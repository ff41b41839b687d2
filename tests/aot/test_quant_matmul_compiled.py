"""Quantized weights compiled for GPUs: products by cuBLAS, and shards of a mesh."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.quant_matmul import quant_matmul

COVERS = ("pallas_kernels", ":!pallas_kernels/flash_attention")

ROWS, COLUMNS = 4096, 12288


def weight(sharding=None):
    codes = jax.ShapeDtypeStruct((ROWS, COLUMNS // 2), jnp.uint8, sharding=sharding)
    return codes, jax.ShapeDtypeStruct((ROWS, COLUMNS // 64), jnp.float32, sharding=sharding)


def test_many_rows_take_cublas_and_one_weight_at_a_time():
    """cuBLAS reads the kernel's output in either orientation, forward and for dx: nothing is transposed or unpacked."""
    x = jax.ShapeDtypeStruct((2048, COLUMNS), jnp.bfloat16)
    d_out = jax.ShapeDtypeStruct((2048, ROWS), jnp.bfloat16)

    def both(x, d_out, codes, scales):
        out, pull = jax.vjp(lambda x: quant_matmul(x, codes, scales, elements="nf4"), x)
        return out, pull(d_out)[0]

    options = {
        "xla_gpu_enable_triton_gemm": False
    }  # jaxtune's options; otherwise XLA may use its own kernel for a product
    compiled = aot.compile_for("h100", both, x, d_out, *weight(), compiler_options=options)
    assert [kernel.name.partition("__")[0] for kernel in compiled.kernels] == ["dequantize"] * 2
    assert compiled.custom_calls["__cublas$lt$matmul"] == 2
    assert not re.search(r" (copy|transpose)\(", compiled.hlo)
    assert compiled.memory.temporaries < 1.5 * 2 * ROWS * COLUMNS


# Each version of jax has its own check of the mesh axes over which values vary.
@pytest.mark.every_jax
def test_shards_of_an_explicit_mesh():
    """Inside a shard_map, rows of x over one axis and rows of the weight over another."""
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    of_weight = P("tensor")
    multiply = jax.shard_map(
        partial(quant_matmul, elements="nf4"),
        in_specs=(P("data"), of_weight, of_weight),
        out_specs=P("data", "tensor"),
    )

    def loss(x, codes, scales):
        return jnp.sum(multiply(x, codes, scales).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((32, COLUMNS), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    compiled = aot.compile_for("h100", jax.grad(loss), x, *weight(NamedSharding(mesh, of_weight)), mesh=mesh)
    assert {kernel.name for kernel in compiled.kernels} == {"quant_matmul", "quant_matmul_transposed"}
    # dx is summed over the shards of the weight; nothing else is communicated.
    assert {kind: count for kind, (count, _) in compiled.collectives.items()} == {"all-reduce": 1}
