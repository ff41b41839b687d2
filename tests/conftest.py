"""Eight simulated CPU devices for every test; a test that wants one takes the first."""

import ctypes
import gc
import logging
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import psutil
import pytest

jax.config.update("jax_num_cpu_devices", 8)


# They begin, so that none is left over at the end, when the other process has nothing to do.
LONGEST = (
    *("test_low_precision_accuracy.py", "test_gpu_suite_smoke.py", "test_mesh_product.py"),
    *("test_whole_quickstart.py", "test_resume.py", "test_quickstart.py", "test_recipes.py", "test_qlora.py"),
    *("test_lora.py", "test_moe_lora.py", "test_meshes.py", "test_train.py"),
    *("test_low_precision_step.py", "test_qlora_step.py"),
)


def pytest_collection_modifyitems(items):
    """The longest files first, the others as they come."""
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


@pytest.fixture(autouse=True, scope="module")
def quick_to_compile(request):
    """Without LLVM's optimisations, half the time of tests that compile more than they compute.

    How arrays are sharded and what a program is made of does not depend on them. Not so the registers and the speed of
    what is compiled for GPUs.
    """
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name not in ("aot", "gpu"))


MOST_BYTES = 2.3e9  # of a process that runs tests; with what the next one takes, it stays below 3 GB


def release_programs():
    """Free the programs that tests have compiled: kept, they take gigabytes in a process that runs all files."""
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what is freed
        trim(0)


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_file():
    """The programs of a file are shared by its tests and freed at its end."""
    yield
    release_programs()


@pytest.fixture(autouse=True)
def bounded_memory():
    """A file that compiles much frees its programs on the way."""
    yield
    if psutil.Process().memory_info().rss > MOST_BYTES:
        release_programs()


@pytest.fixture(autouse=True)
def no_mesh_left_behind():
    """The current mesh and the rules that come with it are global: each test starts and ends without."""
    from jaxtune.parallel.layout import RULES, Rules

    yield
    jax.set_mesh(None)
    RULES.set_global(Rules())


@pytest.fixture(autouse=True)
def no_log_left_behind():
    """A run shows its log on the terminal, which is the test's own and closed after it."""
    loggers = [logging.getLogger(name) for name in ("jaxtune", "pallas_kernels")]

    def reset():
        for logger in loggers:
            logger.handlers, logger.filters, logger.propagate = [], [], True
            logger.setLevel(logging.NOTSET)

    reset()
    yield
    reset()


@pytest.fixture
def one_device():
    """A mesh of one device, current."""
    from jaxtune.config.schema import Mesh
    from jaxtune.parallel.mesh import make_mesh

    return make_mesh(Mesh(), jax.devices()[:1])
