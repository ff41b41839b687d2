"""x W^T with a quantized W, on any mesh."""

import jax
from jaxtyping import Array, Float

from jaxtune.parallel.layout import TOKENS, P, gather
from jaxtune.quant.array import QuantizedArray
from pallas_kernels.quant_matmul import quant_matmul


def matmul(x: Float[Array, "b s i"], weight: QuantizedArray, axis: str | None) -> Float[Array, "b s o"]:
    """x W^T in the dtype of x; `axis` is the mesh axis of o.

    Codes and scales are gathered over `fsdp`, a quarter or half of the bytes of the matrix, and dequantized where they
    are used, again in the backward pass.
    """
    weight = jax.tree.map(gather, weight)
    scales, tensor_scale = weight.kernel_scales()
    inner = jax.typeof(weight.codes).sharding.spec[1]

    def kernel(x, codes, scales, tensor_scale):
        y = quant_matmul(x.reshape(-1, x.shape[-1]), codes, scales, tensor_scale, elements=weight.elements)
        y = y.reshape(*x.shape[:2], -1)
        return y if inner is None else jax.lax.psum(y, inner)

    specs = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, (x, weight.codes, scales, tensor_scale))
    return jax.shard_map(kernel, in_specs=specs, out_specs=P(*TOKENS, axis))(x, weight.codes, scales, tensor_scale)
