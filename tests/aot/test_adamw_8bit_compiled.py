"""The 8-bit AdamW update as the optimizer runs it, compiled for GPUs without having one: one kernel a parameter."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.optim.build import Trained, UpdateInputs, build
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from pallas_kernels import aot

# The MLP gate projections of Qwen3-8B, its embedding, and the scales of a norm.
LAYERS = 36
SHAPES = {"gate": (LAYERS, 12288, 4096), "embed": (151936, 4096), "norm": (LAYERS, 4096)}
SPECS = {"gate": jax.P(None, "tensor", "fsdp"), "embed": jax.P("tensor", "fsdp"), "norm": jax.P(None, "fsdp")}


def compiled_update(mesh: MeshOptions, devices: int) -> aot.Compiled:
    """The update of all parameters in bfloat16, in place."""
    made = make_mesh(mesh, aot.devices("h100", per_host=devices))
    names = {name: tuple(f"{name}.{number}" for number in range(LAYERS)) for name in SHAPES}
    trained = {name: Trained(names[name], (LAYERS,)) for name in ("gate", "norm")} | {"embed": Trained(("embed",))}
    optimizer = build(OptimOptions(name="adamw_8bit"), trained, LAYERS)

    def arrays() -> dict[str, jax.ShapeDtypeStruct]:
        places = {name: jax.NamedSharding(made, SPECS[name]) for name in SHAPES}
        return {name: jax.ShapeDtypeStruct(SHAPES[name], jnp.bfloat16, sharding=places[name]) for name in SHAPES}

    state = jax.eval_shape(optimizer.init, arrays())
    step = jax.eval_shape(lambda: UpdateInputs(jnp.float32(0), jnp.float32(0), jnp.bool(True), jax.random.key(0), 0))
    return aot.compile_for("h100", optimizer.update, arrays(), state, arrays(), step, mesh=made, donate_argnums=(1, 2))


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("mesh", "devices"), [(MeshOptions(), 1), (MeshOptions(fsdp=2, tensor=2), 4)], ids=["one", "four"]
)
def test_a_parameter_is_one_kernel_and_nothing_else_has_its_size(mesh, devices):
    compiled = compiled_update(mesh, devices)
    assert sum(compiled.custom_calls.values()) == len(SHAPES) == len(compiled.kernels)
    assert not compiled.collectives
    assert compiled.memory.temporaries < 1e6
    assert compiled.memory.aliased > 0.99 * compiled.memory.outputs
    made = re.findall(r"= [a-z]+\d*\[([\d,]*)\]\S* (?:fusion|copy|transpose|broadcast|convert)\(", compiled.hlo)
    sizes = [[int(size) for size in shape.split(",") if size] for shape in made]
    assert all(max(shape, default=1) <= 1024 for shape in sizes), sizes
