"""The 256 values of bitsandbytes' dynamic maps (Dettmers 2015, arXiv:1511.04561), and rounding to the nearest.

The bits of a code are divided between a decimal exponent and a fraction: the larger the value, the more bits its
fraction has. The signed map has values on both sides of zero, and 1 but not -1; the unsigned map has twice as many
values above zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

EXPONENTS = 7


def _dynamic_map(signed: bool) -> np.ndarray:
    # As in bitsandbytes, the values of a decade are the means of equally spaced bounds.
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        bounds = _linspace(2 ** (exponent if signed else exponent + 1) + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2) * 10.0 ** (exponent - EXPONENTS + 1)
        values += [*means, *-means] if signed else [*means]
    return np.sort(np.asarray(values, np.float32))


def _linspace(count: int) -> np.ndarray:
    """Return `count` numbers from 0.1 to 1, rounded as in torch.linspace.

    Ends and step are float32, and a number is computed from the nearer end.
    """
    first, step, index = float(np.float32(0.1)), float(np.float32(0.9 / (count - 1))), np.arange(count)
    return np.where(index < count // 2, first + step * index, 1 - step * (count - 1 - index)).astype(np.float32)


DYNAMIC_MAP = _dynamic_map(signed=True)
UNSIGNED_DYNAMIC_MAP = _dynamic_map(signed=False)


class Tables(NamedTuple):
    """The look-up tables of a map: numpy arrays, or in a kernel references to arrays.

    Attributes:
        values: the value of each code.
        bounds: for each code, a bound: a value not above the bound has a lower code.
        slopes: for each decade, the slope of the line from a value to the code with the nearest bound.
        intercepts: for each decade, the intercept of this line, plus 2^15 (see `encode`).
    """

    values: Any
    bounds: Any
    slopes: Any
    intercepts: Any


# The decade of a float32 is computed from its highest 17 bits, read as an integer. Except for the sign bit this integer
# is nearly proportional to the logarithm: 256 steps are an octave, and 65536 / 77 = 851.1 steps are nearly a decade,
# which is 256 / log10(2) = 850.4. The decade up to 1e-6 has number 32, and its line is used for all smaller values; the
# decade up to 1 has number 38, and its line is used for all larger values. A negative value's number is larger by 77.
PER_SIGN, PHASE, FIRST = 77, 54_242, 32


def _tables(signed: bool) -> Tables:
    values = DYNAMIC_MAP if signed else UNSIGNED_DYNAMIC_MAP
    bounds = np.append(np.float32(-np.inf), (values[:-1] + values[1:]) / np.float32(2))
    if not signed:
        bounds[1] = 0  # every value above 0 has at least code 1
    number = np.arange(2 * PER_SIGN + 1)
    decade = (number % PER_SIGN - FIRST).clip(0, EXPONENTS - 1)
    count = 2.0 ** (decade if signed else decade + 1)  # number of values in the decade
    slopes, intercepts = count / 0.9 * 10.0 ** (EXPONENTS - 1 - decade), count * 8 / 9 - 0.5
    if signed:
        intercepts = 128 + np.where(number < PER_SIGN, intercepts, -intercepts)
    return Tables(values, bounds, slopes.astype(np.float32), (2**15 + intercepts).astype(np.float32))


TABLES = {signed: _tables(signed) for signed in (True, False)}

LookUp = Callable[[Any, Int[Array, "*shape"]], Float[Array, "*shape"]]


def _gather(table: np.ndarray, index: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def encode(values: Float[Array, "*shape"], tables: Tables, look_up: LookUp = _gather) -> UInt8[Array, "*shape"]:
    """Return the code of the nearest value of the map; ties go to the lower value, as in torch.bucketize.

    In the unsigned map only 0 has code 0: other values that are nearer to 0 than to the next value have code 1. Exact
    for every float32 from -1 (from 0 in the unsigned map) to 1.
    """
    # Within a decade the bounds are equally spaced, so a line finds the nearest bound, and a comparison with this bound
    # decides. Neither line nor decade need be exact: near the edge of two decades both lines find the same bound.
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    decade = (((bits >> 15) * PER_SIGN + PHASE) >> 16).astype(jnp.int32)
    line = values * look_up(tables.slopes, decade) + look_up(tables.intercepts, decade)
    # Between 2^15 and 2^16 the low 8 bits of a float32 are a fraction, and the next 8 bits an integer, the code.
    code = (jax.lax.bitcast_convert_type(line, jnp.int32) >> 8) & 255
    return (code - (values <= look_up(tables.bounds, code)).astype(jnp.int32)).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*shape"], tables: Tables, look_up: LookUp = _gather) -> Float[Array, "*shape"]:
    """Return the values of the codes, float32."""
    return look_up(tables.values, codes.astype(jnp.int32))
