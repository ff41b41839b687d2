"""The linear layers multiplied in low precision: their weights in a step, and their delayed scales."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.operands import MatmulFormat, Operands
from jaxtune.quant.array import QuantizedArray, divisors
from jaxtune.quant.format import Format

Scales = dict[str, Float[Array, "*lead 2"]]
Amax = dict[str, Float[Array, "*lead 2 history"]]


class LinearWeight(Protocol):
    """The declared weight of a linear layer, or of a stack of them (`models.parameters.Parameter`)."""

    @property
    def trained(self) -> bool:
        """Whether it gets a gradient."""
        ...

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes, such as layers and experts."""
        ...

    @property
    def matrix_axes(self) -> tuple[str | None, ...]:
        """Logical names of the two dimensions of one matrix."""
        ...


class StepWeights(Protocol):
    """The weights of linear layers as a step multiplies by them: `Linears`, or `ServedLinears` of weights."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The layers' weights, stacked, by name."""
        ...

    def of(self, parameters: Mapping[str, Any]) -> Self:
        """Return the same for these weights."""
        ...

    def initial_amax(self) -> Amax:
        """Return the history before the first step."""
        ...

    def scales(self, amax: Amax, step: Int[Array, ""]) -> Scales:
        """Return the delayed scales of a step."""
        ...

    def extend_history(self, amax: Amax, found: dict[str, Array], finite: Array) -> Amax:
        """Return the history after a step."""
        ...

    def operands(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is made from all weights once in a step."""
        ...

    def wrap_weights(self, weights: Mapping[str, Any], operands: Mapping[str, Any], scales: Scales) -> dict[str, Any]:
        """Return all weights, in which the layers' weights are as the step multiplies by them."""
        ...


@dataclass(frozen=True)
class Linears:
    """The linear layers that are multiplied in low precision, and how.

    Attributes:
        numbers: the format of operands and how they are multiplied.
        parameters: the weights, stacked, by name.
        history: number of past steps whose amax sets the next step's scales (delayed scaling); None: scales come from
            each tensor's own amax (current scaling).
        online_steps: number of first steps with current scaling, before the history is used.
    """

    numbers: MatmulFormat
    parameters: Mapping[str, LinearWeight]
    history: int | None = None
    online_steps: int = 0

    def of(self, parameters: Mapping[str, LinearWeight]) -> "Linears":
        """Return the same for these weights."""
        return dataclasses.replace(self, parameters=parameters)

    def initial_amax(self) -> Amax:
        """Return an empty amax history of each layer's input and of the gradient of its output."""
        if self.history is None:
            return {}
        return {name: jnp.zeros((*p.lead, 2, self.history)) for name, p in self.parameters.items()}

    def scales(self, amax: Amax, step: Int[Array, ""]) -> Scales:
        """Return delayed scales, which map the largest amax of the history to the FP8 dtype's largest number.

        A scale is 1 while the history is empty, and 0 in the first online_steps, which requests current scaling.
        """
        # In the order of the axis of 2: x in e4m3, dy in e5m2.
        dtype_max = jnp.asarray([float(jnp.finfo(dtype).max) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)])
        scales = {}
        for name, history in amax.items():
            scales[name] = divisors(history.max(axis=-1) / dtype_max)
            if self.online_steps:
                scales[name] = jnp.where(step < self.online_steps, 0.0, scales[name])
        return scales

    def extend_history(self, amax: Amax, found: dict[str, Array], finite: Array) -> Amax:
        """Return the history with this step's amax in place of the oldest, or unchanged if the step was not finite."""
        return {
            name: jnp.where(finite, jnp.concatenate([found[name][..., None], history[..., :-1]], axis=-1), history)
            for name, history in amax.items()
        }

    @jax.named_scope("operands")
    def operands(self, weights: Mapping[str, Any]) -> dict[str, Operands]:
        """Make operands of the weights that are plain arrays (trained, or frozen by train.freeze).

        This is done once an optimizer step.
        """

        def one(weight: Array, axes: tuple[str | None, ...]) -> Operands:
            if weight.ndim > 2:  # one matrix at a time, so that temporaries have the size of a matrix, not of the stack
                return jax.lax.map(lambda weight: one(weight, axes), weight)
            return self.numbers.make(weight, axes)

        plain = {name: weights[name] for name in self.parameters if isinstance(weights[name], jax.Array)}
        return {name: one(weight, self.parameters[name].matrix_axes) for name, weight in plain.items()}

    def wrap_weights(
        self, weights: Mapping[str, Any], operands: Mapping[str, Operands], scales: Mapping[str, Array]
    ) -> dict[str, Any]:
        """Return all weights, with a `LowPrecision` in place of each that is multiplied in low precision."""

        def one(name: str) -> LowPrecision:
            weight = weights[name]
            if isinstance(weight, LowPrecision):
                return dataclasses.replace(weight, scales=scales.get(name))
            gets_gradient = weight if self.parameters[name].trained else None
            return LowPrecision(operands[name], gets_gradient, scales.get(name), self.numbers)

        return {**weights, **{name: one(name) for name in self.parameters}}


@dataclass(frozen=True)
class Frozen:
    """A `Storage` of models.parameters: a frozen weight that is multiplied in low precision.

    Attributes:
        numbers: the format of operands and how they are multiplied.
        format: the weight is stored in this quantized format, and operands are made from it at each use. None: the
            operands are made once and stored.
    """

    numbers: MatmulFormat
    format: Format | None

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]) -> LowPrecision:
        """Return shapes, dtypes and shardings of a stack of weights."""
        return self.holding((self.format or self.numbers).abstract(shape, dtype, axes))

    def make(self, weight: Float[Array, "o i"], axes: tuple[str | None, ...]) -> LowPrecision:
        """Convert one weight."""
        return self.holding((self.format or self.numbers).make(weight, axes))

    def holding(self, stored: Operands | QuantizedArray) -> LowPrecision:
        """Return the leaf that holds a weight stored as operands or as a quantized array."""
        parts = (None, stored) if isinstance(stored, QuantizedArray) else (stored, None)
        return LowPrecision(*parts, None, self.numbers)
