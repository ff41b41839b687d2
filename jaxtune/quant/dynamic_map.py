"""The 256 values of bitsandbytes' signed dynamic map (Dettmers 2015, arXiv:1511.04561): 7 bits that are shared out
between a decimal exponent and a fraction."""

import numpy as np

EXPONENTS = 7


def _dynamic_map() -> np.ndarray:
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        bounds = _linspace(2**exponent + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2) * 10.0 ** (exponent - EXPONENTS + 1)
        values += [*means, *-means]
    return np.sort(np.asarray(values, np.float32))


def _linspace(count: int) -> np.ndarray:
    """From 0.1 to 1, rounded as torch.linspace does: float32 ends and step, from the nearer end."""
    first, step, index = float(np.float32(0.1)), float(np.float32(0.9 / (count - 1))), np.arange(count)
    return np.where(index < count // 2, first + step * index, 1 - step * (count - 1 - index)).astype(np.float32)


DYNAMIC_MAP = _dynamic_map()
