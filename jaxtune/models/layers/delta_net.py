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
from jaxtune.models.spec import DeltaNet, Layer, ModelSpec
from jaxtune.models.spec import Norm as NormSpec
from jaxtune.parallel.layout import P, by_head, by_token
from jaxtune.parallel.sequence import deal_positions, from_heads, gather_positions, to_heads
from pallas_kernels.gated_delta_rule import gated_delta_rule

# Added to the squared norm of queries and keys, as in transformers and flash-linear-attention.
LEAST_NORM = 1e-6


class DeltaNetCache(NamedTuple):
    """A layer's cache in decoding.

    Attributes:
        tails: the last t inputs of the convolutions of queries, keys and values.
        state: the recurrent state of each value head, float32.
    """

    tails: Any  # (b, t, hk * dk), twice, and (b, t, hv * dv)
    state: Any  # (b, hv, dk, dv)


def memory(net: DeltaNet, batch: int, dtype: jnp.dtype) -> DeltaNetCache:
    """Return shapes and dtypes of a layer's cache, which is zero before the first token."""
    widths = net.key_heads * net.key_dim, net.key_heads * net.key_dim, net.value_heads * net.value_dim
    tails = (jax.ShapeDtypeStruct((batch, net.kernel - 1, width), dtype) for width in widths)
    state = jax.ShapeDtypeStruct((batch, net.value_heads, net.key_dim, net.value_dim), jnp.float32)
    return DeltaNetCache(tuple(tails), state)


