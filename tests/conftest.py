"""Eight simulated CPU devices for every test; a test that needs one takes the first."""

import ctypes
import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import lanes
import pytest

jax.config.update("jax_num_cpu_devices", 8)


# Run the slowest files first, so that the two workers finish together.
LONGEST = (
    *("test_low_precision_accuracy.py", "test_gpu_suite_smoke.py", "test_mesh_product.py"),
    *("test_whole_quickstart.py", "test_resume.py", "test_quickstart.py", "test_recipes.py", "test_qlora.py"),
    *("test_lora.py", "test_moe_lora.py", "test_meshes.py", "test_train.py"),
    *("test_low_precision_step.py", "test_qlora_step.py"),
)


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out, if pytest itself chose what to run."""
    if config.args_source is config.ArgsSource.TESTPATHS:
        terminalreporter.section("left out")
        for folder, how in lanes.LEFT_OUT.items():
            terminalreporter.write_line(f"tests/{folder}: {how}")


def pytest_collection_modifyitems(items):
    """Sort the slowest files first; keep the order of the others."""
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """Compile without LLVM's optimisations: half the time for tests that compile more than they compute.

    Sharding and the structure of a program do not depend on them. Registers and speed of code for GPUs do, so tests/aot
    and tests/gpu keep the optimisations.
    """
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name not in ("aot", "gpu"))


MAX_BYTES = 2.3e9  # of a process, before its next test; it then stays below 3 GB


def release_programs():
    """Free the programs that tests have compiled: they add up to gigabytes in a process that runs all files."""
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps freed memory
        trim(0)


def resident_bytes():
    """Memory of this process; 0 if the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_file():
    """The tests of a file share its programs, which are freed when it ends."""
    yield
    release_programs()


@pytest.fixture(autouse=True)
def bounded_memory():
    """A file that compiles many programs frees them between its tests."""
    yield
    if resident_bytes() > MAX_BYTES:
        release_programs()


@pytest.fixture(autouse=True)
def reset_mesh():
    """Reset the current mesh and the sharding rules, which are global, after each test."""
    from jaxtune.parallel.layout import RULES, Rules

    yield
    jax.set_mesh(None)
    RULES.set_global(Rules())


@pytest.fixture(autouse=True)
def reset_log():
    """Remove log handlers: a run logs to the terminal, which belongs to one test and is closed after it."""
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
    """Return a mesh of one device and make it the current mesh."""
    from jaxtune.parallel.mesh import make_mesh
    from jaxtune.parallel.options import MeshOptions

    return make_mesh(MeshOptions(), jax.devices()[:1])
