"""Attention of heads of 512 compiled for GPUs: nothing spills, no warp repeats another's work."""

import jax
import jax.numpy as jnp
import pytest
from aot.test_kernels import ARCHITECTURES, MATRIX_UNIT

from pallas_kernels import aot
from pallas_kernels.flash_attention import MaskSpec, flash_attention
from pallas_kernels.flash_attention.triton_wide import tiles_for
from pallas_kernels.gpus import GPUS, Device

COVERS = (
    ":(glob)pallas_kernels/*.py",
    "pallas_kernels/flash_attention",
    ":!pallas_kernels/flash_attention/packages",
    ":!pallas_kernels/flash_attention/mosaic",
    "tests/aot/test_kernels.py",
)


@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_the_kernels_of_a_step(gpu):
    """Gemma 4's global layers: packed rows, key heads shared by several query heads."""
    q, k = (jax.ShapeDtypeStruct((2, 2048, heads, 512), jnp.bfloat16) for heads in (8, 2))

    def loss(q, k, v, key_start):
        return jnp.sum(
            flash_attention(q, k, v, MaskSpec(key_start=key_start), backend="triton").astype(jnp.float32) ** 2
        )

    key_start = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    kernels = aot.compile_for(gpu, jax.grad(loss, (0, 1, 2)), q, k, k, key_start).kernels
    assert {kernel.name for kernel in kernels} == {f"flash_attention_wide_{name}" for name in ("forward", "dq", "dkdv")}
    tiles = tiles_for(Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability))
    for kernel in kernels:
        name = kernel.name.removeprefix("flash_attention_wide_")
        tile = getattr(tiles, name)
        assert getattr(kernel, MATRIX_UNIT[GPUS[gpu].capability[0]]) > 0, kernel
        assert kernel.spill_bytes == 0 and kernel.occupancy > 0, kernel
        executed = kernel.exponentials * kernel.threads / (tile.block_q * tile.block_k)
        # The forward kernel has one more for each row, in every thread that holds a part of the row.
        assert 1 <= executed <= (1.5 if name == "forward" else 1), (tile, kernel)
