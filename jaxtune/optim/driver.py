"""Run a rule's update on parameters and state as they are stored: dtypes, stacks, host memory, pipeline stages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float32

from jaxtune.optim.rules import Hyperparameters, Rule, Updated, UpdateInputs
from jaxtune.parallel.offload import put_like, to_device
from jaxtune.parallel.pipeline_schedule import by_stage
from pallas_kernels.stochastic_rounding import random_bits, to_bfloat16


def apply_rule(rule: Rule, before: Updated, gradient: Array, at: Hyperparameters, step: UpdateInputs) -> Updated:
    """Return the next parameter and state, in the dtypes of `before`; unchanged if the step was not finite."""
    at = Hyperparameters(
        at.count, at.rate, *(_along_layers(value, before[0].ndim) for value in (at.multiplier, at.decay))
    )
    parameter, state = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, before)
    after = rule.update(gradient.astype(jnp.float32) * step.factor, state, parameter, at)
    new, tree = jax.tree.flatten(after)
    keys = jax.random.split(step.key, len(new))

    def to_stored_dtype(new: Array, old: Array, key: Array) -> Array:
        # To nearest, a change below half a unit in the last place of bfloat16 would always be lost.
        narrows = old.dtype == jnp.bfloat16 and new.dtype == jnp.float32
        return jnp.where(
            step.finite, round_stochastically(new, key, step.first) if narrows else new.astype(old.dtype), old
        )

    return jax.tree.unflatten(tree, [to_stored_dtype(*leaf) for leaf in zip(new, jax.tree.leaves(before), keys)])


def _along_layers(value: Any, dimensions: int) -> Any:
    """Return a number unchanged; reshape numbers of layers to broadcast over a stacked parameter."""
    return value.reshape(-1, *(1,) * (dimensions - 1)) if np.ndim(value) else value


def update_by_layer(rule: Rule, before: Updated, gradient: Array, at: Hyperparameters, step: UpdateInputs) -> Updated:
    """Update a stack in place, one layer after another, so that float32 temporaries are of one layer.

    Arrays in host memory are on the device a layer at a time. A rule that is not `by_layer` gets a stack of one layer;
    its result is the same as for the whole stack.
    """
    whole, stacked = rule.whole, rule.whole is not None or not rule.by_layer

    def one(layer: Array, stack: Any) -> Any:
        return to_device(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=stacked), stack))

    def of_layer(value: Any, layer: Array) -> Any:
        return jnp.asarray(value)[layer] if np.ndim(value) else value

    def body(layer: Array, stack: Updated) -> Updated:
        layer_at = Hyperparameters(at.count, at.rate, of_layer(at.multiplier, layer), of_layer(at.decay, layer))
        # A stack's random bits depend on `first`, the layer's number, so that they equal those of a whole stack.
        change = {"first": layer} if stacked else {"key": jax.random.fold_in(step.key, layer)}
        arguments = one(layer, stack), one(layer, gradient), layer_at, step._replace(**change)
        after = apply_rule(rule, *arguments) if whole is None else whole(*arguments, True)
        after = jax.tree.map(put_like, after, stack)
        return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, layer, 0), stack, after)

    return jax.lax.fori_loop(0, len(gradient), body, before)


def over_stages(leaf: Any) -> jax.P:
    """Return the PartitionSpec of an array with the layers of all stages, or of a number that all stages share."""
    return jax.P("stage") if np.ndim(leaf) else jax.P()


def on_stages(
    update: Callable[..., Updated], before: Updated, gradient: Array, factors: Any, at: Any, step: UpdateInputs
):
    """Run an update of a parameter whose layers are divided over stages: each stage updates its own layers."""

    def update_own(before: Updated, gradient: Array, factors: Any, at: Any, step: UpdateInputs) -> Updated:
        # Indices of layers begin at 0 on every stage, so without the stage their random bits would be equal.
        key = jax.random.fold_in(step.key, jax.lax.axis_index("stage"))
        return update(before, gradient, factors, at, step._replace(key=key))

    spread = jax.tree.map(over_stages, (before, gradient, factors))
    return by_stage(update_own, (*spread, jax.P(), jax.P()), spread[0])(before, gradient, factors, at, step)


def round_stochastically(x: Float32[Array, "*shape"], key: Array, first: Any = 0) -> BFloat16[Array, "*shape"]:
    """Round each value to one of the two bfloat16 around it, the nearer one more likely; infinity and NaN are kept.

    Random bits depend on the key and on an element's indices, not on the sharding. first: index of x's first element in
    the stack, if x is a part of a stack.
    """
    spec = jax.typeof(x).sharding.spec
    indices = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=spec) for axis in range(x.ndim)]
    indices[:1] = [index + jnp.asarray(first, jnp.uint32) for index in indices[:1]]
    return to_bfloat16(x, random_bits(jax.random.bits(key, (2,), jnp.uint32), *indices))
