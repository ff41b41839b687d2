"""The optimizer of a run: a rule for each parameter, and the state of all rules."""

import importlib
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtune.optim import multipliers
from jaxtune.optim.driver import apply_rule, on_stages, over_stages, update_by_layer
from jaxtune.optim.options import OPTIMIZERS, OptimOptions
from jaxtune.optim.rules import Hyperparameters, Rule, RuleState, Updated, UpdateInputs
from jaxtune.parallel.layout import reshard_to
from jaxtune.parallel.offload import is_on_host, put_like, to_device
from jaxtune.parallel.pipeline_schedule import by_stage
from jaxtune.parallel.random import named_key

Parameters = Mapping[str, Array]


class OptimizerState(NamedTuple):
    """The state of an optimizer.

    Attributes:
        count: number of updates; steps that were not finite do not count.
        rules: state of the rule of each parameter, by name.
    """

    count: Int[Array, ""]
    rules: dict[str, RuleState]


class Optimizer(NamedTuple):
    """The three functions of an optimizer; parameters are a flat dict."""

    init: Callable[[Parameters], OptimizerState]
    update: Callable[[Parameters, OptimizerState, Parameters, UpdateInputs], tuple[dict[str, Array], OptimizerState]]
    """(gradients, state, parameters, step) -> (parameters, state)."""
    point: Callable[[Parameters, OptimizerState], dict[str, Array]]
    """(parameters, state) -> the point at which gradients are computed: the parameters, except with schedule-free."""


class Trained(NamedTuple):
    """Properties of a trained parameter that the optimizer needs.

    Attributes:
        names: Hugging Face names, one for each element of the leading axes.
        lead: sizes of the leading axes: (layers,), or (layers, experts).
        is_matrix: whether it is a matrix inside the layers, which Muon and NorMuon orthogonalise.
        state_spec: PartitionSpec of its state and its update; None: the parameter's own.
        rule: its rule; None: the rule of optim.name.
        on_host: whether its state is kept in host memory.
        rate: factor on its learning rate, in addition to the factors that `optim` has for its names.
    """

    names: tuple[str, ...]
    lead: tuple[int, ...] = ()
    is_matrix: bool = False
    state_spec: jax.P | None = None
    rule: Rule | None = None
    on_host: bool = False
    rate: float = 1.0

    def merge_lead(self, leaf: Array) -> Array:
        """Merge the leading axes (layers, experts), because rules have only one; experts first if they are sharded."""
        if len(self.lead) < 2 or not leaf.ndim:
            return leaf
        # A merged axis can only keep the sharding of its outer part, so a sharded experts axis must come first.
        _, experts, *rest = jax.typeof(leaf).sharding.spec  # layers are unsharded, or manual in a pipeline
        leaf = leaf if experts is None else jnp.moveaxis(leaf, 1, 0)
        # (layers, experts, o, i) -> (layers * experts, o, i), or with sharded experts (experts * layers, o, i)
        return jnp.reshape(leaf, (-1, *leaf.shape[2:]), out_sharding=jax.P(experts, *rest))

    def split_lead(self, leaf: Array) -> Array:
        """Split the leading axis again, the inverse of `merge_lead`."""
        if len(self.lead) < 2 or not leaf.ndim:
            return leaf
        experts, *rest = jax.typeof(leaf).sharding.spec
        # The number of layers is inferred (-1), because in a pipeline the devices of a stage have only some layers.
        if experts is None:
            return jnp.reshape(leaf, (-1, *self.lead[1:], *leaf.shape[1:]), out_sharding=jax.P(None, None, *rest))
        by_expert = (self.lead[1], -1, *leaf.shape[1:])
        return jnp.moveaxis(jnp.reshape(leaf, by_expert, out_sharding=jax.P(experts, None, *rest)), 0, 1)

    def in_order(self, factor: Any, joined: Array) -> Any:
        """Return factors of the elements of the leading axes in the order of the joined parameter."""
        if len(self.lead) < 2 or np.ndim(factor) == 0 or jax.typeof(joined).sharding.spec[0] is None:
            return factor
        return factor.reshape(-1, self.lead[1]).T.reshape(-1)  # (layers * experts) -> (experts * layers)


