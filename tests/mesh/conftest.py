"""Compiling is most of this lane's time, and LLVM's optimizations are half of that."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly():
    """Partitioning, which these tests are about, is not among what this leaves out."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
