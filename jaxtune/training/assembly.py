"""The program of a run: model, optimizer, state, batch and step, from only its base model and its config."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtune import data
from jaxtune.columns import image_columns, routed_experts
from jaxtune.config.schema import Config
from jaxtune.data.images.image_reader import ImageReader
from jaxtune.errors import UserError
from jaxtune.host import plugins
from jaxtune.host.process import compiler_options
from jaxtune.models.decoder import Parameters, cast_like
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.parameters import abstract
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.objectives.balanced import add_balancing
from jaxtune.objectives.classification import classification
from jaxtune.objectives.cross_entropy import cross_entropy, dynamic_fine_tuning, token_accuracy
from jaxtune.objectives.decision import decision, evaluated_decision
from jaxtune.objectives.distillation import distillation
from jaxtune.objectives.further_tokens import add_further_tokens
from jaxtune.objectives.grpo import grpo
from jaxtune.objectives.objective import Objective
from jaxtune.objectives.options import DecisionOptions
from jaxtune.objectives.preference import preference
from jaxtune.optim.adamw_8bit import float32_moments, undivided_moments
from jaxtune.optim.build import Optimizer, Trained, build
from jaxtune.optim.rules import balancing
from jaxtune.parallel import offload
from jaxtune.parallel.layout import RULES, Axes, Layout, P, by_token, shards, spec
from jaxtune.parallel.manual_axes import GATHERS_OTHER_AXES
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import PrecisionRecipe, recipe_of
from jaxtune.training.guard import first_level
from jaxtune.training.noise import make_noise
from jaxtune.training.pipelined_step import pipelined_gradients
from jaxtune.training.state import State, initial_state
from jaxtune.training.step import Forward, Gradients, StepOptions, accumulated_gradients, make_train_step
from jaxtune.weights.base import Base
from jaxtune.weights.model import Model, abstract_average, declare_model
from jaxtune.weights.reference import abstract_reference
from jaxtune.weights.relora import make_merge, merge_targets

log = logging.getLogger("jaxtune")


class Program(NamedTuple):
    """A run before any value is read: its functions, and the shapes, dtypes and shardings of their arguments.

    Attributes:
        model: The declared model.
        objective: The objective that is minimised.
        optimizer: The optimizer.
        gradients: The function that computes gradients over the micro-batches of a step.
        step: (state, frozen, batch, learning rate) -> (state, metrics).
        start: Trained parameters -> the state before the first step.
        state: Abstract arrays of the state.
        frozen: Abstract arrays of the frozen parameters that no step changes.
        batch: Abstract arrays of a batch.
    """

    model: Model
    objective: Objective
    optimizer: Optimizer
    gradients: Gradients
    step: Callable[..., Any]
    start: Callable[[Parameters], State]
    state: State
    frozen: Parameters
    batch: Parameters

    @property
    def arguments(self) -> tuple[State, Parameters, Parameters, jax.ShapeDtypeStruct]:
        """The step's abstract arguments, which suffice to compile it anywhere."""
        return self.state, self.frozen, self.batch, jax.ShapeDtypeStruct((), jnp.float32)


def assemble(base: Base, config: Config, mesh: jax.sharding.Mesh, objective: Objective | None = None) -> Program:
    """Assemble the program of a config on the current mesh, without reading any file.

    The mesh may have compile-only devices. `objective` replaces the config's. Raises UserError if the mesh or the
    device does not fit the model.
    """
    model = declare_model(base, config, mesh)
    optimizer, forward = _optimizer(model, config), forward_of(config, model)
    objective, recipe = objective or objective_of(config, model), forward.recipe
    reference, averaged = abstract_reference(model, config), abstract_average(model, config)
    merged, on_host = merge_targets(model, config), config.memory.offload_gradients
    # Gradients of a stack in this list are added layer by layer, so no device holds a whole stack. Adapters are
    # small; weights with operands have sharded gradients anyway (`shard_gradients`).
    divided = config.parallel.zero == 2 and recipe.linears is None
    stacks = [
        name
        for name, p in model.trained.items()
        if p.lead and (p.on_host or on_host or (divided and p.kind != "adapter"))
    ]
    options = StepOptions(
        seed=config.train.seed,
        dropout_warmup_steps=config.train.dropout_warmup_steps,
        gradient_specs=specs_of(model, RULES.value.gradients),
        added_by_layer=dict.fromkeys(stacks, on_host),
        summed_last=deferred_sum_axes(config, recipe, mesh),
        order=config.parallel.pipeline,
        skip_padding=bool(config.samples) and mesh.shape["stage"] == 1,
        counts=objective.counts,
        max_grad_norm=config.optim.max_grad_norm,
        guard=config.guard if config.guard.action is not None else None,
        noise=make_noise(model, config),
        reference_update_steps=config.preference.reference_update_steps,
        ema_decay=config.optim.ema_decay or 0.0,
        merge=make_merge(model, merged, config.train.seed) if merged else None,
        merge_interval=config.lora.merge_interval,
        reset_on_merge=config.lora.reset_on_merge,
    )
    make_gradients = accumulated_gradients if mesh.shape["stage"] == 1 else pipelined_gradients
    gradients = make_gradients(forward, objective, options)
    step = make_train_step(gradients, optimizer, recipe, options)

    def start(trained: Parameters) -> State:
        fields = {"reference": cast_like(trained, reference), "average": cast_like(trained, averaged)}
        fields |= {"guard": first_level()} if options.guard is not None else {}
        return initial_state(optimizer, trained, recipe)._replace(**fields)

    # (A, B, S) of `training.step`.
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size * data_shards(mesh), config.data.seq_len)
    batch = data.abstract_batch(shape, jax.NamedSharding(mesh, jax.P(None, *by_token())), objective.columns)
    # Shapes from a jaxpr, because jax.eval_shape forgets which memory an array is in.
    traced, state = jax.make_jaxpr(start, return_shape=True)(abstract(model.trained))
    avals = jax.tree.unflatten(jax.tree.structure(state), traced.out_avals)
    state = jax.tree.map(lambda aval: _on_mesh(aval, mesh), avals)
    state = state._replace(base=abstract(merged))
    frozen = abstract({name: p for name, p in model.frozen.items() if name not in merged})
    return Program(model, objective, optimizer, gradients, step, start, state, frozen, batch)


