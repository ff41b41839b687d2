"""Any options that `check` lets pass make a step, or are refused by a UserError: none end in an error of jax.

A step is traced, not compiled, for options drawn at random, with numbers of rows and micro-batches that other tests of
meshes do not have. `tests/mesh` compares the results of some with one device.
"""

import dataclasses
import math
import random

import jax
import pytest
from mesh.harness import (
    ADAPTERS,
    CLASSIFICATION,
    DECISION,
    MODELS,
    OPTIMIZERS,
    PREFERENCE,
    REMAT,
    REWARDED,
    SERVED,
    STORAGE,
    Case,
    config_of,
)

from jaxtune.config.checks import check
from jaxtune.config.schema import Config, TrainOptions
from jaxtune.errors import UserError
from jaxtune.parallel.layout import AXES
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions, ParallelOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import read_base

# If these paths change, CI runs this file; otherwise it runs only at night.
TAKES_LONG = True
COVERS = (
    "jaxtune/lora",
    "jaxtune/models",
    "jaxtune/objectives",
    "jaxtune/optim",
    "jaxtune/parallel",
    "jaxtune/precision",
    "jaxtune/quant",
    "jaxtune/training",
    "jaxtune/weights",
)
TRACED = 25  # of a seed


def draw(source: random.Random) -> Config:
    """Draw a config for 1 to 8 devices."""

    def rarely(value, otherwise):
        return value if source.random() < 0.15 else otherwise

    sizes = dict.fromkeys(AXES, 1)
    for _ in range(source.randrange(4)):
        sizes[source.choice(AXES)] *= 2
    staged = sizes["stage"] > 1
    case = Case(
        "",
        source.choice([*STORAGE, *SERVED]),
        source.choice(ADAPTERS),
        source.choice(list(OPTIMIZERS)),
        source.choice([*["cross_entropy"] * 4, "z-loss", CLASSIFICATION, PREFERENCE, REWARDED, DECISION]),
        "block" if staged else source.choice(REMAT),
        source.choice(list(MODELS)),
    )
    length = TrainOptions(
        max_steps=4, micro_batch_size=source.choice([1, 2, 3]), grad_accum_steps=4 if staged else source.choice([1, 2])
    )
    config = config_of(case, MeshOptions(**sizes), length, whole=False)
    parallel = ParallelOptions(
        zero=source.choice([1, 2, 3, 3]),
        reshard_after_forward=rarely(False, True),
        shard_residual=rarely(False, True),
        pipeline=source.choice(["1f1b", "gpipe"]) if staged else "1f1b",
    )
    sections = {
        "parallel": {field.name: getattr(parallel, field.name) for field in dataclasses.fields(parallel)},
        "memory": {f"offload_{part}": rarely(True, False) for part in ("optimizer", "master", "gradients", "quants")}
        | {"unroll": rarely(True, None)},
        "train": {
            "neftune_alpha": rarely(5.0, 0.0),
            "hidden_dropout": rarely(0.1, 0.0),
            "attention_dropout": rarely(0.1, 0.0),
        },
        "optim": {"ema_decay": rarely(0.9, None)},
        "guard": {"action": rarely("skip", None)},
        "lora": {"use_dora": rarely(True, False), "freeze_a": rarely(True, False)} if config.lora.enabled else {},
        "experts": {"dispatch": rarely("all_to_all", "all_gather")} if case.model == "moe" else {},
    }
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def trace(config: Config) -> bool:
    """Trace a step, and return True; False: the config was refused."""
    if any(check(config)):
        return False
    devices = math.prod(dataclasses.astuple(config.mesh))
    try:
        mesh = make_mesh(config.mesh, jax.devices()[:devices], config.parallel)
        program = assemble(read_base(config), config, mesh)
        jax.jit(program.step, donate_argnums=0).trace(*program.arguments)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_options_make_a_step_or_are_refused(seed):
    source, traced = random.Random(seed), 0
    while traced < TRACED:
        config = draw(source)
        try:
            traced += trace(config)
        except Exception as error:
            error.add_note(str(config))
            raise
