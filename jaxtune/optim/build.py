"""The optimizer of a run: a rule for each parameter, and the state of them all."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtune.config.schema import Optim
from jaxtune.optim import multipliers, rules
from jaxtune.optim.adamw_8bit import adamw_8bit
from jaxtune.optim.driver import layer_after_layer, on_stages, over_stages, updated
from jaxtune.optim.muon import muon, normuon
from jaxtune.optim.rules import At, Rule, RuleState, Step, Updated
from jaxtune.parallel.layout import moved
from jaxtune.parallel.offload import is_on_host, put_beside, to_device
from jaxtune.parallel.pipeline_schedule import by_stage
from jaxtune.parallel.random import named_key

Parameters = Mapping[str, Array]


class OptimizerState(NamedTuple):
    """What an optimizer remembers."""

    count: Int[Array, ""]  # of updates; steps that were not finite do not count
    rules: dict[str, RuleState]


class Optimizer(NamedTuple):
    """The three functions of an optimizer; parameters are a flat dict."""

    init: Callable[[Parameters], OptimizerState]
    update: Callable[[Parameters, OptimizerState, Parameters, Step], tuple[dict[str, Array], OptimizerState]]
    """(gradients, state, parameters, step) -> (parameters, state)."""
    point: Callable[[Parameters, OptimizerState], dict[str, Array]]
    """(parameters, state) -> where gradients are to be taken: the parameters themselves, but for schedule-free."""


class Trained(NamedTuple):
    """What the optimizer must know of a parameter besides its values."""

    names: tuple[str, ...]  # Hugging Face names, one for each element of the leading axes
    lead: tuple[int, ...] = ()  # sizes of its leading axes: (layers,), or (layers, experts)
    is_matrix: bool = False  # a matrix inside the layers: those Muon and NorMuon orthogonalise
    place: jax.P | None = None  # PartitionSpec of its state and its update; None: the parameter's own
    rule: Rule | None = None  # None: that of optim.name
    on_host: bool = False  # whether its state waits in the host's memory
    rate: float = 1.0  # of its learning rate, a factor beside those that `optim` gives its names

    def joined(self, leaf: Array) -> Array:
        """Leading axes (layers, experts) merged into one, as rules know only one; experts first if they are sharded."""
        if len(self.lead) < 2 or not leaf.ndim:
            return leaf
        _, experts, *rest = jax.typeof(leaf).sharding.spec
        leaf = leaf if experts is None else jnp.moveaxis(leaf, 1, 0)
        return jnp.reshape(leaf, (-1, *leaf.shape[2:]), out_sharding=jax.P(experts, *rest))

    def parted(self, leaf: Array) -> Array:
        """`joined` undone."""
        if len(self.lead) < 2 or not leaf.ndim:
            return leaf
        experts, *rest = jax.typeof(leaf).sharding.spec
        # Of a pipeline the devices of a stage have some of the layers.
        if experts is None:
            return jnp.reshape(leaf, (-1, *self.lead[1:], *leaf.shape[1:]), out_sharding=jax.P(None, None, *rest))
        by_expert = (self.lead[1], -1, *leaf.shape[1:])
        return jnp.moveaxis(jnp.reshape(leaf, by_expert, out_sharding=jax.P(experts, None, *rest)), 0, 1)

    def in_order(self, factor: Any, joined: Array) -> Any:
        """A factor of each element of the leading axes, in the order of the joined parameter."""
        if len(self.lead) < 2 or np.ndim(factor) == 0 or jax.typeof(joined).sharding.spec[0] is None:
            return factor
        return factor.reshape(-1, self.lead[1]).T.reshape(-1)


def build(optim: Optim, trained: Mapping[str, Trained], layers: int, dtype: DTypeLike = jnp.bfloat16) -> Optimizer:
    """The optimizer that the options name, for a model with so many layers; `dtype`: of Muon's matrix products.

    Raises UserError for a pattern that matches no trained parameter.
    """
    names = {name: parameter.names for name, parameter in trained.items()}
    rates, decays = multipliers.rates(optim, names, layers), multipliers.decays(optim, names)

    of = {name: own.rule or _rule(optim, own.is_matrix, dtype) for name, own in trained.items()}

    def stored_at(name: str, parameter: Array) -> jax.P | None:
        return None if trained[name].place is None else jax.typeof(parameter).sharding.spec

    def init(parameters: Parameters) -> OptimizerState:
        def one(name: str, parameter: Array) -> RuleState:
            rule, own = of[name], trained[name]
            parameter = own.joined(parameter)

            def first(parameter: Array) -> RuleState:
                state = rule.init(to_device(parameter).astype(jnp.float32))
                return jax.tree.map(lambda leaf: in_its_memory(_as_stored(leaf, parameter)), state)

            def in_its_memory(leaf: Array) -> Array:
                return jax.device_put(leaf, jax.memory.Space.Host) if own.on_host else leaf

            if own.lead and (own.on_host or is_on_host(parameter)):
                return jax.tree.map(own.parted, jax.lax.map(first, parameter))
            if rule.by_layer and own.lead:
                # Their first state depends on no value: that of one layer of zeros serves all.
                of_layer = rule.init(_zeros_of_a_layer(parameter))
                state = jax.tree.map(lambda leaf: _as_stored(_repeated(leaf, parameter), parameter), of_layer)
            else:
                state = first(parameter)
            return jax.tree.map(own.parted, state)

        def of_all(name: str, parameter: Array) -> RuleState:
            own, here = partial(one, name), moved(parameter, trained[name].place)
            if not staged(here):
                return own(here)
            shapes = jax.eval_shape(own, jax.ShapeDtypeStruct(here.shape, here.dtype))
            return by_stage(own, jax.P("stage"), jax.tree.map(over_stages, shapes))(here)

        return OptimizerState(jnp.zeros((), jnp.int32), {name: of_all(name, p) for name, p in parameters.items()})

    def _as_stored(leaf: Array, parameter: Array) -> Array:
        is_moment = leaf.shape == parameter.shape and leaf.dtype == jnp.float32
        return leaf.astype(optim.state_dtype) if is_moment else leaf

    def update(gradients: Parameters, state: OptimizerState, parameters: Parameters, step: Step):
        after = {}
        for name, parameter in parameters.items():
            rule, own = of[name], trained[name]
            rate = step.rate
            if optim.name == "muon" and optim.muon.learning_rate and own.is_matrix:
                rate *= optim.muon.learning_rate / optim.learning_rate
            own_step = step._replace(key=named_key(step.key, name))
            # With a layout of its own (ZeRO) the state stays where it is: parameter and gradient come to it, and the
            # new parameter goes back.
            here, gradient = (moved(x, own.place) for x in (parameter, gradients[name]))
            run = partial(on_stages, partial(_advanced, rule, own)) if staged(here) else partial(_advanced, rule, own)
            factors = rates[name] * own.rate, decays[name]
            new, rule_state = run((here, state.rules[name]), gradient, factors, (state.count, rate), own_step)
            after[name] = moved(new, stored_at(name, parameter)), rule_state
        count = state.count + step.finite
        states = {name: rule_state for name, (_, rule_state) in after.items()}
        return {name: parameter for name, (parameter, _) in after.items()}, OptimizerState(count, states)

    def point(parameters: Parameters, state: OptimizerState) -> dict[str, Array]:
        def one(name: str, parameter: Array) -> Array:
            here = moved(parameter, trained[name].place)
            found = of[name].point(here, state.rules[name])
            return parameter if found is here else moved(found.astype(parameter.dtype), stored_at(name, parameter))

        return {name: one(name, parameter) for name, parameter in parameters.items()}

    return Optimizer(init, update, point)


def staged(parameter: Array) -> bool:
    """Whether its layers are divided over the stages of a pipeline."""
    return jax.typeof(parameter).sharding.spec[:1] == ("stage",)


def _advanced(rule: Rule, own: Trained, before: Updated, gradient: Array, factors: Any, at: Any, step: Step) -> Updated:
    """The next parameter and state; `at`: count and rate, `factors`: those of the rate and of the decay."""
    before, gradient = jax.tree.map(own.joined, (before, gradient))
    where = At(*at, *(own.in_order(factor, gradient) for factor in factors))
    waits = any(map(is_on_host, jax.tree.leaves((before, gradient))))
    if own.lead and (waits or (rule.by_layer and rule.whole is None)):
        now = layer_after_layer(rule, before, gradient, where, step)
    else:
        given = to_device(before), to_device(gradient), where, step
        now = updated(rule, *given) if rule.whole is None else rule.whole(*given, bool(own.lead))
    return jax.tree.map(own.parted, jax.tree.map(put_beside, now, before))


def _zeros_of_a_layer(stacked: Array) -> Array:
    spec = jax.typeof(stacked).sharding.spec
    return jnp.zeros(stacked.shape[1:], jnp.float32, out_sharding=jax.P(*spec[1:]))


def _repeated(leaf: Array, stacked: Array) -> Array:
    """A layer's state for each layer of a stacked parameter."""
    place = jax.P(jax.typeof(stacked).sharding.spec[0], *jax.typeof(leaf).sharding.spec)
    return jnp.broadcast_to(leaf, (len(stacked), *leaf.shape), out_sharding=place)


