"""The feed-forward layer, gated (Shazeer 2020) or not.

Shape letters: b rows of the batch, s positions in a row, d features of the residual stream, h hidden features.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear, run_linears, scale
from jaxtune.models.structure.layer_spec import Activation, ClampedSilu, FeedForward, Layer
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import P, axes_in, by_token, shards
from jaxtune.precision.matmul import LowPrecision

# Tokens of a device in one tile, if memory is short (remat 'offload'). A larger tile would not make products faster.
TILE = 16_384
ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gate_by(activation: Activation, gate: Float[Array, "b s h"], up: Float[Array, "b s h"]) -> Float[Array, "b s h"]:
    """Return activation(gate) * up, or the combination of both that the activation defines."""
    if not isinstance(activation, ClampedSilu):
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return gate * jax.nn.sigmoid(activation.slope * gate) * (up + 1)


class MLP(nnx.Module):
    """down(gate_by(activation, gate(x), up(x))), or down(activation(up(x))). `name` is its path in the layer.

    width: features of its input and output; None: the width of the residual stream.
    """

    def __init__(
        self, spec: ModelSpec, layer: Layer, options: FeedForward, name: str = "mlp", width: int | None = None
    ):
        linear, width = partial(Linear, spec, layer, bias=options.bias), width or spec.hidden
        into, out = ((options.size, width), ("mlp", "embed")), ((width, options.size), ("embed", "mlp"))
        self.gate = linear(f"{name}.gate", *into) if options.gated else None
        self.up = linear(f"{name}.up", *into)
        self.down = linear(f"{name}.down", *out)
        self.activation: Activation = options.activation
        self.gate_factor, self.out_factor = options.gate_factor, options.out_factor

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "b s d"], call: ForwardOptions) -> Float[Array, "b s d"]:
        """Return the feed-forward layer's output for every token."""
        # No tiles with delayed scaling: the amax of all tokens is returned as a gradient, and gradients of tiles are
        # added, where a maximum is needed.
        if call.remat != "offload" or call.groups is not None or any(map(_scale_is_delayed, self.linears)):
            return self._of(x, call)
        # The gradients of adapters are summed over tiles: cast outside the loop, the sum is float32.
        graph, adapters, weights = nnx.split(self, nnx.LoRAParam, ...)
        adapters = jax.tree.map(lambda a: a.astype(jnp.float32), adapters)
        return by_tiles(lambda tile, call: nnx.merge(graph, adapters, weights)._of(tile, call), x, call)

    @property
    def linears(self) -> list[Linear]:
        """The linear layers."""
        return [linear for linear in (self.gate, self.up, self.down) if linear is not None]

    def _of(self, x: Float[Array, "b s d"], call: ForwardOptions) -> Float[Array, "b s d"]:
        if self.gate is None:
            y = ACTIVATIONS[self.activation](self.up(x, call))
        else:
            gate, up = run_linears([self.gate, self.up], x, call)
            y = gate_by(self.activation, scale(gate, self.gate_factor), up)
        return scale(self.down(y, call), self.out_factor)


def _scale_is_delayed(linear: Linear) -> bool:
    weight = linear.weight.get_value()
    return isinstance(weight, LowPrecision) and weight.scales is not None


def by_tiles(
    function: Callable[[Array, ForwardOptions], Array], x: Float[Array, "b s d"], call: ForwardOptions
) -> Float[Array, "b s d"]:
    """Apply a function of single tokens to one tile of positions after another, and recompute tiles in backward.

    Tiles are equal parts of a device's positions, the largest with at most TILE tokens. Each has its own noise.
    """
    # Positions are split by device first and by tile second, so that every device has a part of each tile.
    mesh, (batch, positions) = jax.sharding.get_abstract_mesh(), by_token()
    rows, parts = x.shape[0] // shards(axes_in(batch), mesh), shards(axes_in(positions), mesh)
    tiles = equal_parts(x.shape[1] // parts, max(1, TILE // rows))
    if tiles == 1:
        return function(x, call)
    size = x.shape[1] // parts // tiles
    # (b, s, d) -> (b, devices, tiles, positions of a tile, d): tiles are scanned.
    split = jnp.reshape(
        x, (x.shape[0], parts, tiles, size, x.shape[2]), out_sharding=P(batch, positions, None, None, None)
    )

    @jax.checkpoint
    def of_tile(_, numbered: tuple) -> tuple[None, Array]:
        number, tile = numbered
        of_devices = jnp.reshape(tile, (x.shape[0], parts * size, x.shape[2]), out_sharding=by_token(None))
        y = function(of_devices, call.layer(number))
        return None, jnp.reshape(y, tile.shape, out_sharding=P(batch, positions, None, None))

    _, ys = jax.lax.scan(of_tile, None, (jnp.arange(tiles), jnp.moveaxis(split, 2, 0)))
    return jnp.reshape(jnp.moveaxis(ys, 0, 2), x.shape, out_sharding=by_token(None))


def equal_parts(positions: int, most: int) -> int:
    """Return the fewest equal parts of `positions` positions with at most `most` positions each."""
    return next(parts for parts in range(-(-positions // most), positions + 1) if positions % parts == 0)
