"""Options of `device` that become XLA options, compiled for an H100."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from jaxtune.config.schema import Config, DeviceOptions
from jaxtune.errors import UserError
from jaxtune.host.process import (
    GPU_OPTIONS,
    OVERLAP_LIMIT,
    SEVERAL_DEVICES_OPTIONS,
    compiler_options,
)
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.plan.launches import count_executed, read_program
from pallas_kernels import aot

LAYERS = 5


@pytest.fixture
def mesh():
    return make_mesh(MeshOptions(), aot.devices("h100"))


@pytest.mark.every_jax
@pytest.mark.parametrize("command_buffers", ["auto", "off"])
def test_cuda_graphs_are_of_a_layer_or_none(mesh, command_buffers):
    options = compiler_options(Config(device=DeviceOptions(command_buffers=command_buffers)))

    def layers(x, weights):
        def layer(x, weight):
            for _ in range(3):
                x = jax.nn.silu(x @ weight)
            return x, x.sum(axis=0)  # stacks results across the loop, like a step

        x, stack = jax.lax.scan(layer, x, weights)
        for _ in range(5):  # XLA makes no graph of fewer commands, and a whole loop counts as one command
            x = jax.nn.silu(x @ x)
        return x, stack

    x, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 512), (LAYERS, 512, 512)))
    compiled = aot.compile_for("h100", layers, x, weights, mesh=mesh, compiler_options=options)
    found = count_executed(compiled.thunks, read_program(compiled.hlo).trips)
    if command_buffers == "auto":
        assert LAYERS <= found["graphs"] <= LAYERS + 1 and found["in graphs"] >= 6 * LAYERS
    else:
        assert found["graphs"] == found["in graphs"] == 0, found


@pytest.mark.parametrize(
    ("hosts", "gpus", "axes", "limit"),
    [
        (1, 8, {}, 2),
        (1, 8, {"tensor": 8}, 1),
        (2, 8, {"data": 2}, 4),
        (2, 8, {"tensor": 8}, 2),
        (2, 1, {"context": 2}, 2),
    ],
)
def test_more_weights_are_gathered_early_the_less_waits_for_them(hosts, gpus, axes, limit):
    make_mesh(MeshOptions(**axes), aot.devices("h100", hosts, gpus))
    assert compiler_options() == GPU_OPTIONS | SEVERAL_DEVICES_OPTIONS | {OVERLAP_LIMIT: limit}


def test_what_the_user_says_in_xla_flags_is_not_contradicted(mesh, monkeypatch):
    config = Config()
    assert compiler_options(config) == GPU_OPTIONS
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION --xla_gpu_enable_triton_gemm=true")
    left = {name: value for name, value in GPU_OPTIONS.items() if name != "xla_gpu_enable_triton_gemm"}
    assert compiler_options(config) == left
    config = dataclasses.replace(config, device=DeviceOptions(command_buffers="off"))
    with pytest.raises(UserError, match="device.command_buffers = 'off': XLA_FLAGS sets it too; remove one of the two"):
        compiler_options(config)
