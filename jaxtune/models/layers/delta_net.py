"""The gated delta net (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next has it: attention whose memory is a state."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxtune.models.declared import Kind, declared
from jaxtune.models.forward_options import Call
from jaxtune.models.layers.attention import Inputs, merged
from jaxtune.models.layers.linear import Linear, jointly
from jaxtune.models.layers.norm import Norm
from jaxtune.models.spec import DeltaNet, Layer, ModelSpec
from jaxtune.models.spec import Norm as NormSpec
from jaxtune.parallel.layout import P, by_head, by_token
from jaxtune.parallel.sequence import dealt, from_heads, gathered, to_heads
from pallas_kernels.gated_delta_rule import gated_delta_rule

LEAST_NORM = 1e-6  # squared and added: of queries and keys, as in transformers and flash-linear-attention


class Memory(NamedTuple):
    """What a layer remembers of the tokens before, while decoding.

    tails: of queries, keys and values, the last inputs of the convolution. state: of each value head, float32.
    """

    tails: Any  # (b, t, hk * dk), twice, and (b, t, hv * dv)
    state: Any  # (b, hv, dk, dv)


def memory(net: DeltaNet, batch: int, dtype: jnp.dtype) -> Memory:
    """Shapes and dtypes of the memory of a layer; before the first token it is zero."""
    widths = net.key_heads * net.key_dim, net.key_heads * net.key_dim, net.value_heads * net.value_dim
    tails = (jax.ShapeDtypeStruct((batch, net.kernel - 1, width), dtype) for width in widths)
    state = jax.ShapeDtypeStruct((batch, net.value_heads, net.key_dim, net.value_dim), jnp.float32)
    return Memory(tuple(tails), state)


class GatedDeltaNet(nnx.Module):
    """Queries, keys and values of a short causal convolution; a state a head; a gate on what is read from it.

    As Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet of transformers.
    """

    def __init__(self, spec: ModelSpec, layer: Layer, net: DeltaNet):
        self.net = net
        init, ones = nnx.initializers.normal(spec.initializer_range), nnx.initializers.ones
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim

        def linear(name: str, out: int, kind: Kind = "linear") -> Linear:
            return Linear(spec, layer, f"delta_net.{name}", (out, spec.hidden), ("heads", "embed"), kind=kind)

        def convolution(width: int) -> Any:
            return declared((width, 1, net.kernel), ("heads", None, None), init, "convolution")

        if net.fused:
            self.qkvz = linear("qkvz", 2 * keys + 2 * values)
            self.ba = linear("ba", 2 * net.value_heads, "gate")
        else:
            self.q, self.k, self.v = linear("q", keys), linear("k", keys), linear("v", values)
            self.z = linear("z", values)
            self.b, self.a = linear("b", net.value_heads, "gate"), linear("a", net.value_heads, "gate")
        self.q_conv, self.k_conv, self.v_conv = convolution(keys), convolution(keys), convolution(values)
        self.log_rate = declared((net.value_heads,), ("heads",), _log_rates, "vector")
        self.step_bias = declared((net.value_heads,), ("heads",), ones, "vector")
        self.norm = Norm(net.value_dim, NormSpec(spec.norm.epsilon))
        self.o = Linear(spec, layer, "delta_net.o", (spec.hidden, values), ("embed", "heads"))

    def __call__(
        self, x: Float[Array, "b s d"], inputs: Inputs, cache: Memory | None, call: Call
    ) -> tuple[Float[Array, "b s d"], Memory | None]:
        """What is read from the state at each token, and the layer's memory afterwards."""
        qkv, z, b, a = self._projected(x, call)
        kernels = tuple(conv.get_value() for conv in (self.q_conv, self.k_conv, self.v_conv))
        rates = self.log_rate.get_value(), self.step_bias.get_value()
        arguments: Any = (qkv, b, a, kernels, rates, inputs.positions, inputs.valid, inputs.place, cache)
        if cache is None:
            arguments = self._to_heads(*arguments)
        else:  # in decoding a device has all heads of its rows
            rows = P(by_head()[0])
            of_parameters = jax.tree.map(lambda array: jax.reshard(array, P()), (kernels, rates))
            of_rows = (qkv, b, a, *arguments[-4:])
            (qkv, b, a, *rest) = jax.tree.map(lambda array: jax.reshard(array, rows), of_rows)
            arguments = (qkv, b, a, *of_parameters, *rest)
        specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, arguments)
        outs = (by_head(), None) if cache is None else P(by_head()[0])
        read, cache = jax.shard_map(partial(_on_device, self.net), in_specs=specs, out_specs=outs)(*arguments)
        read = from_heads(read)
        gated = self.norm(read).astype(jnp.float32) * jax.nn.silu(
            _by_group(z, self.net.value_heads).astype(jnp.float32)
        )
        return self.o(merged(gated.astype(x.dtype)), call), cache

    def _to_heads(self, qkv: Any, b: Array, a: Array, kernels: Any, rates: Any, *of_rows: Array | None) -> tuple:
        """The arguments of `_on_device` with whole rows of some heads on each device."""
        keys, values = self.net.key_heads, self.net.value_heads
        qkv = tuple(to_heads(x, heads) for x, heads in zip(qkv, (keys, keys, values)))
        kernels = tuple(to_heads(kernel, heads, axis=0) for kernel, heads in zip(kernels, (keys, keys, values)))
        rates = tuple(to_heads(rate, values, axis=0) for rate in rates)
        of_rows = jax.tree.map(lambda array: jax.reshard(array, P(*by_head()[:2])), of_rows)
        return (qkv, to_heads(b, values), to_heads(a, values), kernels, rates, *of_rows)

    def _projected(self, x: Array, call: Call) -> tuple[tuple[Array, Array, Array], Array, Array, Array]:
        """q, k and v before the convolution; z, of the gate; b, of what is corrected; and a, of the decay."""
        net = self.net
        if not net.fused:
            q, k, v, z, b, a = jointly([self.q, self.k, self.v, self.z, self.b, self.a], x, call)
            return (q, k, v), z, b, a
        qkvz, ba = (_by_group(y, net.key_heads) for y in jointly([self.qkvz, self.ba], x, call))
        values = net.value_heads // net.key_heads * net.value_dim
        q, k, v, z = jnp.split(qkvz, [net.key_dim, 2 * net.key_dim, 2 * net.key_dim + values], axis=-1)
        b, a = jnp.split(ba, 2, axis=-1)
        return (merged(q), merged(k), merged(v)), merged(z), merged(b), merged(a)


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
    before: Memory | None,
) -> tuple[Float[Array, "b s hv dv"], Memory | None]:
    """What is read from the states of a device's heads, and their memory afterwards, if there was one."""
    if place is not None:
        in_rows = partial(gathered, place=place, axes=())
        qkv, b, a, positions, valid = jax.tree.map(in_rows, (qkv, b, a, positions, valid))
    tails = [jnp.zeros((len(x), net.kernel - 1, x.shape[-1]), x.dtype) for x in qkv] if before is None else before.tails
    with_tails = [jnp.concatenate([tail.astype(x.dtype), x], axis=1) for tail, x in zip(tails, qkv)]
    q, k, v = (convolution(x, kernel, positions) for x, kernel in zip(with_tails, kernels))
    q, k = (_unit(x.reshape(*x.shape[:2], -1, net.key_dim)) for x in (q, k))
    v = v.reshape(*v.shape[:2], -1, net.value_dim)
    log_rate, step_bias = (rate.astype(jnp.float32) for rate in rates)
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(a.astype(jnp.float32) + step_bias)
    # Padding leaves the state as it is.
    log_decay = jnp.where(valid[..., None], log_decay, 0)
    beta = jnp.where(valid[..., None], jax.nn.sigmoid(b), 0)
    state = None if before is None else before.state
    out, state = gated_delta_rule(q, k, v, log_decay, beta, positions == 0, state)
    if before is None:
        return out if place is None else dealt(out, place), None
    # Rows that are decoded together end together: their padding is on the left, and convolved with no token.
    return out, Memory(tuple(x[:, x.shape[1] - (net.kernel - 1) :] for x in with_tails), state)


def convolution(
    x: Float[Array, "b t+s c"], kernel: Float[Array, "c 1 t+1"], positions: Int[Array, "b s"]
) -> Float[Array, "b s c"]:
    """silu of a causal convolution of each channel, over tokens of the same document; x begins with t earlier tokens.

    Products and their sum are float32, rounded before silu, as in torch.
    """
    length, size = positions.shape[1], kernel.shape[-1]
    total = 0.0
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
    """Decays between those of a long and of a short memory, as transformers draws them."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))
