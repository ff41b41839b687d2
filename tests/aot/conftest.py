import pytest

from pallas_kernels import aot


@pytest.fixture(autouse=True, scope="session")
def compiler_for_gpus():
    if reason := aot.unavailable():
        pytest.skip(reason)
