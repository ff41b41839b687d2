"""The interface of an optimizer, a `Rule` for one parameter; and the rules made of optax's.

`At.count` takes the place of optax's counters, so that a state holds arrays of the parameter alone. Weight decay is
decoupled everywhere (Loshchilov & Hutter 2019), also where the published rule has it in the gradient or has none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float, Int

# Arrays with the leading axis of a stacked parameter, sharded as it is; or scalars.
RuleState = Any
# A parameter and the state of its rule.
Updated = tuple[Array, RuleState]


class At(NamedTuple):
    """The count, learning rate and decay of an update.

    multiplier and decay are numbers, or arrays (layers, 1, ...) where the layers of a stacked parameter differ.
    """

    count: Int[Array, ""]  # updates before this one; steps that were not finite do not count
    rate: Float[Array, ""]  # learning rate of the step
    multiplier: Any  # of the learning rate, for this parameter
    decay: Any  # weight decay of this parameter


class Step(NamedTuple):
    """What all parameters share in an update."""

    rate: Float[Array, ""]  # learning rate
    factor: Float[Array, ""]  # multiplies each gradient where it is used: no scaled copy of all of them is made
    finite: Bool[Array, ""]  # False: nothing changes
    key: Array  # for stochastic rounding
    first: Any = 0  # of a stack that is updated a part at a time, the number of the first layer in this part


def _itself(parameter: Array, state: RuleState) -> Array:
    return parameter


class Rule(NamedTuple):
    """How one parameter, a matrix, a vector or a stack of them, becomes the next.

    Parameters, gradients and the floating arrays of the state are float32 here, whatever they are stored in. `driver`
    rounds them, to bfloat16 stochastically, and keeps the old ones after a step that was not finite.
    """

    init: Callable[[Float[Array, "..."]], RuleState]
    update: Callable[[Float[Array, "..."], RuleState, Float[Array, "..."], At], tuple[Float[Array, "..."], RuleState]]
    """(gradient, state, parameter, at) -> (parameter, state)."""
    point: Callable[[Float[Array, "..."], RuleState], Float[Array, "..."]] = _itself
    """(parameter, state) -> where the gradient is to be taken."""
    by_layer: bool = False
    """Called for one layer of a stacked parameter after another, so that temporaries are of one layer."""
    whole: Callable[[Updated, Array, At, Step, bool], Updated] | None = None
    """(before, gradient, at, step, stacked) -> after, in place of `update`, with all that `driver` does around it.

    Arrays come as they are stored, and a stacked parameter comes whole. For a rule with a kernel of its own.
    """


def descend(parameter: Float[Array, "..."], direction: Float[Array, "..."], at: At) -> Float[Array, "..."]:
    """A step along a direction, with decoupled weight decay (Loshchilov & Hutter 2019)."""
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
    """SGD with torch's momentum, without dampening; decay as in SGDW (arXiv:1711.05101). Momentum 0 keeps no state."""
    if not momentum:
        return Rule(lambda _: {}, lambda gradient, state, parameter, at: (descend(parameter, gradient, at), state))
    trace: Any = optax.trace(momentum)

    def update(gradient, state, parameter, at):
        direction, after = trace.update(gradient, optax.TraceState(state["trace"]))
        return descend(parameter, direction, at), {"trace": after.trace}

    return Rule(lambda parameter: {"trace": jnp.zeros_like(parameter)}, update)


def balancing(rate: float) -> Rule:
    """What is added to a router's scores to choose experts, moved by their load alone (arXiv:2408.15664, algorithm 1).

    Up by `rate` where an expert is chosen less often than the mean, down where it is more often. The gradient is by how
    much it is more, summed over the batch; learning rate and decay are not read.
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

    As optax.adafactor without multiply_by_parameter_scale: matrices with both dimensions of 128 and more keep means of
    the squared gradient over rows and columns, anything else keeps it whole.
    """
    factored: Any = optax.scale_by_factored_rms()
    clip: Any = optax.clip_by_block_rms(1.0)

    def init(parameter):
        _, row, column, whole = factored.init(parameter)
        return {"whole": whole} if whole.shape == parameter.shape else {"row": row, "column": column}

    def update(gradient, state, parameter, at):
        absent = jnp.zeros(1)  # optax's placeholder for means that are not kept
        means = (state.get(name, absent) for name in ("row", "column", "whole"))
        direction, after = factored.update(gradient, optax.FactoredState(at.count, *means), parameter)
        direction, _ = clip.update(direction, optax.EmptyState())
        kept = {"row": after.v_row, "column": after.v_col, "whole": after.v}
        return descend(parameter, direction, at), {name: kept[name] for name in state}

    return Rule(init, update, by_layer=True)


def schedule_free(beta1: float, beta2: float, epsilon: float) -> Rule:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as optax.contrib.schedule_free_adamw.

    The parameter is the average x, which is evaluated and exported. The state has the base sequence z, which starts as
    a copy of the parameter, the second moment, and the two scalars that weigh the average by the squared rate. Gradient
    and decay are taken at y = (1 - beta1) z + beta1 x: `Rule.point`.

    Raises ValueError where beta1 is not above 0: x could not be recovered from y.
    """
    if not beta1 > 0.0:
        raise ValueError(f"schedule_free needs beta1 > 0, not {beta1}")
    adam: Any = optax.scale_by_adam(0.0, beta2, epsilon)

    def init(parameter):
        scalars = {name: jnp.zeros((), jnp.float32) for name in ("weight_sum", "max_lr")}
        return {"z": parameter.copy(), "nu": jnp.zeros_like(parameter), **scalars}

    def point(parameter: Float[Array, "..."], state: RuleState) -> Float[Array, "..."]:
        return (1.0 - beta1) * state["z"] + beta1 * parameter

    def update(gradient, state, parameter, at: At):
        at_y = point(parameter, state)
        before = optax.ScaleByAdamState(count=at.count, mu=jnp.zeros_like(gradient), nu=state["nu"])
        direction, moments = adam.update(gradient, before)
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
        average: Any = optax.contrib.schedule_free_eval_params(after, at_y + change)
        kept = {"z": after.z, "nu": moments.nu, "weight_sum": after.weight_sum, "max_lr": after.max_lr}
        return average, kept

    return Rule(init, update, point)
