"""Gated delta net (Yang et al. 2024, arXiv:2412.06464) as in Qwen3-Next: linear attention with a recurrent state.

Shape letters: b rows of the batch, s positions in a row, t earlier tokens that the convolution sees (kernel - 1), d
features of the residual stream, hk key heads (of queries and keys) of dk features each, hv value heads of dv features
each, c channels of a convolution, g groups.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import Kind, declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.attention import Inputs, merge_heads
from jaxtune.models.layers.linear import Linear, run_linears
from jaxtune.models.layers.norm import NormLayer
from jaxtune.models.layers.recurrence import RecurrentCache, convolve_heads, draw_step_biases, run_recurrence
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.layer_spec import Norm as NormSpec
from jaxtune.models.structure.mixers import DeltaNet
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import by_token
from pallas_kernels.gated_delta_rule import gated_delta_rule

# Added to the squared norm of queries and keys, as in transformers and flash-linear-attention.
LEAST_NORM = 1e-6


class _Parameters(NamedTuple):
    """The kernels of the convolutions of queries, keys and values, and the parameters of the decay."""

    kernels: Any  # (hk * dk, 1, t + 1), twice, and (hv * dv, 1, t + 1)
    log_rate: Any  # (hv)
    step_bias: Any  # (hv)


class GatedDeltaNet(nnx.Module):
    """A short causal convolution of queries, keys and values; the gated delta rule; a norm and an output gate.

    As Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet and OlmoHybridGatedDeltaNet of transformers.
    """

    def __init__(self, spec: ModelSpec, layer: Layer, net: DeltaNet):
        self.net = net
        init = nnx.initializers.normal(spec.initializer_range)
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim

        def linear(name: str, out: int, kind: Kind = "linear") -> Linear:
            return Linear(spec, layer, f"delta_net.{name}", (out, spec.hidden), ("heads", "embed"), kind=kind)

        def convolution(width: int) -> Any:
            return declare_parameter((width, 1, net.kernel), ("heads", None, None), init, "convolution")

        if net.fused:
            self.qkvz = linear("qkvz", 2 * keys + 2 * values)
            self.ba = linear("ba", 2 * net.value_heads, "gate")
        else:
            self.q, self.k, self.v = linear("q", keys), linear("k", keys), linear("v", values)
            self.z = linear("z", values)
            self.b, self.a = linear("b", net.value_heads, "gate"), linear("a", net.value_heads, "gate")
        self.q_conv, self.k_conv, self.v_conv = convolution(keys), convolution(keys), convolution(values)
        log_rates = partial(_log_rates, net.rates)
        step_biases = nnx.initializers.ones if net.steps is None else partial(draw_step_biases, net.steps)
        self.log_rate = declare_parameter((net.value_heads,), ("heads",), log_rates, "vector")
        self.step_bias = declare_parameter((net.value_heads,), ("heads",), step_biases, "vector")
        self.norm = NormLayer(net.value_dim, NormSpec(net.epsilon or spec.norm.epsilon))
        self.o = Linear(spec, layer, "delta_net.o", (spec.hidden, values), ("embed", "heads"))

    @jax.named_scope("delta_net")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: RecurrentCache | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], RecurrentCache | None]:
        """Return the layer's output and its updated cache."""
        qkv, z, b, a = self._project(x, call)
        kernels = tuple(conv.get_value() for conv in (self.q_conv, self.k_conv, self.v_conv))
        parameters = _Parameters(kernels, self.log_rate.get_value(), self.step_bias.get_value())
        convolved, values = tuple(heads for heads, _ in self.net.convolved_heads), self.net.value_heads
        heads = (convolved, values, values), _Parameters(convolved, values, values)
        recur = partial(_recur, self.net)
        read, cache = run_recurrence(recur, (qkv, b, a), parameters, heads, inputs, cache)
        # The norm and the gate are of one position, so they run in the layout of the rest of the layer.
        gated = self.norm(read).astype(jnp.float32) * jax.nn.silu(_by_group(z, values).astype(jnp.float32))
        return self.o(merge_heads(gated.astype(x.dtype)), call), cache

    def _project(self, x: Array, call: ForwardOptions) -> tuple[tuple[Array, Array, Array], Array, Array, Array]:
        """Return (q, k, v) before the convolution, z (output gate), b (write strength beta) and a (decay)."""
        net = self.net
        if not net.fused:
            q, k, v, z, b, a = run_linears([self.q, self.k, self.v, self.z, self.b, self.a], x, call)
            return (q, k, v), z, b, a
        # Rows of the fused matrices are grouped by key head: for each its q and k, then v and z of its value heads.
        # Both become (b, s, hk, features of a key head's group).
        qkvz, ba = (_by_group(y, net.key_heads) for y in run_linears([self.qkvz, self.ba], x, call))
        values = net.value_heads // net.key_heads * net.value_dim  # features of v in a group, and of z
        q, k, v, z = jnp.split(qkvz, [net.key_dim, 2 * net.key_dim, 2 * net.key_dim + values], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        return (merge_heads(q), merge_heads(k), merge_heads(v)), merge_heads(z), merge_heads(b), merge_heads(a)


def _recur(
    net: DeltaNet,
    projections: tuple[tuple[Array, Array, Array], Float[Array, "b s hv"], Float[Array, "b s hv"]],
    parameters: _Parameters,
    positions: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    before: RecurrentCache,
) -> tuple[Float[Array, "b s hv dv"], RecurrentCache]:
    """Inside a shard_map: return the outputs of a device's heads, and the updated cache."""
    qkv, b, a = projections
    (q, k, v), tails = convolve_heads(net, qkv, parameters.kernels, (None, None, None), positions, before.tails)
    # Queries and keys have unit norm, as the delta rule needs for stable updates.
    q, k = _unit(q), _unit(k)
    log_rate, step_bias = (rate.astype(jnp.float32) for rate in parameters[1:])
    # In float32: the decay is the exponential of a sum over many tokens.
    # g = -A_log.exp() * softplus(a + dt_bias) in transformers.
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(a.astype(jnp.float32) + step_bias)
    # Padding must not change the state: no decay, and nothing is written.
    log_decay = jnp.where(valid[..., None], log_decay, 0)
    beta = jnp.where(valid[..., None], net.strength * jax.nn.sigmoid(b), 0)
    # At position 0 a document begins, and the state is zero.
    out, state = gated_delta_rule(q, k, v, log_decay, beta, positions == 0, before.state)
    return out, RecurrentCache(tails, state)


def _unit(x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + LEAST_NORM)).astype(x.dtype)


def _by_group(x: Float[Array, "b s c"], groups: int) -> Float[Array, "b s g n"]:
    return jnp.reshape(x, (*x.shape[:2], groups, -1), out_sharding=by_token("heads", None))


def _log_rates(bounds: tuple[float, float], key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw the logarithms of decay rates between the bounds (a low rate is a long memory), as transformers does."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *bounds))
