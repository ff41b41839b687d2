"""Decoding gives the tokens of one device on every mesh, whichever device has a row and which heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh.harness import MESHES, folder
from nightly_rows import nightly

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import make_generate
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (3, 17, 9, 1, 30)]


def tokens(model: str, mesh: MeshOptions, devices: int, sampling: Sampling) -> list[list[int]]:
    """Return the tokens generated for each prompt."""
    made = make_mesh(mesh, jax.devices()[:devices])
    config = Config(
        model=ModelOptions(path=str(folder(model, False, False)), dtype="float32"), data=DataOptions(seq_len=64)
    )
    declared = declare_model(read_base(config), config, made, train=False)
    how = {"max_new_tokens": 8, "dtype": jnp.dtype("float32"), "sampling": sampling}
    generate = make_generate(declared.graph, declared.spec, **how)
    with jax.default_matmul_precision("highest"):
        steps = [step.tokens for step in generate(read_parameters(declared, declared.whole), PROMPTS)]
    return np.stack(steps, axis=1).tolist()


@functools.cache
def of_one_device(model: str, sampling: Sampling) -> list[list[int]]:
    """Return the tokens that every mesh must generate."""
    return tokens(model, MeshOptions(), 1, sampling)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        nightly("dense", "data=2 fsdp=2 tensor=2"),
        ("dense", "tensor=8"),
        ("dense", "data=2 context=2 sequence=2"),
        ("hybrid", "fsdp=2 sequence=2 tensor=2"),
        ("moe", "data=2 fsdp=2 expert=2"),
    ],
)
def test_tokens_equal_one_device(model, mesh):
    mesh = MESHES.get(mesh, MeshOptions(data=2, fsdp=2, expert=2))
    sampling = Sampling(0.8, top_p=0.95, repetition_penalty=1.2) if model == "dense" else Sampling(temperature=0.0)
    assert tokens(model, mesh, 8, sampling) == of_one_device(model, sampling)