def build(
    optim: OptimOptions, trained: Mapping[str, Trained], layers: int, dtype: DTypeLike = jnp.bfloat16
) -> Optimizer:
    """Return the optimizer that the options name, for a model with `layers` layers.

    `dtype`: dtype of the factors of Muon's matrix products. Raises UserError for a pattern that matches no trained
    parameter.
    """
    names = {name: parameter.names for name, parameter in trained.items()}
    rates, decays = multipliers.rates(optim, names, layers), multipliers.decays(optim, names)

    rule_of = {name: one.rule or _rule(optim, one.is_matrix, dtype) for name, one in trained.items()}

    def stored_at(name: str, parameter: Array) -> jax.P | None:
        return None if trained[name].state_spec is None else jax.typeof(parameter).sharding.spec

    @jax.named_scope("optimizer")
    def init(parameters: Parameters) -> OptimizerState:
        def of_all(name: str, parameter: Array) -> RuleState:
            init_one = partial(_initial_state, rule_of[name], trained[name], optim.state_dtype)
            parameter = reshard_to(parameter, trained[name].state_spec)
            if not is_staged(parameter):
                return init_one(parameter)
            shapes = jax.eval_shape(init_one, jax.ShapeDtypeStruct(parameter.shape, parameter.dtype))
            return by_stage(init_one, jax.P("stage"), jax.tree.map(over_stages, shapes))(parameter)

        return OptimizerState(jnp.zeros((), jnp.int32), {name: of_all(name, p) for name, p in parameters.items()})

    @jax.named_scope("optimizer")
    def update(gradients: Parameters, state: OptimizerState, parameters: Parameters, step: UpdateInputs):
        after = {}
        for name, parameter in parameters.items():
            rule, properties = rule_of[name], trained[name]
            rate = step.rate
            if optim.name == "muon" and optim.muon.learning_rate and properties.is_matrix:
                rate *= optim.muon.learning_rate / optim.learning_rate  # the same schedule from another peak
            # Random bits depend on the parameter's name, not on the set or order of parameters.
            own_step = step._replace(key=named_key(step.key, name))
            # If the state has its own layout (ZeRO), it is not moved: parameter and gradient are resharded to it, and
            # the new parameter is resharded back.
            resharded, gradient = (reshard_to(x, properties.state_spec) for x in (parameter, gradients[name]))
            run = (
                partial(on_stages, partial(_advance, rule, properties))
                if is_staged(resharded)
                else partial(_advance, rule, properties)
            )
            factors = rates[name] * properties.rate, decays[name]
            new, rule_state = run((resharded, state.rules[name]), gradient, factors, (state.count, rate), own_step)
            after[name] = reshard_to(new, stored_at(name, parameter)), rule_state
        count = state.count + step.finite  # Adam's bias correction counts only steps that were taken
        states = {name: rule_state for name, (_, rule_state) in after.items()}
        return {name: parameter for name, (parameter, _) in after.items()}, OptimizerState(count, states)

    @jax.named_scope("optimizer")
    def point(parameters: Parameters, state: OptimizerState) -> dict[str, Array]:
        def one(name: str, parameter: Array) -> Array:
            resharded = reshard_to(parameter, trained[name].state_spec)
            at = rule_of[name].point(resharded, state.rules[name])
            # A rule without a point of its own returns its argument: then nothing is resharded back.
            return parameter if at is resharded else reshard_to(at.astype(parameter.dtype), stored_at(name, parameter))

        return {name: one(name, parameter) for name, parameter in parameters.items()}

    return Optimizer(init, update, point)


