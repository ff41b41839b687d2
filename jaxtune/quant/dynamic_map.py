"""The 256 values of bitsandbytes' dynamic maps (Dettmers 2015, arXiv:1511.04561), and the nearest of them.

The bits of a code are divided between a decimal exponent and a fraction: the larger the value, the more bits its
fraction has. The signed map has values on both sides of zero, and 1 but not -1; the unsigned one has twice as many
above zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

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

# A code is found from the bits of a float32. The high ones (exponent and the start of the mantissa) number a bucket, so
# narrow that at most one bound between two codes lies in it; the low ones are compared with that bound.
OCTAVES = 23  # from 1 down to less than the first bound above zero
LEAST = (127 - OCTAVES) << 23  # bits of 2**-OCTAVES
COMPARED = {True: 17, False: 16}  # number of low bits, in the signed and the unsigned map


def _ordered(bits: np.ndarray | Array) -> np.ndarray | Array:
    """int32 that sort as the float32 of these bits do; a magnitude below LEAST counts as LEAST."""
    # bits >> 31 is -1 for a negative number, and x ^ -1 = -1 - x: the order of magnitudes is reversed there.
    return ((bits & 0x7FFFFFFF).clip(LEAST) - LEAST) ^ (bits >> 31)


def _buckets(signed: bool) -> np.ndarray:
    """An int32 for each bucket; its sum with the low bits of a value has the code above the low bits.

    High bits: the code of the bucket's least value. Low bits: such that the sum carries, which makes the code one more,
    exactly where the value lies above the bound. Without a bound in the bucket they are 0: nothing carries.
    """
    # An example, of the signed map: codes 200 and 201 are 0.2336 and 0.2477; of the bound 0.240625 between them the low
    # 17 bits are 26214. The bucket is 200 << 17 | 104857, with 104857 = 2**17 - 1 - 26214.
    # A value at the bound has the low bits 26214: 26214 + 104857 = 2**17 - 1 does not carry, and its code is 200.
    # The next float32 above it has 26215: 26215 + 104857 = 2**17 carries, and its code is 201.
    table, compared = _TABLES[signed], COMPARED[signed]
    bounds = _ordered(((table[:-1] + table[1:]) / np.float32(2)).view(np.int32))
    last = OCTAVES << (23 - compared)  # the bucket of 1; the first is -1 - last
    below = np.searchsorted(bounds, np.arange(-1 - last, last + 1) << compared)
    buckets = below.astype(np.int32) << compared
    place = (bounds >> compared) + last + 1
    assert len(set(place)) == len(place)
    buckets[place] += ~bounds & (1 << compared) - 1
    return buckets


_TABLES = {True: DYNAMIC_MAP, False: UNSIGNED_DYNAMIC_MAP}
_BUCKETS = {signed: _buckets(signed) for signed in _TABLES}


def encode(values: Float[Array, "*shape"], signed: bool) -> UInt8[Array, "*shape"]:
    """Code of the nearest value of the map; halfway goes to the lower one, as by torch.bucketize.

    Exact for every float32 from -1 (from 0 in the unsigned map) to 1, by one look-up and a few operations on integers.
    """
    buckets, compared = _BUCKETS[signed], COMPARED[signed]
    ordered = _ordered(jax.lax.bitcast_convert_type(values, jnp.int32))
    bucket = jnp.asarray(buckets).at[(ordered >> compared) + len(buckets) // 2].get(mode="clip")
    return ((bucket + (ordered & (1 << compared) - 1)) >> compared).astype(jnp.uint8)


def decode(codes: UInt8[Array, "*shape"], signed: bool) -> Float[Array, "*shape"]:
    """The values of the map, float32."""
    return jnp.asarray(_TABLES[signed]).at[codes].get(mode="promise_in_bounds")
