"""Quantization-aware training: the linear layers that a step multiplies as they will be served (serve.format).

In each step their weights are quantized once, adapters merged first, by the same functions as in an export. So an
export has the codes of the last step. For adapters this is merge-aware training: an adapter that is merged into 4 bits
only after training loses most of its small changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.hf.quantized.written import fusion_group
from jaxtune.models.decoder import Parameters
from jaxtune.models.parameters import Parameter, adapter_parts
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.precision.linears import Amax, Scales, StepWeights
from jaxtune.precision.served import ServedWeight
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.format import Format
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import ServeOptions, served_as
from jaxtune.weights.merged_weight import merged_weight
from jaxtune.weights.quantizable import quantizable

# The weights of one layer that share the scale of a matrix, by name: (weight, parts of its adapter).
Layer = Mapping[str, tuple[Any, Mapping[str, Array]]]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # hashed by identity: a static argument of jit
class ServedLinears:
    """The linear layers that are multiplied as they will be served; takes the place of `precision.linears.Linears`.

    Attributes:
        format: the format of the quantized weights.
        shares_scale: whether layers that servers fuse have one scale of the matrix.
        dtype: the weights are rounded to it before they are quantized, as in an export.
        parameters: the weights, stacked, by name.
        left_out: the linear layers that are not served quantized, and why.
        rounds_inputs: whether the layers' inputs are rounded to FP8.
    """

    format: Format
    shares_scale: bool
    dtype: jnp.dtype
    parameters: Mapping[str, Parameter]
    left_out: str = ""
    rounds_inputs: bool = False

    def of(self, parameters: Mapping[str, Parameter]) -> "ServedLinears":
        """Return the same for these weights."""
        return replace(self, parameters=parameters)

    def initial_amax(self) -> Amax:
        """Return {}: no scale is delayed."""
        return {}

    def scales(self, amax: Amax, step: Int[Array, ""]) -> Scales:
        """Return {}: no scale is delayed."""
        return {}

    def extend_history(self, amax: Amax, found: dict[str, Array], finite: Array) -> Amax:
        """Return {}: no scale is delayed."""
        return {}

    def operands(self, weights: Mapping[str, Any]) -> dict[str, Array | QuantizedArray]:
        """Return the weights as a step multiplies by them: dequantized, or quantized if the weight is stored so."""
        return self._each_layer(self._served_weights, weights)

    def quantize(self, weights: Mapping[str, Any]) -> dict[str, QuantizedArray]:
        """Quantize the weights, adapters merged; an export has the same codes."""
        return self._each_layer(self._quantized, weights)

    @jax.named_scope("operands")
    def _each_layer(self, function: Callable[[Layer], dict[str, T]], weights: Mapping[str, Any]) -> dict[str, T]:
        """Apply a function to the weights that share the scale of a matrix, one layer at a time to save memory."""
        groups: dict[Any, dict[str, tuple[Any, dict[str, Array]]]] = {}
        for name, parameter in self.parameters.items():
            key = tuple(fusion_group(place.name) for place in parameter.places) if self.shares_scale else name
            parts = adapter_parts(name, parameter) if parameter.treatment.adapter is not None else {}
            groups.setdefault(key, {})[name] = weights[name], {part: weights[of] for part, of in parts.items()}
        results = {}
        for stacks in groups.values():
            stacked = any(self.parameters[name].lead for name in stacks)
            results |= jax.lax.map(function, stacks) if stacked else function(stacks)
        return results

    def _served_weights(self, layer: Layer) -> dict[str, Array | QuantizedArray]:
        stored = {name: self.parameters[name].storage is not None for name in layer}
        if not any(stored.values()):
            return dict(zip(layer, self.format.round_together(*self._merged(layer))))
        return {name: array if stored[name] else array.dequantize() for name, array in self._quantized(layer).items()}

    def _quantized(self, layer: Layer) -> dict[str, QuantizedArray]:
        return dict(zip(layer, self.format.make_together(*self._merged(layer))))

    def _merged(self, layer: Layer) -> tuple[list[Array], list[tuple[str | None, ...]]]:
        """Return the weights with their adapters, and the logical axes of each."""
        declared = [self.parameters[name] for name in layer]
        axes = [parameter.axes[1:] if parameter.lead else parameter.axes for parameter in declared]  # of one layer
        plain = (
            merged_weight(self.parameters[name].treatment.adapter if parts else None, weight, parts)
            for name, (weight, parts) in layer.items()
        )
        return [weight.astype(self.dtype) for weight in plain], axes

    def wrap_weights(
        self, weights: Mapping[str, Any], operands: Mapping[str, Array | QuantizedArray], scales: Scales
    ) -> Parameters:
        """Return all weights, with a `ServedWeight` in place of each that is served quantized."""
        served = {
            name: ServedWeight(operands[name], weights[name], parameter.trained, self.rounds_inputs)
            for name, parameter in self.parameters.items()
        }
        return {**weights, **served}


def served_linears(
    spec: ModelSpec, parameters: Mapping[str, Parameter], serve: ServeOptions, dtype: str
) -> ServedLinears:
    """Return the linear layers of a model that are served quantized; dtype: of the export's other weights.

    Raises UserError as `quantizable`.
    """
    options = served_as(serve)
    selected = quantizable(spec, parameters, options, f"serve.format={serve.format!r}")
    linears = {name: p for name, p in parameters.items() if p.kind == "linear"}
    served = {name: p for name, p in linears.items() if selected.weights.issuperset(one.name for one in p.places)}
    # Only NVFP4 has a scale of the whole matrix.
    shares_scale = serve.format == "nvfp4"
    rounds_inputs = serve.activations is not None
    return ServedLinears(
        format_of(options, ""), shares_scale, jnp.dtype(dtype), served, selected.left_out, rounds_inputs
    )


def serve_weights(linears: StepWeights | None, weights: Parameters) -> Parameters:
    """Return the weights, quantized as they will be served if `linears` is `ServedLinears`."""
    if not isinstance(linears, ServedLinears):
        return weights
    return linears.wrap_weights(weights, _operands(linears, weights), {})


@partial(jax.jit, static_argnames="linears")
def _operands(linears: ServedLinears, weights: Parameters) -> dict[str, Array | QuantizedArray]:
    return linears.operands(weights)
