"""Eight simulated CPU devices for every test; a test that needs one takes the first."""

import ctypes
import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax._src.compiler
import lanes
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# XLA would compile the parts of a program on all cores, which two tests share here, and splitting it takes time.
WHOLE_PROGRAMS = "--xla_cpu_parallel_codegen_split_count=1"
# XLA's older code generator for CPUs compiles in a third of the time. Later versions of jax do not have it.
OLDER_GENERATOR = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
XLA_FLAGS = os.environ.get("XLA_FLAGS", "").replace(WHOLE_PROGRAMS, "").replace(OLDER_GENERATOR, "")
os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {WHOLE_PROGRAMS} {OLDER_GENERATOR}"


# Run the slowest files first, so that the two workers finish together.
LONGEST = (
    *("test_low_precision_accuracy.py", "test_gpu_suite_smoke.py", "test_mesh_product.py", "test_whole_quickstart.py"),
    *("test_families.py", "test_qlora.py", "test_recipes.py", "test_quickstart.py", "test_resume.py"),
    *("test_flash_attention.py", "test_lora_peft.py", "test_moe_lora.py", "test_foreign.py", "test_preferences.py"),
    *("test_step.py", "test_decode.py", "test_experts.py", "test_lora.py"),
    *("test_meshes.py", "test_train.py", "test_low_precision_step.py", "test_qlora_step.py"),
)


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out, if pytest itself chose what to run."""
    if config.args_source is config.ArgsSource.TESTPATHS and not config.option.markexpr:
        terminalreporter.section("left out")
        for folder, how in lanes.LEFT_OUT.items():
            terminalreporter.write_line(f"tests/{folder}: {how}")
        terminalreporter.write_line("rows marked nightly, most of a second way to do the same: pytest -m nightly")


def pytest_collection_modifyitems(config, items):
    """Sort the slowest files first; keep the order of the others.

    Leave out rows that are marked nightly, unless tests are chosen by marker, by word or by name.
    """
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))
    if config.option.markexpr or config.option.keyword:
        return
    chosen = tuple(argument.partition("::")[2] for argument in config.args if "::" in argument)
    for item in [item for item in items if item.get_closest_marker("nightly")]:
        if not item.nodeid.partition("::")[2].startswith(chosen):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])


def pytest_collection_finish():
    """Stop the garbage collector, which walks all of jax and torch again and again while a program is traced.

    It runs after each file, and wherever a process has grown (`release_programs`).
    """
    gc.freeze()
    gc.disable()


@pytest.fixture(autouse=True, scope="session")
def compilation_cache(tmp_path_factory):
    """Return the folder in which a worker keeps compiled programs, as many files compile the same ones.

    It is set before anything is compiled, as jax looks for it once a process.
    """
    folder = str(tmp_path_factory.mktemp("programs"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # smaller ones cost more to store
    return folder


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """Compile without LLVM's optimisations: half the time for tests that compile more than they compute.

    Sharding and the structure of a program do not depend on them. Registers and speed of code for GPUs do, so tests/aot
    and tests/gpu keep the optimisations.
    """
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name not in ("aot", "gpu"))


@pytest.fixture(autouse=True, scope="module")
def compile_as_for_users(request):
    """Compile with XLA's own choice of code generator in files that have AS_FOR_USERS.

    They compare the bits of different programs, or nearly. The older generator rounds them differently.
    """
    if not getattr(request.module, "AS_FOR_USERS", False) or not OLDER_GENERATOR:
        yield
        return
    original = jax._src.compiler.get_compile_options  # flags are read once a process, so an option of each program

    def get_compile_options(*arguments, env_options_overrides=None, **named):
        overrides = {**(env_options_overrides or {}), "xla_cpu_use_fusion_emitters": True}
        return original(*arguments, env_options_overrides=overrides, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax._src.compiler, "get_compile_options", get_compile_options)
        patch.setenv("XLA_FLAGS", f"{XLA_FLAGS} {WHOLE_PROGRAMS}")  # of processes that the tests start
        yield


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
