"""FP8 products: e4m3 weights and activations, e5m2 gradients, one scale per tensor (Micikevicius et al. 2022)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxtune.precision.hadamard import rotate_blocks
from jaxtune.precision.operands import MatmulFormat, Operand, Operands, by_feature, global_amax
from jaxtune.quant.array import divisors
from pallas_kernels.fp8_matmul import fp8_matmul, quantize

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Fp8Matmul(MatmulFormat):
    """The hybrid format of Transformer Engine: forward products use fast accumulation, backward ones do not.

    Attributes:
        hadamard: rotate both sides of a product along the contracted dimension before rounding; amax is taken after
            the rotation. dW contracts over tokens, so its two sides are rotated along tokens and delayed scales, whose
            amax comes from a rotation along features, do not fit them: dW always uses current scaling.
        online: a delayed scale of 0 requests current scaling by the tensor's own amax. Rounding then waits for amax in
            every step, whether the scale is 0 or not.
    """

    hadamard: bool
    online: bool
    delayed: ClassVar[bool] = True

    def operands(self, weight: Float[Array, "o i"]) -> Operands:
        """Make codes of W and W^T, as FP8 products contract last dimensions; the scale comes from the weight's amax."""
        # Both have the same codes unless they are rotated: the rotation runs along the contracted dimension.
        return Operands(self._matrix(weight), self._matrix(weight.T))

    def forward(self, x, weight, scale):
        """Multiply e4m3 activations by e4m3 weights."""
        rows = self._rotate(x.reshape(-1, x.shape[-1]))
        codes, scale, amax = _to_fp8(rows, E4M3, scale, self.online)
        y = _product(codes, _e4m3(weight), scale, weight.scale, dtype=x.dtype, fast_accumulation=True)
        return y.reshape(*x.shape[:2], -1), amax

    def backward(self, dy, x, weight, scales, random, dtype):
        """Multiply e5m2 gradients by e4m3 weights (dx) and by e4m3 activations (dW)."""
        x_scale, dy_scale = (None, None) if scales is None else scales
        codes, dy_scale_used, amax = _to_fp8(self._rotate(dy.reshape(-1, dy.shape[-1])), E5M2, dy_scale, self.online)
        dx = _product(codes, _e4m3(weight), dy_scale_used, weight.scale, dtype=dy.dtype).reshape(*dy.shape[:2], -1)
        if x is None:
            return dx, None, amax
        if self.hadamard:
            # Rotation along tokens gives other numbers: neither the codes made for dx nor the delayed scales fit them.
            dy_codes, dy_scale_used, _ = _to_fp8(rotate_blocks(by_feature(dy)), E5M2)
            x_codes, x_scale_used, _ = _to_fp8(rotate_blocks(by_feature(x)), E4M3)
        else:
            # dW reuses the codes of dy. x was saved in its own dtype and is rounded again, to the same codes as in the
            # forward pass.
            dy_codes = by_feature(codes.reshape(dy.shape))
            x_codes, x_scale_used, _ = _to_fp8(x.reshape(-1, x.shape[-1]), E4M3, x_scale, self.online)
            x_codes = by_feature(x_codes.reshape(x.shape))
        return dx, _product(dy_codes, x_codes, dy_scale_used, x_scale_used, dtype=dtype), amax

    def _matrix(self, weight: Float[Array, "m k"]) -> Operand:
        codes, scale, _ = _to_fp8(self._rotate(weight), E4M3)
        return Operand(jax.lax.bitcast_convert_type(codes, jnp.uint8), scale)

    def _rotate(self, x: Float[Array, "m k"]) -> Float[Array, "m k"]:
        return rotate_blocks(x) if self.hadamard else x


def _to_fp8(
    x: Float[Array, "m k"], dtype: Any, scale: Float[Array, ""] | None = None, online: bool = False
) -> tuple[Float[Array, "m k"], Float[Array, "1 1"], Float[Array, ""]]:
    """Return FP8 codes of x, the scale that x was divided by, and the amax of x.

    Without a scale, or if it is 0 and `online` is set, scaling is current: amax becomes the dtype's largest number.
    A finite value that is too large for the scale saturates; a value that is not finite becomes NaN.
    """
    # Needed with a delayed scale too: amax enters the history, which sets the scales of later steps.
    amax, dtype_max = global_amax(x), float(jnp.finfo(dtype).max)
    if scale is None or online:
        current = divisors(amax / dtype_max)
        scale = current if scale is None else jnp.where(scale > 0, scale, current)
    # Round to bfloat16, so that `fp8_matmul` can take the scale in the dtype of its result without changing it.
    scale = jax.lax.reduce_precision(scale.reshape(1, 1), exponent_bits=8, mantissa_bits=7)
    return quantize(x, scale, dtype), scale, amax


def _product(x, weight, x_scale, weight_scale, dtype, fast_accumulation=False):
    """Call `fp8_matmul` with scales in the dtype of the result, if that dtype holds them exactly."""
    scales = [s.astype(dtype) if dtype == jnp.bfloat16 else s for s in (x_scale, weight_scale)]
    return fp8_matmul(x, weight, *scales, dtype=dtype, fast_accumulation=fast_accumulation)


def _e4m3(operand: Operand) -> Float[Array, "m k"]:
    return jax.lax.bitcast_convert_type(operand.codes, E4M3)
