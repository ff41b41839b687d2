"""Linear layers: the one `matmul`, and a layer with an optional adapter."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.models.call import Call
from jaxtune.models.declared import declared
from jaxtune.models.dropout import Noise
from jaxtune.models.spec import Layer, ModelSpec
from jaxtune.parallel.layout import RULES, P, by_token, gather, shards, used
from jaxtune.precision.matmul import LowPrecision
from jaxtune.quant.array import QuantizedArray

# The name of a linear layer's output in policies of jax.checkpoint.
PRODUCT = "linear"


class Adapter(Protocol):
    """What is trained beside a frozen weight, by a parameter-efficient method; frozen and hashable, one a layer.

    Attributes:
        peft_names: what peft calls each parameter, after the name of the module.
        shared: parameters that the parts of one Hugging Face module (a fused qkv) have in common, and the first holds.
        owner: name of that first part ("attention.q"); None in the first part itself, and where the module is whole.
    """

    peft_names: ClassVar[Mapping[str, str]]
    shared: ClassVar[frozenset[str]]

    @property
    def owner(self) -> str | None:
        """The part that holds what is `shared`; None in that part itself."""
        ...

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """The adapter's parameters, beside a weight (out, in) of these axes."""
        ...

    def __call__(
        self, linear: "Linear", first: "Linear", x: Float[Array, "b s i"], y: Float[Array, "b s o"], call: Call
    ) -> Float[Array, "b s o"]:
        """The output with the adapter; `y` is the base's, with its bias. The `first` part holds what is `shared`."""
        ...

    def merged(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> Float[Array, "o i"]:
        """The weight that gives the same output without an adapter: float32, from float32 values."""
        ...


def matmul(
    x: Float[Array, "b s i"],
    weight: Float[Array, "o i"] | QuantizedArray | LowPrecision,
    out: str | None,
    noise: Noise | None = None,
) -> Float[Array, "b s o"]:
    """x W^T in the dtype of x, W in Hugging Face's (out, in) orientation; `out` is the logical name of o.

    `noise`: source of randomness for stochastic rounding in a low-precision backward pass.
    """
    if not isinstance(weight, jax.Array):  # a weight knows how it is multiplied
        return weight.matmul(x, used(out), noise)
    weight = gather(weight.astype(x.dtype))
    # Products over two dimensions are several times faster on a CPU, so rows and positions are merged where no position
    # is sharded: merging a sharded dimension would move every token.
    if shards(RULES.value.positions, jax.sharding.get_abstract_mesh()) > 1:
        return jnp.einsum("bsi,oi->bso", x, weight, out_sharding=by_token(out))
    rows = x.reshape(-1, x.shape[-1])
    product = jnp.einsum("ti,oi->to", rows, weight, out_sharding=P(by_token()[0], used(out)))
    return jax.reshard(product.reshape(*x.shape[:2], -1), by_token(out))


class Linear(nnx.Module):
    """y = x W^T + bias, with an adapter if there is one.

    `name` is its place in the layer ("mlp.down"), by which the layer says how it is treated.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: Layer,
        name: str,
        shape: tuple[int, int],
        axes: tuple[str | None, ...],
        bias: bool = False,
    ):
        treatment = layer.treatment(f"{name}.weight")
        self.name, self.out = name, axes[0]
        self.float32, self.adapter = treatment.float32, treatment.adapter
        self.weight = declared(shape, axes, nnx.initializers.normal(spec.initializer_range), "linear")
        self.bias = declared(shape[:1], axes[:1], nnx.initializers.zeros, "vector") if bias else None
        for part, variable in self.adapter.declare(shape, axes).items() if self.adapter else ():
            setattr(self, part, variable)

    def __call__(self, x: Float[Array, "b s i"], call: Call, first: "Linear | None" = None) -> Float[Array, "b s o"]:
        """y in the dtype of x.

        `first`: the layer with the first part of a Hugging Face module that this may be a part of (a fused qkv), which
        holds what the parts of an adapter share; not used where the module is whole.
        """
        if not self.float32:
            return checkpoint_name(self._apply(x, call, first), PRODUCT)
        with jax.default_matmul_precision("highest"):  # no TF32 on a GPU, nor in the backward pass
            return checkpoint_name(self._apply(x.astype(jnp.float32), call, first).astype(x.dtype), PRODUCT)

    def part(self, name: str) -> Array:
        """A parameter of the adapter."""
        return getattr(self, name).get_value()

    def _apply(self, x: Float[Array, "b s i"], call: Call, first: "Linear | None") -> Float[Array, "b s o"]:
        noise = call.noise and call.noise.site(f"{self.name} rounding")
        y = matmul(x, self.weight.get_value(), self.out, noise)
        if self.bias is not None:
            bias = jax.reshard(self.bias.astype(y.dtype), P(jax.typeof(y).sharding.spec[-1]))
            # In float32, so that the bias's gradient is summed over the tokens in float32.
            y = (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)
        return self.adapter(self, first or self, x, y, call) if self.adapter and call.adapters else y
