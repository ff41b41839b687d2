"""Distribute tests over workers: tests of a file share its compilations, test_kernels.py shares them by case."""

import pytest
from xdist.scheduler import LoadScopeScheduling

from pallas_kernels import aot


@pytest.fixture(autouse=True, scope="session")
def compiler_for_gpus():
    if reason := aot.unavailable():
        pytest.fail(reason)  # a skipped test would be recorded as passed


class ByWhatIsCompiled(LoadScopeScheduling):
    """Files with many tests first and the kernels last, case by case, so that the workers finish together."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return test.partition("[")[2] if file.endswith("test_kernels.py") else file


def pytest_xdist_make_scheduler(config, log):
    return ByWhatIsCompiled(config, log)
