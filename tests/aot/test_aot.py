"""The ahead-of-time compilation tools: their reports on programs with known figures."""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot
from pallas_kernels.gpus import GPUS
from pallas_kernels.ptx import occupancy

# The tools read output of XLA and Mosaic, whose names and format depend on the version.
pytestmark = pytest.mark.every_jax


def vector(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)


def exponentials(x, block: int):
    def exponential(x_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...])

    tile = pl.BlockSpec((block,), lambda i: (i,))
    parameters = triton.CompilerParams(num_warps=2)
    return pl.pallas_call(
        exponential, jax.typeof(x), grid=(x.size // block,), in_specs=[tile], out_specs=tile, compiler_params=parameters
    )(x)


def through_shared_memory(x, size: int):
    def copy_parts(x_ref, out_ref, scratch):
        part = pl.ds(jax.lax.axis_index("part") * size, size)
        scratch[...] = x_ref[part]
        mosaic_gpu.commit_smem()
        out_ref[part] = scratch[...]

    return mosaic_gpu.kernel(
        copy_parts,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // size,),
        grid_names=("part",),
        scratch_types=[mosaic_gpu.SMEM((size,), x.dtype)],
    )(x)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_card_compiles(gpu):
    assert {device.device_kind for device in aot.devices(gpu)} == {GPUS[gpu].target}
    (kernel,) = aot.compile_for(gpu, partial(exponentials, block=512), vector(4096)).kernels
    assert (kernel.name, kernel.grid, kernel.threads, kernel.spill_bytes) == ("exponential", (8, 1, 1), 64, 0)
    # A multiprocessor holds only 32 blocks (24 on sm_89) of two warps.
    assert kernel.occupancy == 1.0


def test_unknown_card():
    with pytest.raises(ValueError, match="unknown GPU 'v100'; choose from a100"):
        aot.devices("v100")


def test_memory_is_a_device_and_donation_shows():
    memory = aot.compile_for("h100", lambda x: x + 1, vector(1 << 20), donate_argnums=0).memory
    assert (memory.arguments, memory.outputs, memory.aliased, memory.temporaries) == (4 << 20, 4 << 20, 4 << 20, 0)
    assert memory.peak == 4 << 20 and memory.host == 0


def test_collectives_over_hosts():
    devices = aot.devices("h100", hosts=2, per_host=4)
    assert len(devices) == 8 and {device.process_index for device in devices} == {0, 1}
    mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Explicit,))
    weight, tokens = (
        jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for spec in (P("fsdp"), P(None, "fsdp"))
    )

    def step(weight, tokens):
        return jnp.sum(jnp.matmul(tokens.T, jax.reshard(weight, P()), out_sharding=P("fsdp")).astype(jnp.float32))

    compiled = aot.compile_for("h100", step, weight, tokens, mesh=mesh)
    assert compiled.collectives == {"all-gather": (1, 2 * 1024 * 1024), "all-reduce": (1, 4)}
    assert compiled.memory.arguments == 2 * 2 * 1024 * 1024 // 8


def test_kernels_of_one_name_in_loops_and_again():
    def function(x):
        x = exponentials(x, 256)
        return jax.lax.scan(lambda x, _: (exponentials(x, 512), None), x, length=3)[0]

    first = aot.compile_for("h100", function, vector(4096))
    assert sorted(kernel.grid[0] for kernel in first.kernels) == [8, 16]
    assert first.custom_calls == {"__gpu$xla.gpu.triton": 2}
    assert aot.compile_for("h100", function, vector(4096)).kernels == first.kernels


def test_exponentials_of_a_loop():
    """64 threads compute 2048 elements each; exponentials of another loop or outside of loops do not count."""

    def kernel(x_ref, passes_ref, out_ref):
        x = jnp.exp(x_ref[...])
        for _ in range(2):
            x = jax.lax.fori_loop(0, passes_ref[0], lambda _, x: jnp.exp(x), x)
        out_ref[...] = x

    call = pl.pallas_call(kernel, vector(2048), compiler_params=triton.CompilerParams(num_warps=2))
    passes = jax.ShapeDtypeStruct((1,), jnp.int32)
    (compiled,) = aot.compile_for("h100", call, vector(2048), passes).kernels
    assert compiled.exponentials == 2048 // 64


def test_mosaic_kernels_are_reported_each_time():
    function = partial(through_shared_memory, size=1024)
    first, again = (aot.compile_for("h100", function, vector(8192)).kernels for _ in range(2))
    (kernel,) = first
    assert (kernel.name, kernel.grid, kernel.threads) == ("copy_parts", (8, 1, 1), 128)
    assert 4096 <= kernel.shared_memory < 5120
    assert first == again


def test_too_much_shared_memory_is_refused_as_on_the_card():
    assert aot.compile_for("h100", partial(through_shared_memory, size=32768), vector(65536)).kernels
    with pytest.raises(Exception, match="(?i)shared memory|smem"):
        aot.compile_for("h100", partial(through_shared_memory, size=65536), vector(65536))


def test_persistent_cache_is_left_alone(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        for _ in range(2):
            assert len(aot.compile_for("h100", partial(exponentials, block=512), vector(4096)).kernels) == 1
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x * 3)(jnp.ones(4))
        assert list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@pytest.mark.parametrize(
    ("gpu", "registers", "shared_memory", "threads", "warps"),
    [
        ("h100", 32, 0, 1024, 64),
        ("h100", 255, 0, 128, 8),  # 8192 registers a warp: two warps for each scheduler
        ("h100", 168, 0, 384, 12),  # 5376: three for each
        ("h100", 32, 232448, 128, 4),  # all of the shared memory
        ("a100", 32, 57344, 128, 8),  # twice 57 KiB fit into 164, three times do not
        ("rtx4090", 16, 0, 32, 24),  # 24 blocks at most
    ],
)
def test_occupancy(gpu, registers, shared_memory, threads, warps):
    assert occupancy(registers, shared_memory, threads, GPUS[gpu]) == warps * 32 / GPUS[gpu].threads_per_multiprocessor


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'jaxtune\[aot\]'"):
        aot.devices("h100")


@pytest.mark.parametrize("package", ["jaxtune", "pallas_kernels"])
def test_plain_start_prints_no_traceback(package):
    """Without CUDA's libraries, jax would report at length that it cannot use the plugin."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    program = f"import {package}, jax; print(jax.devices())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "error" not in done.stderr.lower()


def test_a_mesh_of_other_cards():
    mesh = Mesh(np.array(aot.devices("a100")), ("x",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="a mesh of NVIDIA A100"):
        aot.compile_for("h100", lambda x: x, vector(1), mesh=mesh)
