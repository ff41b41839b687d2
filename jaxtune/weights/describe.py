"""Descriptions of a run's model, its sharding and its pipeline for the log."""

import dataclasses
import math
from collections.abc import Collection

import jax

from jaxtune.config.schema import Config
from jaxtune.errors import format_bytes, format_count
from jaxtune.models.parameters import abstract, count
from jaxtune.parallel.layout import RULES, Layout, axes_of
from jaxtune.parallel.pipeline_schedule import schedule
from jaxtune.weights.model import Model


def _describe_sharding(layout: Layout, axes: Collection[str]) -> str:
    """Describe which dimensions these mesh axes shard."""
    dimensions: dict[str, list[str]] = {}
    for field in dataclasses.fields(layout):
        if over := [axis for axis in axes_of(field.name, layout) if axis in axes]:
            dimensions.setdefault(" and ".join(over), []).append(field.name)
    divided = "; ".join(f"{', '.join(names)} over {over}" for over, names in dimensions.items())
    return divided or "replicated on every device"


def describe_pipeline(model: Model, config: Config) -> str:
    """Describe in one line which layers the stages compute and how long a stage waits for others."""
    (stack,) = (one for one in model.spec.stacks if one.stages > 1)  # one stack is divided, the longest
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
    """Describe in one line the model and the sharding of its parameters."""
    sharding_axes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    rules = RULES.value
    layouts = {"weights": rules.parameters, "gradients": rules.gradients, "optimizer state": rules.optimizer}
    laid_out: dict[str, list[str]] = {}
    for what, layout in layouts.items():
        laid_out.setdefault(_describe_sharding(layout, sharding_axes), []).append(what)
    sizes = " ".join(f"{axis}={size}" for axis, size in sharding_axes.items())
    divided = "; ".join(f"{', '.join(kinds)}: {text}" for text, kinds in laid_out.items())
    where = f"{mesh.size} devices, {sizes}; {divided}" if sharding_axes else "one device"
    stored = ""
    if model.quantized:
        arrays = jax.tree.leaves(abstract(model.quantized))
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)  # bytes, with the scales
        kinds = ", ".join(sorted({p.treatment.stored.elements for p in model.quantized.values()}))
        stored = f", {count(model.quantized, model.spec):,} of them frozen in {kinds}: {format_bytes(size)}"
    layers = f"{len(model.spec.layers)} layers"
    if model.spec.mtp:
        layers += f" and {format_count(len(model.spec.mtp), 'module')} for further tokens"
    return (
        f"{model.spec.family}, {layers}, {count(model.parameters, model.spec):,} parameters{stored}, "
        f"{count(model.trained, model.spec):,} trained; {where}"
    )
