"""FP8 products: e4m3 weights and activations, e5m2 gradients, a scale a tensor (Micikevicius et al. 2022)."""

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
    """The hybrid format of Transformer Engine: forward products accumulate fast, backward ones do not.

    Attributes:
        hadamard: both sides of a product are rotated along what it contracts before they are rounded, and the largest
            magnitudes are of what is rounded. Then dW, which contracts over tokens, rounds other numbers than those
            that delayed scales are of, so its two sides have scales of their own.
        online: a delayed scale of 0 stands for the tensor's own, so that rounding waits for the largest magnitude
            whether the scale is used or not.
    """

    hadamard: bool
    online: bool
    delayed: ClassVar[bool] = True

    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Codes of W and of W^T: FP8 products contract last dimensions. A weight's scale is always its own."""
        return Operands(self._matrix(weight), self._matrix(weight.T))

    def forward(self, x, weight, scale):
        """Of e4m3 and e4m3."""
        rows = self._rotated(x.reshape(-1, x.shape[-1]))
        codes, scale, found = _to_fp8(rows, E4M3, scale, self.online)
        y = fp8_matmul(codes, _e4m3(weight), scale, weight.scale, dtype=x.dtype, fast_accumulation=True)
        return y.reshape(*x.shape[:2], -1), found

    def backward(self, dy, x, weight, scales, random, dtype):
        """Of e5m2 and e4m3."""
        x_scale, dy_scale = (None, None) if scales is None else scales
        codes, used, found = _to_fp8(self._rotated(dy.reshape(-1, dy.shape[-1])), E5M2, dy_scale, self.online)
        dx = fp8_matmul(codes, _e4m3(weight), used, weight.scale, dtype=dy.dtype).reshape(*dy.shape[:2], -1)
        if x is None:
            return dx, None, found
        if self.hadamard:
            dy_codes, used, _ = _to_fp8(rotated(by_feature(dy)), E5M2)
            x_codes, x_used, _ = _to_fp8(rotated(by_feature(x)), E4M3)
        else:
            dy_codes = by_feature(codes.reshape(dy.shape))
            x_codes, x_used, _ = _to_fp8(x.reshape(-1, x.shape[-1]), E4M3, x_scale, self.online)
            x_codes = by_feature(x_codes.reshape(x.shape))
        return dx, fp8_matmul(dy_codes, x_codes, used, x_used, dtype=dtype), found

    def _matrix(self, weight: Float[Array, "m k"]) -> Operand:
        codes, scale, _ = _to_fp8(self._rotated(weight), E4M3)
        return Operand(jax.lax.bitcast_convert_type(codes, jnp.uint8), scale)

    def _rotated(self, x: Float[Array, "m k"]) -> Float[Array, "m k"]:
        return rotated(x) if self.hadamard else x


def _to_fp8(
    x: Float[Array, "m k"], dtype: Any, scale: Float[Array, ""] | None = None, online: bool = False
) -> tuple[Float[Array, "m k"], Float[Array, "1 1"], Float[Array, ""]]:
    """FP8 codes, the scale that they have, and the largest magnitude of what was rounded.

    Without a scale, or where it is 0 and `online`, the largest magnitude fills the dtype. What is too large for a scale
    saturates, what is not finite becomes NaN.
    """
    found, most = largest(x), float(jnp.finfo(dtype).max)
    if scale is None or online:
        own = divisors(found / most)
        scale = own if scale is None else jnp.where(scale > 0, scale, own)
    scale = scale.reshape(1, 1)
    return quantize(x, scale, dtype), scale, found


def _e4m3(operand: Operand) -> Float[Array, "m k"]:
    return jax.lax.bitcast_convert_type(operand.codes, E4M3)
