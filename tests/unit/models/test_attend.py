"""The requested attention kernel runs, or an error says why it cannot."""

import jax
import jax.numpy as jnp
import pytest
from tiny import spec

from jaxtune.config.schema import Config, DataOptions
from jaxtune.errors import UserError
from jaxtune.models.options import AttentionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.model import Base
from pallas_kernels import registry


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
