"""Tests by worker: those of one file share what it compiles, those of test_kernels.py what each case compiles."""

import pytest
from xdist.scheduler import LoadScopeScheduling

from pallas_kernels import aot


@pytest.fixture(autouse=True, scope="session")
def compiler_for_gpus():
    if reason := aot.unavailable():
        pytest.fail(reason)  # what is skipped would be on record as passed


class ByWhatIsCompiled(LoadScopeScheduling):
    """Files with many tests first, the kernels last, case by case: the workers end together."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return test.partition("[")[2] if file.endswith("test_kernels.py") else file


def pytest_xdist_make_scheduler(config, log):
    return ByWhatIsCompiled(config, log)
