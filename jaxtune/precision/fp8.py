"""FP8 products: e4m3 weights and activations, e5m2 gradients, one scale per tensor (Micikevicius et al. 2022)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.precision.hadamard import rotated
from jaxtune.precision.operands import Numbers, Operand, Operands, by_feature, largest
from jaxtune.quant.array import divisors
from pallas_kernels.fp8_matmul import fp8_matmul, quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Fp8Numbers(Numbers):
    """The hybrid format of Transformer Engine: forward products use fast accumulation, backward ones do not.

    Attributes:
        hadamard: both sides of a product are rotated along the contracted dimension before they are rounded, and amax
            is taken after the rotation. dW contracts over tokens, so its two sides are rotated otherwise than the
            tensors whose amax the delayed scales come from: they have scales of their own.
        online: a delayed scale of 0 asks for current scaling, by the tensor's own amax. Rounding then waits for amax
            in every step, whether the scale is 0 or not.
    """

    hadamard: bool
    online: bool
    delayed: ClassVar[bool] = True

    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Codes of W and of W^T: FP8 products contract last dimensions. A weight's scale comes from its own amax."""
        return Operands(self._matrix(weight), self._matrix(weight.T))

    def forward(self, x, weight, scale):
        """e4m3 activations times e4m3 weights."""
        rows = self._rotated(x.reshape(-1, x.shape[-1]))
        codes, scale, found = _to_fp8(rows, E4M3, scale, self.online)
        y = _product(codes, _e4m3(weight), scale, weight.scale, dtype=x.dtype, fast_accumulation=True)
        return y.reshape(*x.shape[:2], -1), found

    def backward(self, dy, x, weight, scales, random, dtype):
        """e5m2 gradients times e4m3 weights, and times e4m3 activations."""
        x_scale, dy_scale = (None, None) if scales is None else scales
        codes, used, found = _to_fp8(self._rotated(dy.reshape(-1, dy.shape[-1])), E5M2, dy_scale, self.online)
        dx = _product(codes, _e4m3(weight), used, weight.scale, dtype=dy.dtype).reshape(*dy.shape[:2], -1)
        if x is None:
            return dx, None, found
        if self.hadamard:
            # Rotated along the tokens: neither the codes made for dx nor the delayed scales are of these numbers.
            dy_codes, used, _ = _to_fp8(rotated(by_feature(dy)), E5M2)
            x_codes, x_used, _ = _to_fp8(rotated(by_feature(x)), E4M3)
        else:
            # The codes of dy serve dW too. x was saved in its own dtype, and is rounded again to its forward codes.
            dy_codes = by_feature(codes.reshape(dy.shape))
            x_codes, x_used, _ = _to_fp8(x.reshape(-1, x.shape[-1]), E4M3, x_scale, self.online)
            x_codes = by_feature(x_codes.reshape(x.shape))
        return dx, _product(dy_codes, x_codes, used, x_used, dtype=dtype), found

    def _matrix(self, weight: Float[Array, "m k"]) -> Operand:
        codes, scale, _ = _to_fp8(self._rotated(weight), E4M3)
        return Operand(jax.lax.bitcast_convert_type(codes, jnp.uint8), scale)

    def _rotated(self, x: Float[Array, "m k"]) -> Float[Array, "m k"]:
        return rotated(x) if self.hadamard else x


def _to_fp8(
    x: Float[Array, "m k"], dtype: Any, scale: Float[Array, ""] | None = None, online: bool = False
) -> tuple[Float[Array, "m k"], Float[Array, "1 1"], Float[Array, ""]]:
    """FP8 codes of x, the scale that x was divided by, and the amax of x.

    Without a scale, or where it is 0 and `online`, the scale is current: amax becomes the largest number of the dtype.
    A finite value that is too large for the scale saturates; a value that is not finite becomes NaN.
    """
    # Needed with a delayed scale too: it enters the history, from which the scales of later steps are made.
    found, most = largest(x), float(jnp.finfo(dtype).max)
    if scale is None or online:
        own = divisors(found / most)
        scale = own if scale is None else jnp.where(scale > 0, scale, own)
    # A number of bfloat16, so that `fp8_matmul` can take it in the dtype of its result.
    scale = jax.lax.reduce_precision(scale.reshape(1, 1), exponent_bits=8, mantissa_bits=7)
    return quantize(x, scale, dtype), scale, found


def _product(x, weight, x_scale, weight_scale, dtype, fast_accumulation=False):
    """`fp8_matmul` with scales in the dtype of the result, if that has their bits."""
    scales = [s.astype(dtype) if dtype == jnp.bfloat16 else s for s in (x_scale, weight_scale)]
    return fp8_matmul(x, weight, *scales, dtype=dtype, fast_accumulation=fast_accumulation)


def _e4m3(operand: Operand) -> Float[Array, "m k"]:
    return jax.lax.bitcast_convert_type(operand.codes, E4M3)