def _rule(optim: Optim, is_matrix: bool, dtype: DTypeLike) -> Rule:
    adamw = rules.adamw(optim.beta1, optim.beta2, optim.epsilon)
    match optim.name:
        case "adamw":
            return adamw
        case "adamw_8bit":
            return adamw_8bit(optim.beta1, optim.beta2, optim.epsilon)
        case "sgd":
            return rules.sgd(optim.beta1)
        case "lion":
            return rules.lion(optim.beta1, optim.beta2)
        case "adafactor":
            return rules.adafactor()
        case "schedule_free":
            return rules.schedule_free(optim.beta1, optim.beta2, optim.epsilon)
        case "muon":
            options = optim.muon
            rule = muon(options.momentum, options.nesterov, options.ns_steps, options.adjust_lr, dtype)
            return rule if is_matrix else adamw
        case "normuon":
            options = optim.normuon
            rule = normuon(options.momentum, options.beta2, options.ns_steps, options.cautious_wd, dtype)
            return rule if is_matrix else adamw
    raise AssertionError(f"schema allows an optimizer that is not here: {optim.name}")


def clip_factor(norm: Float[Array, ""], max_norm: float) -> Float[Array, ""]:
    """What to multiply gradients by so that their global norm is at most max_norm; 0 never clips."""
    return jnp.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else jnp.ones_like(norm)
