"""What a run's model is and where its parameters live, in words for the log."""

import dataclasses
import math
from collections.abc import Set
from typing import Any

import jax

from jaxtune.config.schema import Config
from jaxtune.models.parameters import abstract, count
from jaxtune.parallel.layout import RULES, Layout, axes_of, spec
from jaxtune.parallel.pipeline import schedule
from jaxtune.run.model import Model


def _divided(layout: Layout, axes: Set[str]) -> dict[str, Any]:
    """By logical dimension, the mesh axes that divide it."""
    names = (field.name for field in dataclasses.fields(layout))
    return {name: spec(name, layout=layout)[0] for name in names if not axes.isdisjoint(axes_of(name, layout))}


def describe_pipeline(model: Model, config: Config) -> str:
    """Which layers its stages compute, and how long a stage waits for others, one line."""
    (stack,) = (one for one in model.spec.stacks if one.stages > 1)
    order, count = config.parallel.pipeline, config.train.grad_accum_steps
    made = schedule(stack.stages, stack.chunks, count, order)
    layers, rest = len(stack.period) * stack.repeats, len(model.spec.layers) - len(stack.period) * stack.repeats
    return (
        f"pipeline: {layers} layers from layer {stack.first} in {stack.stages} stages"
        f"{f' of {stack.chunks} virtual ones' if stack.chunks > 1 else ''}"
        f"{f', the other {rest} on all devices' if rest else ''}; {order} over {count} micro-batches "
        f"(train.grad_accum_steps): a stage waits {made.bubble:.0%} of the time and holds {made.slots} inputs"
    )


def describe_layout(model: Model, mesh: jax.sharding.Mesh) -> str:
    """What the model is and where its parameters live, one line."""
    spread = {axis: size for axis, size in mesh.shape.items() if size > 1}
    rules = RULES.value
    layouts = {"weights": rules.parameters, "gradients": rules.gradients, "optimizer state": rules.optimizer}
    laid_out = {what: _divided(layout, spread.keys()) for what, layout in layouts.items()}
    if laid_out["weights"] == laid_out["optimizer state"]:
        laid_out = {"all": laid_out["weights"]}
    where = f"mesh {spread}, sharded: {laid_out}" if spread else "one device"
    stored = ""
    if model.quantized:
        arrays = jax.tree.leaves(abstract(model.quantized))
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        kinds = ", ".join(sorted({p.treatment.stored.elements for p in model.quantized.values()}))
        stored = f", {count(model.quantized):,} of them frozen in {kinds}: {size / 1e9:.2f} GB"
    return (
        f"{model.spec.family}, {len(model.spec.layers)} layers, {count(model.parameters):,} parameters{stored}, "
        f"{count(model.trained):,} trained; {where}"
    )
