"""FlashAttention-3's custom calls compiled for a Hopper GPU: shapes on a device, and the declared work and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, cost
from pallas_kernels.flash_attention import RESIDUALS, MaskSpec, flash_attention
from pallas_kernels.registry import CannotRun

COVERS = ("pallas_kernels",)

pytest.importorskip("flash_attn3_jax", reason="flash-attn3-jax is not installed: pip install 'jaxtune[hopper]'")
pytestmark = pytest.mark.every_jax


def calls_of(compiled: aot.Compiled) -> list[str]:
    """Return the lines of the kernels' calls by name: backward, forward."""
    lines = [line for line in compiled.hlo.splitlines() if 'custom_call_target="flash_mha' in line]
    return sorted(lines, key=lambda line: line.partition("custom_call_target=")[2])


def test_packed_rows_in_layers_over_a_mesh():
    """As in a model: in a loop over layers that saves the residuals, inside a shard_map over rows and heads."""
    devices = np.array(aot.devices("h100", per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    heads, rows = P("fsdp", None, "tensor"), P("fsdp")

    @partial(jax.shard_map, in_specs=(heads, heads, rows), out_specs=heads)
    def attend(q, k, key_start):
        return flash_attention(q, k, k, MaskSpec(window=300, key_start=key_start, documents=4), backend="fa3")

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(RESIDUALS))
    def layer(q, k, key_start):
        return q + attend(q, k, key_start)

    def loss(q, k, key_start):
        q, _ = jax.lax.scan(lambda q, k: (layer(q, k, key_start), None), q, k)
        return jnp.sum(q.astype(jnp.float32) ** 2)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    q, k = array((4, 500, 8, 128), jnp.bfloat16, heads), array((3, 4, 500, 4, 128), jnp.bfloat16, P(None, *heads))
    key_start = array((4, 500), jnp.int32, rows)
    compiled = aot.compile_for("h100", jax.grad(loss, (0, 1)), q, k, key_start, mesh=mesh)
    calls = {name: count for name, count in compiled.custom_calls.items() if "flash_mha" in name}
    assert calls == {"flash_mha_fwd": 1, "flash_mha_bwd": 1}
    assert not compiled.collectives
    # Two rows of 500 tokens, four of the eight query heads and two of the four key heads; 2 x (4 + 1) documents.
    backward, forward = calls_of(compiled)
    assert "= (bf16[1000,4,128]{2,1,0}, f32[4,1000]{1,0}," in forward and "s32[11]{0}" in forward
    assert "= (bf16[1000,4,128]{2,1,0}, bf16[1000,2,128]{2,1,0}, bf16[1000,2,128]{2,1,0}," in backward
    assert "window_size_left = 299" in forward and "window_size_left = 299" in backward
    pairs = 300 * 301 / 2 + 200 * 300
    assert cost.read_flops(forward) == pytest.approx(2 * 2 * 2 * 4 * 128 * pairs, rel=1e-5)
    assert cost.read_flops(backward) == pytest.approx(2 * 5 * 2 * 4 * 128 * pairs, rel=1e-5)
    sums = 4 * (1000 + 10 * 64) + 2 * 2 * (1000 + 10 * 128)
    assert cost.read_scratch(compiled.hlo) == 4 * 128 * sums < compiled.memory.temporaries


def test_dense_rows():
    q, k = (jax.ShapeDtypeStruct((2, 500, heads, 128), jnp.float16) for heads in (4, 4))

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, MaskSpec(), backend="fa3").astype(jnp.float32) ** 2)

    compiled = aot.compile_for("h100", jax.grad(loss, (0, 1, 2)), q, k, k)
    backward, forward = calls_of(compiled)
    assert "= (f16[2,500,4,128]{3,2,1,0}, f32[2,4,500]{2,1,0}," in forward and "is_causal = true" in forward
    assert "= (f16[2,500,4,128]{3,2,1,0}, f16[2,500,4,128]{3,2,1,0}, f16[2,500,4,128]{3,2,1,0}," in backward
    with pytest.raises(CannotRun, match="needs a Hopper GPU"):
        aot.compile_for("a100", loss, q, k, k)