def _initial_state(rule: Rule, properties: Trained, moment_dtype: DTypeLike, parameter: Array) -> RuleState:
    parameter = properties.merge_lead(parameter)

    def as_stored(leaf: Array, parameter: Array) -> Array:
        # Scalars stay float32, and moments in 8 bits stay uint8.
        is_moment = leaf.shape == parameter.shape and leaf.dtype == jnp.float32
        return leaf.astype(moment_dtype) if is_moment else leaf

    def in_its_memory(leaf: Array) -> Array:
        return jax.device_put(leaf, jax.memory.Space.Host) if properties.on_host else leaf

    def first(parameter: Array) -> RuleState:
        state = rule.init(to_device(parameter).astype(jnp.float32))
        return jax.tree.map(lambda leaf: in_its_memory(as_stored(leaf, parameter)), state)

    if properties.lead and (properties.on_host or is_on_host(parameter)):
        # Layer by layer, so that no whole stack is on the device.
        return jax.tree.map(properties.split_lead, jax.lax.map(first, parameter))
    if rule.by_layer and properties.lead:
        # The initial state of such a rule does not depend on values: one layer of zeros gives it for all.
        of_layer = rule.init(_zeros_of_a_layer(parameter))
        state = jax.tree.map(lambda leaf: as_stored(_repeat(leaf, parameter), parameter), of_layer)
    else:
        state = first(parameter)
    return jax.tree.map(properties.split_lead, state)


def is_staged(parameter: Array) -> bool:
    """Return whether a parameter's layers are divided over the stages of a pipeline."""
    return jax.typeof(parameter).sharding.spec[:1] == ("stage",)


def _advance(
    rule: Rule, properties: Trained, before: Updated, gradient: Array, factors: Any, at: Any, step: UpdateInputs
) -> Updated:
    """Return the next parameter and state. at: count and rate. factors: factor on the rate, and weight decay."""
    before, gradient = jax.tree.map(properties.merge_lead, (before, gradient))
    its_at = Hyperparameters(*at, *(properties.in_order(factor, gradient) for factor in factors))
    offloaded = any(map(is_on_host, jax.tree.leaves((before, gradient))))
    if properties.lead and (offloaded or (rule.by_layer and rule.whole is None)):
        after = update_by_layer(rule, before, gradient, its_at, step)
    else:
        arguments = to_device(before), to_device(gradient), its_at, step
        after = apply_rule(rule, *arguments) if rule.whole is None else rule.whole(*arguments, bool(properties.lead))
    return jax.tree.map(properties.split_lead, jax.tree.map(put_like, after, before))


def _zeros_of_a_layer(stacked: Array) -> Array:
    spec = jax.typeof(stacked).sharding.spec
    return jnp.zeros(stacked.shape[1:], jnp.float32, out_sharding=jax.P(*spec[1:]))


def _repeat(leaf: Array, stacked: Array) -> Array:
    """Repeat a layer's state for each layer of a stacked parameter."""
    spec = jax.P(jax.typeof(stacked).sharding.spec[0], *jax.typeof(leaf).sharding.spec)
    return jnp.broadcast_to(leaf, (len(stacked), *leaf.shape), out_sharding=spec)


def _rule(optim: OptimOptions, is_matrix: bool, dtype: DTypeLike) -> Rule:
    properties = optim.properties if is_matrix or not optim.properties.for_matrices else OPTIMIZERS["adamw"]
    file, _, function = properties.rule.partition(".")
    arguments = [operator.attrgetter(option)(optim) for option in properties.arguments]
    of_file = importlib.import_module(f"jaxtune.optim.{file}")
    return getattr(of_file, function)(*arguments, *([dtype] if properties.for_matrices else []))


@jax.named_scope("optimizer")
def clip_factor(norm: Float[Array, ""], max_norm: float) -> Float[Array, ""]:
    """Return the factor on gradients that limits their global norm to max_norm; a max_norm of 0 never clips."""
    return jnp.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else jnp.ones_like(norm)  # 1e-6 as in torch
