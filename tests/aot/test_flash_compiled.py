"""FlashAttention by the package dew-flash-attn, compiled: 2 for an A100 and an RTX 4090, 3 for an H100."""

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

pytest.importorskip("dew_flash_attn", reason="dew-flash-attn is not installed: pip install 'jaxtune[flash-cuda12]'")
pytestmark = pytest.mark.every_jax

# A device has two rows of 500 tokens, four of the eight query heads and two of the four key heads, and places for
# 2 x (4 + 1) documents.
LOG_SUM_EXP = {"h100": "f32[4,1000]{1,0}", "a100": "f32[10,4,500]{2,1,0}", "rtx4090": "f32[10,4,500]{2,1,0}"}
KEY_GRADIENT = {"h100": "bf16[1000,2,192]", "a100": "bf16[1000,4,192]", "rtx4090": "bf16[1000,4,192]"}


@pytest.mark.parametrize("gpu", LOG_SUM_EXP)
def test_packed_rows_in_layers_over_a_mesh(gpu):
    """As in a model: in a loop over layers that saves the residuals, inside a shard_map over rows and heads."""
    devices = np.array(aot.devices(gpu, per_host=4)).reshape(2, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    heads, rows = P("fsdp", None, "tensor"), P("fsdp")

    @partial(jax.shard_map, in_specs=(heads, heads, rows), out_specs=heads)
    def attend(q, k, key_start):
        return flash_attention(q, k, k, MaskSpec(window=300, key_start=key_start, documents=4), backend="flash")

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(RESIDUALS))
    def layer(q, k, key_start):
        return q + attend(q, k, key_start)

    def loss(q, k, key_start):
        q, _ = jax.lax.scan(lambda q, k: (layer(q, k, key_start), None), q, k)
        return jnp.sum(q.astype(jnp.float32) ** 2)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    q, k = array((4, 500, 8, 192), jnp.bfloat16, heads), array((3, 4, 500, 4, 192), jnp.bfloat16, P(None, *heads))
    key_start = array((4, 500), jnp.int32, rows)
    compiled = aot.compile_for(gpu, jax.grad(loss, (0, 1)), q, k, key_start, mesh=mesh)
    name = "dew_flash3_mha_varlen" if gpu == "h100" else "dew_flash_mha_varlen"
    calls = {call: count for call, count in compiled.custom_calls.items() if "flash" in call}
    assert calls == {f"{name}_fwd": 1, f"{name}_bwd": 1}
    assert not compiled.collectives
    forward, backward = (
        next(line for line in compiled.hlo.splitlines() if f'custom_call_target="{name}_{which}"' in line)
        for which in ("fwd", "bwd")
    )
    assert f"= (bf16[1000,4,192]{{2,1,0}}, {LOG_SUM_EXP[gpu]}," in forward and "s32[11]{0}" in forward
    assert f"= (bf16[1000,4,192]{{2,1,0}}, {KEY_GRADIENT[gpu]}" in backward
    assert "window_size_left = 299" in forward and "window_size_left = 299" in backward
    pairs = 300 * 301 / 2 + 200 * 300
    assert cost.read_flops(forward) == pytest.approx(2 * 2 * 2 * 4 * 192 * pairs, rel=1e-5)
    assert cost.read_flops(backward) == pytest.approx(2 * 5 * 2 * 4 * 192 * pairs, rel=1e-5)


def test_a_gpu_without_kernels_is_refused():
    x = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
    with pytest.raises(CannotRun, match="compute capability 8.x, 9.0 or 12.x"):
        aot.compile_for("b200", lambda q: flash_attention(q, q, q, MaskSpec(), backend="flash"), x)
