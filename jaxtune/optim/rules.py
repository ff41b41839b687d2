"""The interface of an optimizer, a `Rule` for one parameter; and the rules that are made from optax's.

`Hyperparameters.count` replaces optax's counters, so that a state has only arrays of the parameter. Weight
decay is decoupled in every rule (Loshchilov & Hutter 2019), even if the published rule adds it to the gradient or has
none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float, Int

# Arrays with the leading axis of a stacked parameter and its sharding; or scalars.
RuleState = Any
# A parameter and the state of its rule.
Updated = tuple[Array, RuleState]


class Hyperparameters(NamedTuple):
    """The count, learning rate and decay of an update.

    multiplier and decay are numbers, or arrays (layers, 1, ...) if the layers of a stacked parameter differ.

    Attributes:
        count: number of updates before this one; steps that were not finite do not count.
        rate: learning rate of the step.
        multiplier: factor on the learning rate for this parameter.
        decay: weight decay of this parameter.
    """

    count: Int[Array, ""]
    rate: Float[Array, ""]
    multiplier: Any
    decay: Any


class UpdateInputs(NamedTuple):
    """Arguments of an update that all parameters share.

    Attributes:
        rate: learning rate.
        factor: multiplies each gradient when it is used, so that no scaled copy of all gradients is made.
        finite: whether the step is finite; if not, nothing changes.
        key: random key for stochastic rounding.
        first: number of the first layer in this part, for a stack that is updated in parts.
    """

    rate: Float[Array, ""]
    factor: Float[Array, ""]
    finite: Bool[Array, ""]
    key: Array
    first: Any = 0


def _itself(parameter: Array, state: RuleState) -> Array:
    return parameter


class Rule(NamedTuple):
    """The update of one parameter: a matrix, a vector, or a stack of matrices or vectors.

    A rule sees parameters, gradients and the floating-point arrays of its state in float32, whatever their stored
    dtype. `driver` rounds results to that dtype (to bfloat16 stochastically), and keeps the old values after a step
    that was not finite.
    """

    init: Callable[[Float[Array, "..."]], RuleState]
    update: Callable[
        [Float[Array, "..."], RuleState, Float[Array, "..."], Hyperparameters], tuple[Float[Array, "..."], RuleState]
    ]
    """(gradient, state, parameter, at) -> (parameter, state)."""
    point: Callable[[Float[Array, "..."], RuleState], Float[Array, "..."]] = _itself
    """(parameter, state) -> the point at which the gradient is computed."""
    by_layer: bool = False
    """Whether it is called for one layer of a stacked parameter after another, so that temporaries are of one layer."""
    whole: Callable[[Updated, Array, Hyperparameters, UpdateInputs, bool], Updated] | None = None
    """(before, gradient, at, step, stacked) -> after, instead of `update`, for a rule with its own kernel.

    It gets arrays as they are stored and a stacked parameter whole, and does the rounding that `driver` does otherwise.
    """


def descend(parameter: Float[Array, "..."], direction: Float[Array, "..."], at: Hyperparameters) -> Float[Array, "..."]:
    """Step against a direction, with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return parameter - at.rate * at.multiplier * (direction + at.decay * parameter)


def adamw(beta1: float, beta2: float, epsilon: float) -> Rule:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    adam: Any = optax.scale_by_adam(beta1, beta2, epsilon)

    def init(parameter):
        return {"mu": jnp.zeros_like(parameter), "nu": jnp.zeros_like(parameter)}

    def update(gradient, state, parameter, at):
        before = optax.ScaleByAdamState(count=at.count, mu=state["mu"], nu=state["nu"])
        direction, after = adam.update(gradient, before)
        return descend(parameter, direction, at), {"mu": after.mu, "nu": after.nu}

    return Rule(init, update)


def sgd(momentum: float) -> Rule:
    """SGD with torch's momentum, without dampening; decay as in SGDW (arXiv:1711.05101). Momentum 0 has no state."""
    if not momentum:
        return Rule(lambda _: {}, lambda gradient, state, parameter, at: (descend(parameter, gradient, at), state))
    trace: Any = optax.trace(momentum)

    def update(gradient, state, parameter, at):
        direction, after = trace.update(gradient, optax.TraceState(state["trace"]))
        return descend(parameter, direction, at), {"trace": after.trace}

    return Rule(lambda parameter: {"trace": jnp.zeros_like(parameter)}, update)