class GatedDeltaNet(nnx.Module):
    """A short causal convolution of queries, keys and values; the gated delta rule; a norm and an output gate.

    As Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet of transformers.
    """

    def __init__(self, spec: ModelSpec, layer: Layer, net: DeltaNet):
        self.net = net
        init, ones = nnx.initializers.normal(spec.initializer_range), nnx.initializers.ones
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
        self.log_rate = declare_parameter((net.value_heads,), ("heads",), _log_rates, "vector")
        self.step_bias = declare_parameter((net.value_heads,), ("heads",), ones, "vector")
        self.norm = NormLayer(net.value_dim, NormSpec(spec.norm.epsilon))
        self.o = Linear(spec, layer, "delta_net.o", (spec.hidden, values), ("embed", "heads"))

    @jax.named_scope("delta_net")
    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: DeltaNetCache | None, call: ForwardOptions
    ) -> tuple[Float[Array, "b s d"], DeltaNetCache | None]:
        """Return the layer's output and its updated cache."""
        qkv, z, b, a = self._project(x, call)
        kernels = tuple(conv.get_value() for conv in (self.q_conv, self.k_conv, self.v_conv))
        rates = self.log_rate.get_value(), self.step_bias.get_value()
        arguments: Any = (qkv, b, a, kernels, rates, inputs.positions, inputs.valid, inputs.place, cache)
        if cache is None:
            arguments = self._to_heads(*arguments)
        else:  # in decoding, a device has all heads of its rows
            rows = P(by_head()[0])
            of_parameters = jax.tree.map(lambda array: jax.reshard(array, P()), (kernels, rates))
            of_rows = (qkv, b, a, *arguments[-4:])
            (qkv, b, a, *rest) = jax.tree.map(lambda array: jax.reshard(array, rows), of_rows)
            arguments = (qkv, b, a, *of_parameters, *rest)
        # In a shard_map, because the kernel runs on the local heads, whose recurrence needs no communication.
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        outs = (by_head(), None) if cache is None else P(by_head()[0])
        read, cache = jax.shard_map(partial(_on_device, self.net), in_specs=specs, out_specs=outs)(*arguments)
        # The norm and the gate are of one position, so they run in the layout of the rest of the layer.
        read = from_heads(read)
        gated = self.norm(read).astype(jnp.float32) * jax.nn.silu(
            _by_group(z, self.net.value_heads).astype(jnp.float32)
        )
        return self.o(merge_heads(gated.astype(x.dtype)), call), cache

    def _to_heads(self, qkv: Any, b: Array, a: Array, kernels: Any, rates: Any, *of_rows: Array | None) -> tuple:
        """Reshard the arguments of `_on_device`, so that each device has whole rows of some heads."""
        keys, values = self.net.key_heads, self.net.value_heads
        qkv = tuple(to_heads(x, heads) for x, heads in zip(qkv, (keys, keys, values)))
        kernels = tuple(to_heads(kernel, heads, axis=0) for kernel, heads in zip(kernels, (keys, keys, values)))
        rates = tuple(to_heads(rate, values, axis=0) for rate in rates)
        of_rows = jax.tree.map(lambda array: jax.reshard(array, P(*by_head()[:2])), of_rows)
        return (qkv, to_heads(b, values), to_heads(a, values), kernels, rates, *of_rows)

    def _project(self, x: Array, call: ForwardOptions) -> tuple[tuple[Array, Array, Array], Array, Array, Array]:
        """Return (q, k, v) before the convolution, z (output gate), b (write strength beta) and a (decay)."""
        net = self.net
        if not net.fused:
            q, k, v, z, b, a = run_linears([self.q, self.k, self.v, self.z, self.b, self.a], x, call)
            return (q, k, v), z, b, a
        # Rows of the fused matrices are grouped by key head: for each its q and k, then v and z of its value heads.
        qkvz, ba = (_by_group(y, net.key_heads) for y in run_linears([self.qkvz, self.ba], x, call))
        values = net.value_heads // net.key_heads * net.value_dim
        q, k, v, z = jnp.split(qkvz, [net.key_dim, 2 * net.key_dim, 2 * net.key_dim + values], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        return (merge_heads(q), merge_heads(k), merge_heads(v)), merge_heads(z), merge_heads(b), merge_heads(a)


def _on_device(
    net: DeltaNet,
    qkv: tuple[Array, Array, Array],
    b: Float[Array, "b s hv"],
    a: Float[Array, "b s hv"],
    kernels: tuple[Array, Array, Array],
    rates: tuple[Array, Array],
    positions: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    place: Int[Array, "b s"] | None,
    before: DeltaNetCache | None,
) -> tuple[Float[Array, "b s hv dv"], DeltaNetCache | None]:
    """Inside a shard_map: return the outputs of a device's heads, and the updated cache if there is one."""
    if place is not None:  # the recurrence runs over positions in row order
        in_rows = partial(gather_positions, place=place, axes=())
        qkv, b, a, positions, valid = jax.tree.map(in_rows, (qkv, b, a, positions, valid))
    tails = [jnp.zeros((len(x), net.kernel - 1, x.shape[-1]), x.dtype) for x in qkv] if before is None else before.tails
    with_tails = [jnp.concatenate([tail.astype(x.dtype), x], axis=1) for tail, x in zip(tails, qkv)]
    q, k, v = (convolution(x, kernel, positions) for x, kernel in zip(with_tails, kernels))
    # Queries and keys have unit norm, as the delta rule needs for stable updates.
    q, k = (_unit(x.reshape(*x.shape[:2], -1, net.key_dim)) for x in (q, k))
    v = v.reshape(*v.shape[:2], -1, net.value_dim)
    log_rate, step_bias = (rate.astype(jnp.float32) for rate in rates)
    # In float32: the decay is the exponential of a sum over many tokens.
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(a.astype(jnp.float32) + step_bias)
    # Padding must not change the state: no decay, and nothing is written.
    log_decay = jnp.where(valid[..., None], log_decay, 0)
    beta = jnp.where(valid[..., None], jax.nn.sigmoid(b), 0)
    state = None if before is None else before.state
    out, state = gated_delta_rule(q, k, v, log_decay, beta, positions == 0, state)
    if before is None:
        return out if place is None else deal_positions(out, place), None
    # Rows that are decoded together are padded on the left, so the last inputs of the convolution are never padding.
    return out, DeltaNetCache(tuple(x[:, x.shape[1] - (net.kernel - 1) :] for x in with_tails), state)


def convolution(
    x: Float[Array, "b t+s c"], kernel: Float[Array, "c 1 t+1"], positions: Int[Array, "b s"]
) -> Float[Array, "b s c"]:
    """Return silu of the causal convolution of each channel, within documents; x begins with t earlier tokens.

    Products are summed in float32 and rounded before silu, as in torch.
    """
    length, size = positions.shape[1], kernel.shape[-1]
    total = 0.0
    # A sum of shifted products, because documents end inside a row: a token `back` positions earlier counts only if it
    # is in the same document.
    for back in range(size):
        token = jax.lax.slice_in_dim(x, size - 1 - back, size - 1 - back + length, axis=1).astype(jnp.float32)
        weight = kernel[:, 0, size - 1 - back].astype(x.dtype).astype(jnp.float32)
        total += jnp.where((positions >= back)[..., None], token * weight, 0)
    return jax.nn.silu(jnp.asarray(total).astype(x.dtype))


def _unit(x: Float[Array, "b s h d"]) -> Float[Array, "b s h d"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + LEAST_NORM)).astype(x.dtype)


def _by_group(x: Float[Array, "b s c"], groups: int) -> Float[Array, "b s g n"]:
    return jnp.reshape(x, (*x.shape[:2], groups, -1), out_sharding=by_token("heads", None))


def _log_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw the logarithms of decay rates between 0.01 (long memory) and 16 (short memory), as transformers does."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))
