"""Rounded operands are as declared."""

import jax
import jax.numpy as jnp
import pytest

from unit.precision.reference import (
    AXES,
    FP8,
    NVFP4,
    case,
)

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("numbers", [FP8, NVFP4], ids=["fp8", "nvfp4"])
def test_operands_are_as_declared(numbers, jitted):
    """Shapes, dtypes and shardings are known before any weight exists."""
    w = jnp.asarray(case()[1])
    make = lambda w: numbers.make(w, AXES)  # noqa: E731
    operands = (jax.jit(make) if jitted else make)(w)
    declared = numbers.abstract(w.shape, w.dtype, AXES)
    describe = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)  # noqa: E731
    assert jax.tree.map(describe, operands) == jax.tree.map(describe, declared)
    stacked = numbers.abstract((3, *w.shape), w.dtype, (None, *AXES))
    assert stacked.forward.codes.shape == (3, *declared.forward.codes.shape)