def balancing(rate: float) -> Rule:
    """Update a router's corrections by the load of the experts (auxiliary-loss-free; arXiv:2408.15664, algorithm 1).

    An expert's correction increases by `rate` if it is chosen less often than the mean, and decreases by `rate` if more
    often. In place of a gradient the rule gets each expert's choices minus the mean, summed over the batch. Learning
    rate and decay are not used.
    """
    return Rule(lambda _: {}, lambda excess, state, correction, at: (correction - rate * jnp.sign(excess), state))


def lion(beta1: float, beta2: float) -> Rule:
    """Lion (Chen et al. 2023, arXiv:2302.06675)."""
    sign: Any = optax.scale_by_lion(beta1, beta2)

    def update(gradient, state, parameter, at):
        direction, after = sign.update(gradient, optax.ScaleByLionState(count=at.count, mu=state["mu"]))
        return descend(parameter, direction, at), {"mu": after.mu}

    return Rule(lambda parameter: {"mu": jnp.zeros_like(parameter)}, update)


def adafactor() -> Rule:
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) with the schedule's learning rate and without momentum.

    As optax.adafactor without multiply_by_parameter_scale. For a matrix with both dimensions at least 128, the state
    has means of the squared gradient over rows and over columns; for any other parameter it has one for each element.
    """
    factored: Any = optax.scale_by_factored_rms()
    clip: Any = optax.clip_by_block_rms(1.0)

    def init(parameter):
        _, row, column, whole = factored.init(parameter)  # means that are not used have shape (1,)
        return {"whole": whole} if whole.shape == parameter.shape else {"row": row, "column": column}

    def update(gradient, state, parameter, at):
        absent = jnp.zeros(1)  # optax's placeholder for means that are not in the state
        means = (state.get(name, absent) for name in ("row", "column", "whole"))
        direction, after = factored.update(gradient, optax.FactoredState(at.count, *means), parameter)
        direction, _ = clip.update(direction, optax.EmptyState())
        new = {"row": after.v_row, "column": after.v_col, "whole": after.v}
        return descend(parameter, direction, at), {name: new[name] for name in state}

    return Rule(init, update, by_layer=True)


def schedule_free(beta1: float, beta2: float, epsilon: float) -> Rule:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as optax.contrib.schedule_free_adamw.

    The parameter is the average x, which is evaluated and exported. The state has the base sequence z, which starts as
    a copy of the parameter, the second moment, and the two scalars that weigh the average by the squared rate. Gradient
    and decay are computed at y = (1 - beta1) z + beta1 x: `Rule.point`.

    Raises ValueError if beta1 is not above 0, because x could not be recovered from y.
    """
    if not beta1 > 0.0:
        raise ValueError(f"schedule_free needs beta1 > 0, not {beta1}")
    adam: Any = optax.scale_by_adam(0.0, beta2, epsilon)  # the interpolation y replaces the first moment

    def init(parameter):
        scalars = {name: jnp.zeros((), jnp.float32) for name in ("weight_sum", "max_lr")}
        return {"z": parameter.copy(), "nu": jnp.zeros_like(parameter), **scalars}

    def point(parameter: Float[Array, "..."], state: RuleState) -> Float[Array, "..."]:
        return (1.0 - beta1) * state["z"] + beta1 * parameter

    def update(gradient, state, parameter, at: Hyperparameters):
        at_y = point(parameter, state)
        before = optax.ScaleByAdamState(count=at.count, mu=jnp.zeros_like(gradient), nu=state["nu"])
        direction, moments = adam.update(gradient, before)
        # optax's wrapper expects an optimizer that gives the step of z, and returns the change of y.
        base = optax.stateless(lambda direction, y: -at.rate * at.multiplier * (direction + at.decay * y))
        averaging: Any = optax.contrib.schedule_free(base, at.rate, b1=beta1)
        change, after = averaging.update(
            direction,
            optax.contrib.ScheduleFreeState(
                b1=jnp.float32(beta1),
                weight_sum=state["weight_sum"],
                step_count=at.count,
                max_lr=state["max_lr"],
                base_optimizer_state=optax.EmptyState(),
                z=state["z"],
            ),
            at_y,
        )
        # From y back to x, which is the stored parameter.
        average: Any = optax.contrib.schedule_free_eval_params(after, at_y + change)
        new_state = {"z": after.z, "nu": moments.nu, "weight_sum": after.weight_sum, "max_lr": after.max_lr}
        return average, new_state

    return Rule(init, update, point)
