"""Linear maps: the one `matmul`, and a layer with an optional LoRA adapter."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxtune.models.declared import declared
from jaxtune.models.dropout import Noise, dropout
from jaxtune.models.spec import Layer, ModelSpec
from jaxtune.parallel.layout import RULES, TOKENS, P, gather
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.matmul import matmul as low_precision_matmul
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.matmul import matmul as quantized_matmul

# What a linear map returns goes by this name in policies of jax.checkpoint.
PRODUCT = "linear"


def matmul(
    x: Float[Array, "b s i"],
    weight: Float[Array, "o i"] | QuantizedArray | LowPrecision,
    out: str | None,
    noise: Noise | None = None,
) -> Float[Array, "b s o"]:
    """x W^T in the dtype of x, W in Hugging Face's (out, in) orientation; `out` is the logical name of o.

    `noise` is where a low-precision backward pass has its random bits from.

    Products over two dimensions are several times faster on a CPU, so rows and positions are merged where no
    position is sharded (merging a sharded dimension would move every token).
    """
    axis = None if out is None else getattr(RULES, out)
    if isinstance(weight, QuantizedArray):
        return quantized_matmul(x, weight, axis)
    if isinstance(weight, LowPrecision):
        return low_precision_matmul(x, weight, axis, noise)
    weight = gather(weight.astype(x.dtype))
    if jax.sharding.get_abstract_mesh().shape["sequence"] > 1:
        return jnp.einsum("bsi,oi->bso", x, weight, out_sharding=P(*TOKENS, axis))
    rows = x.reshape(-1, x.shape[-1])
    product = jnp.einsum("ti,oi->to", rows, weight, out_sharding=P(TOKENS[0], axis))
    return jax.reshard(product.reshape(*x.shape[:2], -1), P(*TOKENS, axis))


class Linear(nnx.Module):
    """y = x W^T + bias + scale · dropout(x) A^T B^T, the last term where there is an adapter (Hu et al. 2021).

    `name` is its place in the layer ("mlp.down"), by which the layer says what is special about it.
    """

    def __init__(
        self, spec: ModelSpec, layer: Layer, name: str, shape: tuple[int, int], axes: tuple[str, str], bias: bool
    ):
        out, inner = shape
        self.name, self.out, self.float32 = name, axes[0], f"{name}.weight" in layer.float32
        self.adapter = adapter = spec.adapter if name in layer.adapters else None
        self.weight = declared(shape, axes, nnx.initializers.normal(spec.initializer_range))
        self.bias = declared((out,), axes[:1], nnx.initializers.zeros) if bias else None
        if adapter:
            a_init = partial(_uniform, bound=inner**-0.5)  # peft's: Kaiming uniform with a = sqrt(5)
            self.lora_a = declared((adapter.rank, inner), ("rank", axes[1]), a_init, nnx.LoRAParam)
            self.lora_b = declared((out, adapter.rank), (axes[0], "rank"), nnx.initializers.zeros, nnx.LoRAParam)

    def __call__(self, x: Float[Array, "b s i"], noise: Noise | None) -> Float[Array, "b s o"]:
        """y in the dtype of x; `noise` is None outside training: no dropout."""
        if not self.float32:
            return checkpoint_name(self._apply(x, noise), PRODUCT)
        with jax.default_matmul_precision("highest"):  # on a GPU not TF32, in the backward pass neither
            return checkpoint_name(self._apply(x.astype(jnp.float32), noise).astype(x.dtype), PRODUCT)

    def _apply(self, x: Float[Array, "b s i"], noise: Noise | None) -> Float[Array, "b s o"]:
        out = None if self.out == "embed" else self.out
        y = matmul(x, self.weight.get_value(), out, noise and noise.site(f"{self.name} rounding"))
        if self.bias is not None:
            bias = jax.reshard(self.bias.astype(y.dtype), P(jax.typeof(y).sharding.spec[-1]))
            # In float32, in which its gradient is then summed over the tokens.
            y = (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)
        if self.adapter:
            if noise is not None and self.adapter.dropout:
                x = dropout(x, self.adapter.dropout, noise.site(self.name))
            low = checkpoint_name(matmul(x, self.lora_a, None), PRODUCT)
            y += matmul(low, self.lora_b, out) * jnp.asarray(self.adapter.scale, y.dtype)
        return y


def _uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, bound: float) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)
