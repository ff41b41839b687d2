import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_to_compile():
    """These tests compile more than they compute, and no fact of theirs depends on how well LLVM optimises."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
