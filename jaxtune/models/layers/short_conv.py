"""Gated short convolution (LFM2, Liquid AI 2025, arXiv:2511.23404): a layer that mixes few neighbouring tokens.

Shape letters: b rows of the batch, s positions in a row, t earlier tokens that the convolution sees (kernel - 1), d
features of the residual stream, c channels of the convolution.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Inputs
from jaxtune.models.layers.convolution import convolve
from jaxtune.models.layers.linear import Linear, run_linears
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import ShortConv
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import P, by_head
from jaxtune.parallel.sequence import deal_positions, from_heads, gather_positions, to_heads


def memory(conv: ShortConv, batch: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
    """Return shape and dtype (b, t, c) of a layer's cache: the last inputs of its convolution, zero at first."""
    return jax.ShapeDtypeStruct((batch, conv.kernel - 1, conv.channels), dtype)


class GatedShortConv(nnx.Module):
    """o(c * convolution(b * x)), with b, c and x projected from the layer's input; as Lfm2ShortConv of transformers."""

    def __init__(self, spec: ModelSpec, layer: Layer, conv: ShortConv):
        self.conv = conv
        init, zeros = nnx.initializers.normal(spec.initializer_range), nnx.initializers.zeros
        # Each channel is mixed independently, so channels are sharded as heads are.
        into, out = (
            ((conv.channels, spec.hidden), ("heads", "embed")),
            ((spec.hidden, conv.channels), ("embed", "heads")),
        )
        self.b, self.c, self.x = (Linear(spec, layer, f"short_conv.{name}", *into, bias=conv.bias) for name in "bcx")
        self.kernel = declare_parameter((conv.channels, 1, conv.kernel), ("heads", None, None), init, "convolution")
        self.kernel_bias = declare_parameter((conv.channels,), ("heads",), zeros, "vector") if conv.bias else None
        self.o = Linear(spec, layer, "short_conv.o", *out, bias=conv.bias)

    @jax.named_scope("short_conv")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Float[Array, "b t c"] | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], Float[Array, "b t c"] | None]:
        """Return the layer's output and its updated cache."""
        b, c, values = run_linears([self.b, self.c, self.x], x, call)
        rows, positions, heads, _ = by_head()
        bias = None if self.kernel_bias is None else to_heads(self.kernel_bias.get_value(), self.conv.channels, axis=0)
        of_rows = (jax.reshard(one, P(rows, positions)) for one in (inputs.positions, inputs.place) if one is not None)
        arguments: Any = (
            to_heads(b * values, self.conv.channels),
            to_heads(self.kernel.get_value(), self.conv.channels, axis=0),
            bias,
            cache,
            *of_rows,
        )
        # In a shard_map, because a device with whole rows of some channels needs no communication.
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        outs = P(rows, positions, heads)
        y, cache = jax.shard_map(_on_device, in_specs=specs, out_specs=(outs, None if cache is None else outs))(
            *arguments
        )
        return self.o(c * from_heads(y), call), cache


def _on_device(
    x: Float[Array, "b s c"],
    kernel: Float[Array, "c 1 t+1"],
    bias: Float[Array, " c"] | None,
    tail: Float[Array, "b t c"] | None,
    positions: Int[Array, "b s"],
    place: Int[Array, "b s"] | None = None,
) -> tuple[Float[Array, "b s c"], Float[Array, "b t c"] | None]:
    """Inside a shard_map: return the convolution of a device's channels, and the updated cache if there is one."""
    if place is not None:  # the convolution runs over positions in row order
        x, positions = gather_positions(x, place, ()), gather_positions(positions, place, ())
    y, after = convolve(x, kernel, positions, bias, tail)
    return y if place is None else deal_positions(y, place), None if tail is None else after
