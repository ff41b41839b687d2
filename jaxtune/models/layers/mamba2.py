"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060) as in Nemotron-H: a layer with a state space model.

Shape letters: b rows of the batch, s positions in a row, t earlier tokens that the convolution sees (kernel - 1), d
features of the residual stream, h heads of p features each, g groups of heads, n features of the state.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Inputs, merge_heads
from jaxtune.models.layers.linear import Linear, run_linears, scale
from jaxtune.models.layers.recurrence import RecurrentCache, convolve_heads, draw_step_biases, run_recurrence
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import Mamba2
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import P, axes_in, by_token, gathered_entry, shards
from pallas_kernels.mamba2_scan import mamba2_scan


class _Parameters(NamedTuple):
    """The parameters of the convolutions of x, B and C, and of the recurrence."""

    kernels: Any  # (h * p, 1, t + 1), and (g * n, 1, t + 1), twice
    biases: Any  # (h * p) and (g * n), twice; None, three times
    log_rate: Any  # (h)
    step_bias: Any  # (h)
    skip: Any  # (h)


class Mamba2Mixer(nnx.Module):
    """A short causal convolution of x, B and C; the state space recurrence; an output gate and a norm.

    As NemotronHMamba2Mixer of transformers.
    """

    def __init__(self, spec: ModelSpec, layer: Layer, net: Mamba2):
        self.net, self.epsilon = net, spec.norm.epsilon
        init, ones = nnx.initializers.normal(spec.initializer_range), nnx.initializers.ones
        inner, keys, _ = (heads * size for heads, size in net.convolved_heads)
        self.group_axis = None if net.groups_whole else "kv_heads"  # None: B and C are not sharded
        axes = {"z": "heads", "x": "heads", "b": self.group_axis, "c": self.group_axis, "dt": "heads"}
        sizes = {"z": inner, "x": inner, "b": keys, "c": keys, "dt": net.heads}

        def linear(name: str) -> Linear:
            shape = (sizes[name], spec.hidden)
            return Linear(spec, layer, f"mamba.{name}", shape, (axes[name], "embed"), bias=net.bias)

        def kernel(name: str) -> Any:
            return declare_parameter((sizes[name], 1, net.kernel), (axes[name], None, None), init, "convolution")

        def bias(name: str) -> Any:
            zeros = nnx.initializers.zeros
            return declare_parameter((sizes[name],), (axes[name],), zeros, "vector") if net.conv_bias else None

        self.z, self.x, self.b, self.c, self.dt = map(linear, axes)
        self.x_conv, self.b_conv, self.c_conv = map(kernel, "xbc")
        self.x_conv_bias, self.b_conv_bias, self.c_conv_bias = map(bias, "xbc")
        self.log_rate = declare_parameter((net.heads,), ("heads",), _log_rates, "vector")
        self.step_bias = declare_parameter((net.heads,), ("heads",), partial(draw_step_biases, net.steps), "vector")
        self.skip = declare_parameter((net.heads,), ("heads",), ones, "vector")
        self.norm = declare_parameter((inner,), ("heads",), ones, "vector") if net.normed else None
        self.o = Linear(spec, layer, "mamba.o", (spec.hidden, inner), ("embed", "heads"), bias=net.bias)

    @jax.named_scope("mamba2")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: RecurrentCache | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], RecurrentCache | None]:
        """Return the layer's output and its updated cache."""
        z, *xbc, dt = map(scale, run_linears([self.z, self.x, self.b, self.c, self.dt], x, call), self.net.factors)
        parameters = _Parameters(
            tuple(conv.get_value() for conv in (self.x_conv, self.b_conv, self.c_conv)),
            tuple(bias and bias.get_value() for bias in (self.x_conv_bias, self.b_conv_bias, self.c_conv_bias)),
            *(one.get_value() for one in (self.log_rate, self.step_bias, self.skip)),
        )
        convolved, count = tuple(heads for heads, _ in self.net.convolved_heads), self.net.heads
        heads = (convolved, count), _Parameters(convolved, convolved, count, count, count)
        recur = partial(_recur, self.net)
        y, cache = run_recurrence(recur, (tuple(xbc), dt), parameters, heads, inputs, cache)
        # The gate and the norm are of one position, so they run in the layout of the rest of the layer.
        return self.o(self._gate_and_norm(y, z).astype(x.dtype), call), cache

    def _gate_and_norm(self, y: Float[Array, "b s h p"], z: Float[Array, "b s hp"]) -> Float[Array, "b s hp"]:
        """Return y * silu(z); if normed, divided by the root mean square of its group, times the weight; float32."""
        dtype, groups = y.dtype, self.net.groups
        z = jnp.reshape(z, y.shape, out_sharding=by_token("heads", None))
        y = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return merge_heads(y)
        squares = jnp.mean(y * y, axis=-1)  # (b, s, h)
        # A group whose heads are on several devices needs the mean squares of all of them.
        parts = shards(axes_in(gathered_entry("heads")), jax.sharding.get_abstract_mesh())
        axis = None if groups % parts else "heads"
        # (b, s, h) -> (b, s, g, h / g). Heads have equally many features: a mean of their means is the group's.
        of_group = jnp.reshape(
            jax.reshard(squares, by_token(axis)), (*squares.shape[:2], groups, -1), out_sharding=by_token(axis, None)
        )
        factor = jax.lax.rsqrt(jnp.mean(of_group, axis=-1, keepdims=True) + self.epsilon)
        factor = jnp.reshape(jnp.broadcast_to(factor, of_group.shape), squares.shape, out_sharding=by_token(axis))
        normed = merge_heads(y * jax.reshard(factor, by_token("heads"))[..., None])
        weight = jax.reshard(self.norm.get_value().astype(dtype), P(jax.typeof(normed).sharding.spec[-1]))
        return normed * weight.astype(jnp.float32)


def _recur(
    net: Mamba2,
    projections: tuple[tuple[Array, Array, Array], Float[Array, "b s h"]],
    parameters: _Parameters,
    positions: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    before: RecurrentCache,
) -> tuple[Float[Array, "b s h p"], RecurrentCache]:
    """Inside a shard_map: return the outputs of a device's heads, and the updated cache."""
    xbc, dt = projections
    kernels, biases = parameters.kernels, parameters.biases
    (x, write, read), tails = convolve_heads(net, xbc, kernels, biases, positions, before.tails)
    log_rate, step_bias, skip = (one.astype(jnp.float32) for one in parameters[2:])
    # In float32: the decay is the exponential of a sum over many tokens. transformers bounds steps in a pass over a row
    # but not when it decodes token by token; here both are bounded, so that decoding equals a pass.
    step = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + step_bias), *net.step_limit)
    # Padding must not change the state: a step of 0 neither decays it nor writes to it.
    step = jnp.where(valid[..., None], step, 0)
    # x, dt, A, B, C and D of the paper; at the start of a document the state is zero.
    out, state = mamba2_scan(x, step, -jnp.exp(log_rate), write, read, skip, positions == 0, before.state)
    return out, RecurrentCache(tails, state)


def _log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the logarithms of decay rates 1, 2, 3, ..., one for each head, as transformers does."""
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=dtype))
