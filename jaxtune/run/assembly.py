"""The program of a run: optimizer, state and step of a declared model."""

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxtune import data
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.decoder import Parameters
from jaxtune.objectives.cross_entropy import cross_entropy
from jaxtune.optim.adamw_8bit import float32_moments, undivided_moments
from jaxtune.optim.build import Optimizer, Trained, build
from jaxtune.optim.schedules import check_length, learning_rate
from jaxtune.parallel.layout import TOKENS, P
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.run.model import Model
from jaxtune.run.process import compiler_options
from jaxtune.run.state import State, initial_state
from jaxtune.run.step import accumulated_gradients, make_train_step

log = logging.getLogger("jaxtune")


def trained_of(model: Model) -> dict[str, Trained]:
    """What the optimizer must know of the trained parameters."""
    return {name: Trained(model.hf_names(name), bool(model.parameters[name].layers)) for name in model.trained}


def optimizer_of(model: Model, config: Config) -> Optimizer:
    """The optimizer of what is trained. Raises UserError where the mesh would split a block of its state."""
    if config.optim.name == "adamw_8bit":
        trained = {name: model.parameters[name] for name in model.trained}
        if complaints := undivided_moments(trained, jax.sharding.get_mesh()):
            raise UserError("\n  ".join(["the mesh does not divide the optimizer's state:", *complaints]))
        if kept := float32_moments(trained):
            log.warning(
                "optim.name='adamw_8bit' keeps float32 moments where no block divides a row: %s", ", ".join(kept)
            )
    # Muon's own code multiplies in bfloat16; float16 would lose gradients before they are divided by their norm.
    dtype = jnp.float32 if config.precision.recipe == "fp32" else jnp.bfloat16
    return build(config.optim, trained_of(model), len(model.spec.layers), dtype)


def start_of(model: Model, config: Config, optimizer: Optimizer) -> Callable[[Parameters], State]:
    """Trained parameters -> the state before the first step."""
    recipe = recipe_of(config.precision, model.linears)
    return lambda trained: initial_state(optimizer, trained, recipe)


def abstract_state(model: Model, config: Config, optimizer: Optimizer, mesh: jax.sharding.Mesh) -> State:
    """Shapes, dtypes and shardings of the whole state."""
    state = jax.eval_shape(start_of(model, config, optimizer), model.abstract(model.trained))

    def on_mesh(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P() if leaf.sharding is None else leaf.sharding.spec  # the optimizer's counters are whole everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, state)


def step_of(
    config: Config, model: Model, optimizer: Optimizer, mesh: jax.sharding.Mesh, total_steps: int
) -> tuple[Callable, tuple]:
    """The step of a run, and the `shapes_of` its arguments: enough to compile it anywhere.

    Raises UserError where the learning-rate schedule does not fit the number of steps.
    """
    if note := check_length(config.optim, total_steps):
        log.warning(note)
    recipe, seed = recipe_of(config.precision, model.linears), config.train.seed
    objective = partial(cross_entropy, z_loss=config.train.z_loss)
    gradients = accumulated_gradients(model.graph, objective, recipe, config.memory.remat, seed)
    rate = learning_rate(config.optim, total_steps)
    step = make_train_step(gradients, optimizer, rate, config.optim.max_grad_norm, recipe, seed)
    return step, shapes_of(config, model, optimizer, mesh)


def shapes_of(config: Config, model: Model, optimizer: Optimizer, mesh: jax.sharding.Mesh) -> tuple:
    """Shapes, dtypes and shardings of state, frozen parameters and batch."""
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    batch = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *TOKENS)))
    return abstract_state(model, config, optimizer, mesh), model.abstract(model.frozen), batch


def compile_step(step: Callable, arguments: tuple, deterministic: bool) -> jax.stages.Compiled:
    """The step compiled for the current mesh; its state is given away with each call."""
    program = jax.jit(step, donate_argnums=0, compiler_options=compiler_options(deterministic))
    return program.lower(*arguments).compile()