def deferred_sum_axes(config: Config, recipe: PrecisionRecipe, mesh: jax.sharding.Mesh) -> Axes:
    """Return the mesh axes over which gradients are summed once a step, after its last micro-batch; () if none.

    These axes shard the rows of a batch, but neither parameters nor gradients: `data`, and `fsdp` if parallel.zero = 1.
    Over an axis that shards gradients, they are reduce-scattered in each micro-batch, because unsharded gradients would
    take the memory that sharding saves.
    """
    # In low precision, an amax and random bits depend on the tokens of all devices, so devices cannot compute their
    # gradients independently. Weights as they are served are quantized by programs in which no axis may be manual.
    if config.train.grad_accum_steps == 1 or recipe.linears is not None:
        return ()
    rules = RULES.value
    dividing = set(itertools.chain(*astuple(rules.parameters), *astuple(rules.gradients)))
    # Axes of one device are among them, because rows that `fsdp` shards in one way and `data` in another have no spec.
    summed = tuple(axis for axis in rules.batch if axis not in dividing)
    others = [axis for axis in mesh.shape if axis not in summed]
    # Before jax 0.11, axes that are not summed last would be gathered (`parallel.manual_axes`).
    return () if shards(summed, mesh) == 1 or (GATHERS_OTHER_AXES and shards(others, mesh) > 1) else summed


def objective_of(config: Config, model: Model) -> Objective:
    """Return the objective that a run minimises."""
    regularisers = config.train.z_loss, config.train.label_smoothing
    if (of_plugin := plugins.plugin_objective(config)) is not None:
        objective = of_plugin
    elif config.rollout.rewards:
        objective = grpo(config.grpo, config.rollout)
    elif config.teachers:
        objective = distillation(config.distill, *regularisers)
    elif config.decision.loss is not None:
        objective = decision(_decision_options(config, model))
    elif config.preference.loss is not None or model.spec.labels:
        objective = task_of(model, config)
    elif config.train.loss == "dft":
        objective = dynamic_fine_tuning()
    else:
        objective = cross_entropy(*regularisers)
    if config.rollout.replay_routing:
        columns = *objective.columns, routed_experts(math.prod(model.spec.routed_shape))
        replayed = objective.score._replace(replay_routing=True)
        objective = dataclasses.replace(objective, columns=columns, score=replayed)
    if model.spec.mtp:
        if of_plugin is not None:
            raise UserError("mtp.weight: the loss of modules is added to next-token loss, not to a plugin's objective")
        objective = add_further_tokens(objective, config.mtp.weight, len(model.spec.mtp), config.mtp.only)
    objective = _with_images(objective, model, config)
    if not model.spec.has_experts:
        return objective
    experts = config.experts
    weight = model.spec.router_loss if experts.router_loss is None else experts.router_loss
    mixtures = [
        number for number, layer in enumerate(model.spec.every_layer) if isinstance(layer.feed_forward, Experts)
    ]
    # The routers' sums have a row for each mixture, so a layer's number is changed to its mixture's. The second of two
    # mixtures of a layer is of images.
    of_layer = 1 if model.spec.vision is None or model.spec.vision.experts is None else 2
    corrections = {
        name: [of_layer * mixtures.index(layer) + (".vision_router." in name) for layer in parameter.layers]
        for name, parameter in model.trained.items()
        if parameter.kind == "correction"
    }
    return add_balancing(objective, weight, experts.router_loss_over, experts.router_z_loss, corrections)


def task_of(model: Model, config: Config) -> Objective:
    """Return the objective to evaluate a model by: decisions, preferences, labels, or (also distilled) next tokens."""
    return _with_images(_task_of(model, config), model, config)


