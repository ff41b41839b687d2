"""The values of a quantized weight's codes: the table of the six kinds of element."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8


@dataclass(frozen=True)
class Elements:
    """One kind of element. Both ways to decode it are exact in float32.

    Attributes:
        values: the value of each of the 16 or 256 codes.
        arithmetic: a formula that gives the same values in a few instructions; None: values are looked up.
    """

    values: tuple[float, ...]
    arithmetic: Callable[[Array], Array] | None

    @property
    def bits(self) -> int:
        """Bits of a code, 4 or 8."""
        return 4 if len(self.values) == 16 else 8

    @property
    def packed(self) -> int:
        """Number of codes in a byte of storage."""
        return 8 // self.bits

    def decode(self, code: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return the float32 values of codes."""
        if self.arithmetic is not None:
            return self.arithmetic(code)
        # A code cannot exceed the table, so XLA needs no clamp.
        return jnp.asarray(self.values, jnp.float32).at[code].get(mode="promise_in_bounds")


def small_float(code: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """Return float32 values of small floats with a sign bit and these exponent and mantissa bits.

    The bits are shifted to their positions in a float16, which is the same number except for the exponent's bias; a
    factor corrects the bias. Subnormal numbers stay subnormal in float16, where no device flushes them to zero.
    """
    size = exponent_bits + mantissa_bits
    code = code.astype(jnp.uint16)
    # float16 has 10 mantissa bits: the mantissas align at their high ends, and the exponents at their low ends.
    magnitude = (code & (1 << size) - 1) << 10 - mantissa_bits
    half = jax.lax.bitcast_convert_type((code >> size) << 15 | magnitude, jnp.float16)
    # The bias is 15 in float16 and 2^(exponent_bits - 1) - 1 in the small float; the factor is 2 to the difference.
    return half.astype(jnp.float32) * 2.0 ** (16 - 2 ** (exponent_bits - 1))


def _e2m1(code: Array) -> Array:
    return small_float(code, 2, 1)


def e4m3(code: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Decode the bits of float8_e4m3fn, which has no infinity and one NaN of either sign, to float32."""
    return jnp.where(code & 0x7F == 0x7F, jnp.nan, small_float(code, 4, 3))


def _int4(code: Array) -> Array:
    # Two's complement: with the sign bit flipped, the code is the value plus 8.
    return (code ^ 8).astype(jnp.float32) - 8.0


def _int8(code: Array) -> Array:
    return (code ^ 128).astype(jnp.float32) - 128.0


# NF4: quantiles of the normal distribution (Dettmers et al. 2023). FP4: the magnitudes of a float with 3 bits and a
# sign. Order and digits are bitsandbytes'.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _with_sign(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    """Return the values of codes that have the sign in the high bit."""
    return magnitudes + tuple(-magnitude for magnitude in magnitudes)


def _of_bytes(dtype) -> tuple[float, ...]:
    return tuple(np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).tolist())


ELEMENTS = {
    "nf4": Elements(_NF4, None),
    "fp4": Elements(_with_sign(_FP4), None),
    "e2m1": Elements(_with_sign(_E2M1), _e2m1),
    "int4": Elements(tuple(map(float, (*range(8), *range(-8, 0)))), _int4),
    "e4m3": Elements(_of_bytes(jnp.float8_e4m3fn), e4m3),
    "int8": Elements(_of_bytes(np.int8), _int8),
}
