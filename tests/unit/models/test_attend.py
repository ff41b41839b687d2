"""The requested attention kernel runs, or an error says why it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import spec

from jaxtune.config.schema import Config, DataOptions
from jaxtune.errors import UserError
from jaxtune.models.layers.attend import attend_one
from jaxtune.models.options import AttentionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base
from pallas_kernels import registry
from pallas_kernels.flash_attention import MaskSpec, flash_attention


def trace(mesh, **attention):
    program = assemble(
        Base(spec(1)), Config(data=DataOptions(seq_len=16), attention=AttentionOptions(**attention)), mesh
    )
    return jax.eval_shape(program.step, *program.arguments)


def test_a_kernel_that_cannot_run_is_refused_with_its_reason(one_device):
    message = (
        r"attention\.backend='mosaic': .*cannot run this on cpu .*: it needs a Hopper GPU.*attention\.fallback='warn'"
    )
    with pytest.raises(UserError, match=message):
        trace(one_device, backend="mosaic")


def test_with_fallback_another_one_runs_and_it_is_said_once(one_device, caplog):
    registry._warn.cache_clear()  # another test of this process may have asked for it
    for _ in range(2):
        _, metrics = trace(one_device, backend="mosaic", fallback="warn")
        assert metrics["loss"].dtype == jnp.float32
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "'mosaic' cannot run this on cpu" in warned[0].getMessage()


def test_a_kernel_that_can_run_is_taken(one_device, caplog):
    caplog.set_level("INFO")
    trace(one_device, backend="xla")
    assert "by backend xla (as requested)" in caplog.text


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_query_attends_as_the_last_of_many(window, sinks, soft_cap, dtype):
    """Some keys are of other documents or later; the last row is padding, which sees no key."""
    length, index, heads, keys = 17, 11, 6, 2
    draw = iter(jax.random.split(jax.random.key(0), 4))
    q = jax.random.normal(next(draw), (3, 1, heads, 8), dtype)
    k, v = (jax.random.normal(next(draw), (3, length, keys, 8), dtype) for _ in range(2))
    sink = jax.random.normal(next(draw), (heads,)) if sinks else None
    mask = MaskSpec(window=window, key_start=jnp.array([[0], [4], [length]]), query_offset=jnp.int32(index))
    expected = flash_attention(q, k, v, mask, 0.3, soft_cap=soft_cap, sinks=sink, backend="xla")
    found = attend_one(q, k, v, mask, 0.3, soft_cap, sink)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.float32(found), np.float32(expected), atol=tolerance)
    assert not np.any(np.float32(found[2]))