def open_images(model: Model, config: Config) -> ImageReader | None:
    """Return the reader of the images that a model trains on; None without vision.patches_per_row."""
    if config.vision.patches_per_row is None:
        return None
    layout = None if model.spec.vision is None else model.spec.vision.layout
    return data.open_reader(config.vision, model.folders.tokenizer, model.spec.family, layout)


def _with_images(objective: Objective, model: Model, config: Config) -> Objective:
    """Return the objective with the columns that the model's vision tower reads."""
    vision, patches = model.spec.vision, config.vision.patches_per_row
    if vision is None or patches is None:
        return objective
    added = image_columns(vision.layout, patches)
    return dataclasses.replace(objective, columns=tuple(dict.fromkeys((*objective.columns, *added))))


def _task_of(model: Model, config: Config) -> Objective:
    if config.decision.loss is not None:
        return evaluated_decision(_decision_options(config, model))
    if config.preference.loss is not None:
        return preference(config.preference)
    if model.spec.labels:
        return classification(model.spec.labels)
    # Weight 0: the loss of an evaluation is the next-token loss; modules are in its metrics.
    modules = len(model.spec.mtp)
    return add_further_tokens(token_accuracy(), 0.0, modules) if modules else token_accuracy()


def _decision_options(config: Config, model: Model) -> DecisionOptions:
    """Return the options of a decision model, whose scores are of its labels or of tokens."""
    assert bool(model.spec.labels) != bool(config.decision.label_tokens), "resolve_labels sets the tokens"
    return config.decision


def forward_of(config: Config, model: Model) -> Forward:
    """Return the forward pass of a run; memory.remat='auto' counts as 'block' here, and no memory.unroll as False."""
    recipe = recipe_of(config.precision, model.linears)
    call = ForwardOptions(
        recipe.dtype,
        remat="block" if config.memory.remat == "auto" else config.memory.remat,
        unroll=bool(config.memory.unroll),
        backend=config.attention.backend,
        fallback=config.attention.fallback,
        documents=config.attention.max_documents_per_row,
        experts=config.experts.backend,
        capacity_factor=config.experts.capacity_factor if config.experts.dispatch == "all_to_all" else None,
        keep_gathered=not config.parallel.reshard_after_forward,
        neftune_alpha=config.train.neftune_alpha,
        hidden_dropout=config.train.hidden_dropout,
        attention_dropout=config.train.attention_dropout,
        dropout_layers=len(model.spec.layers) if config.train.dropout_by_depth else None,
    )
    return Forward(model.graph, recipe, call)


def _optimizer(model: Model, config: Config) -> Optimizer:
    """Build the optimizer of the trained parameters. Raises UserError if the mesh would split a block of its state."""
    if config.optim.name == "adamw_8bit":
        if complaints := undivided_moments(model.trained, jax.sharding.get_mesh()):
            raise UserError("\n  ".join(["the mesh does not divide the optimizer's state:", *complaints]))
        if unblocked := float32_moments(model.trained):
            log.warning(
                "optim.name='adamw_8bit' keeps float32 moments if no block divides a row: %s", ", ".join(unblocked)
            )
    # Muon multiplies in bfloat16, as its authors' code does. In float16 gradients would underflow before they are
    # divided by their norm.
    dtype = jnp.float32 if config.precision.recipe == "fp32" else jnp.bfloat16
    return build(config.optim, trained_of(model, config), len(model.spec.layers), dtype)


def trained_of(model: Model, config: Config) -> dict[str, Trained]:
    """Return the optimizer's view of each trained parameter."""
    state_specs, moved_by_load = specs_of(model, RULES.value.optimizer), balancing(config.experts.bias_update_rate)
    plugin_rule = plugins.plugin_rule(config)
    return {
        name: Trained(
            tuple(one.name for one in p.places),
            p.lead,
            p.kind in ("linear", "adapter") and len(p.matrix) == 2,  # DoRA's magnitudes are vectors
            state_specs.get(name),
            moved_by_load if p.kind == "correction" else plugin_rule,
            config.memory.offload_optimizer,
            config.lora.lr_ratio if p.local.endswith(".lora_b") or len(p.matrix) == 1 else 1.0,  # LoRA+
        )
        for name, p in model.trained.items()
    }


def specs_of(model: Model, layout: Layout) -> dict[str, P]:
    """Return the trained parameters' PartitionSpecs in one of the rules' layouts; {} if these layouts are all equal."""
    rules = RULES.value
    if rules.parameters == rules.gradients == rules.optimizer:
        return {}
    return {name: spec(*parameter.axes, layout=layout) for name, parameter in model.trained.items()}


def _on_mesh(aval: Any, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh, aval.sharding.spec)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=offload.on_host(sharding) if offload.is_on_host(aval) else sharding
    )


def compile_step(program: Program, config: Config) -> jax.stages.Compiled:
    """Compile the step for the current mesh; each call donates its state."""
    compiled = jax.jit(program.step, donate_argnums=0, compiler_options=compiler_options(config))
    return compiled.lower(*program.arguments).compile()
