"""The 256 values of bitsandbytes' dynamic maps (Dettmers 2015, arXiv:1511.04561), and the nearest of them.

The bits of a code are divided between a decimal exponent and a fraction: the larger the value, the more bits its
fraction has. The signed map has values on both sides of zero, and 1 but not -1; the unsigned one has twice as many
above zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

EXPONENTS = 7


def _dynamic_map(signed: bool) -> np.ndarray:
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        bounds = _linspace(2 ** (exponent if signed else exponent + 1) + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2) * 10.0 ** (exponent - EXPONENTS + 1)
        values += [*means, *-means] if signed else [*means]
    return np.sort(np.asarray(values, np.float32))


def _linspace(count: int) -> np.ndarray:
    """From 0.1 to 1, rounded as torch.linspace does: float32 ends and step, from the nearer end."""
    first, step, index = float(np.float32(0.1)), float(np.float32(0.9 / (count - 1))), np.arange(count)
    return np.where(index < count // 2, first + step * index, 1 - step * (count - 1 - index)).astype(np.float32)


DYNAMIC_MAP = _dynamic_map(signed=True)
UNSIGNED_DYNAMIC_MAP = _dynamic_map(signed=False)

# The parts of a map's table: the value of each code; the bound below which a value has a lower code; and for each
# decade the slope and the intercept of a line that counts bounds.
BOUNDS, SLOPES, INTERCEPTS = 256, 512, 520
# Magnitudes below the least have the code of zero. The bits of a float32 as an integer, less ZEROTH, are nearly in
# proportion to its logarithm: 2^23 of them are an octave, of which a decade has 1 / log10(2) = 4096 / 1233.
LEAST, ONE = (int(np.float32(value).view(np.int32)) for value in (1e-7, 1.0))
ZEROTH = 26535 << 15


def _table(signed: bool) -> np.ndarray:
    values = DYNAMIC_MAP if signed else UNSIGNED_DYNAMIC_MAP
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    decade = np.minimum(np.arange(INTERCEPTS - SLOPES), EXPONENTS - 1)  # what is above the last one belongs to it
    count = 2.0 ** (decade if signed else decade + 1)  # of values in the decade, from a tenth of its end to the end
    slopes, intercepts = count / 0.9 * 10.0 ** (EXPONENTS - 1 - decade), count * 8 / 9 - 0.5
    return np.concatenate([values, [-np.inf], bounds, slopes, intercepts]).astype(np.float32)


TABLES = {signed: _table(signed) for signed in (True, False)}

LookUp = Callable[[Int[Array, "*shape"]], Float[Array, "*shape"]]


def _of_table(signed: bool) -> LookUp:
    return lambda index: jnp.asarray(TABLES[signed]).at[index].get(mode="promise_in_bounds")


def encode(values: Float[Array, "*shape"], signed: bool, look_up: LookUp | None = None) -> UInt8[Array, "*shape"]:
    """Code of the nearest value of the map; halfway goes to the lower one, as by torch.bucketize.

    Exact for every float32 from -1 (from 0 in the unsigned map) to 1. `look_up` reads the map's table in a kernel.
    """
    look_up = look_up or _of_table(signed)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    magnitude = jnp.minimum(jnp.maximum(bits & 0x7FFFFFFF, LEAST), ONE)
    # Within a decade the bounds between codes are equally far apart, so a line finds the nearest of them, and whether
    # the value lies above it decides. Neither must be exact: a value near the end of a decade has the same nearest
    # bound by the lines of both.
    decade = ((magnitude - ZEROTH) >> 15) * 1233 >> 20
    line = jax.lax.bitcast_convert_type(magnitude, jnp.float32) * look_up(decade + SLOPES)
    bound = (line + look_up(decade + INTERCEPTS)).astype(jnp.int32)
    # x ^ -1 = -1 - x: below zero bounds are counted the other way.
    code = (bound ^ (bits >> 31)) + 128 if signed else bound
    return (code - (values <= look_up(code + BOUNDS)).astype(jnp.int32)).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*shape"], signed: bool, look_up: LookUp | None = None) -> Float[Array, "*shape"]:
    """The values of the map, float32. `look_up` reads the map's table in a kernel."""
    return (look_up or _of_table(signed))(codes.astype(jnp.int32))
