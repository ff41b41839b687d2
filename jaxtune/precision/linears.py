"""The linears of a model that multiply in few bits: their weights as a step sees them, and the scales it carries on."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.operands import Operands, make_operands
from jaxtune.quant.array import QuantizedArray, divisors

if TYPE_CHECKING:
    from jaxtune.models.parameters import Parameter
    from jaxtune.precision.operands import Numbers

Scales = dict[str, Float[Array, "layers 2"]]
Amax = dict[str, Float[Array, "layers 2 history"]]


@dataclass(frozen=True)
class Linears:
    """Which they are, and how they multiply.

    Attributes:
        numbers: the format of operands and how they are multiplied.
        parameters: the weights, stacked, by name.
        history: steps whose largest magnitudes make the scales of the next; None: every tensor's own does.
        online_steps: first steps that do not use the history.
    """

    numbers: "Numbers"
    parameters: Mapping[str, "Parameter"]
    history: int | None = None
    online_steps: int = 0

    def initial_amax(self) -> Amax:
        """An empty history of the largest magnitudes of each linear's input and of the gradient of its output."""
        if self.history is None:
            return {}
        return {name: jnp.zeros((p.shape[0], 2, self.history)) for name, p in self.parameters.items()}

    def scales(self, amax: Amax, step: Int[Array, ""]) -> Scales:
        """Delayed scales: what the largest magnitude of the history needs to fit; 1 before there is one.

        In the first online_steps 0, which asks for current scaling.
        """
        most = jnp.asarray([float(jnp.finfo(dtype).max) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)])
        scales = {}
        for name, history in amax.items():
            scales[name] = divisors(history.max(axis=-1) / most)
            if self.online_steps:
                scales[name] = jnp.where(step < self.online_steps, 0.0, scales[name])
        return scales

    def extended(self, amax: Amax, found: dict[str, Array], finite: Array) -> Amax:
        """The history with what a step found in place of the oldest; as it was after a step that was not finite."""
        return {
            name: jnp.where(finite, jnp.concatenate([found[name][..., None], history[..., :-1]], axis=-1), history)
            for name, history in amax.items()
        }

    def operands(self, weights: Mapping[str, Any]) -> dict[str, Operands]:
        """Those of the weights that are plain arrays, trained or frozen beside trained ones: once an optimizer step."""

        def one(stack: Array, axes: tuple[str | None, ...]) -> Operands:
            return jax.lax.map(lambda weight: make_operands(weight, self.numbers, axes), stack)

        plain = {name: weights[name] for name in self.parameters if isinstance(weights[name], jax.Array)}
        return {name: one(weight, self.parameters[name].axes[1:]) for name, weight in plain.items()}

    def wrapped(
        self, weights: Mapping[str, Any], operands: Mapping[str, Operands], scales: Mapping[str, Array]
    ) -> dict[str, Any]:
        """All weights, those of these linears as the leaves that multiply in few bits."""

        def one(name: str) -> LowPrecision:
            weight = weights[name]
            if isinstance(weight, LowPrecision):
                return dataclasses.replace(weight, scales=scales.get(name))
            gets_gradient = weight if self.parameters[name].trained else None
            return LowPrecision(operands[name], gets_gradient, scales.get(name), self.numbers)

        return {**weights, **{name: one(name) for name in self.parameters}}

    def frozen(self, weight: Operands | QuantizedArray) -> LowPrecision:
        """The leaf of a weight that never changes."""
        stored = (None, weight) if isinstance(weight, QuantizedArray) else (weight, None)
        return LowPrecision(*stored, None, self.numbers)
