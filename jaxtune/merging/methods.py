"""Methods that merge tensors of several models, in float32 and by numpy.

Definitions and defaults are mergekit's; a test compares the results.
"""

import functools
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float32

from jaxtune.errors import UserError
from jaxtune.merging.options import METHODS, MergeOptions

Values = Float32[np.ndarray, "..."]
Read = Callable[[], Values]
"""Reads a tensor of one model. It is called when the tensor is needed, so that few tensors are in memory."""

_PARALLEL = 0.9995  # cosine above which two directions are taken for the same
_SMALL = 1e-7  # sum of magnitudes below which nothing is rescaled


def merge_tensor(name: str, reads: Sequence[Read], base: Read | None, options: MergeOptions) -> Values:
    """Return the tensor of the merged model.

    Args:
        name: its name, on which the values depend that DARE drops.
        reads: the tensor in each model.
        base: the tensor in the base; None: the method has no base.
        options: method and options.
    """
    if base is None:
        if options.method == "slerp":
            first, second = reads
            return add_weighted(reads, slerp_weights(cosine(first(), second()), options.t))
        return add_weighted(reads, sum_weights(options))
    start = base()
    # Read inside the lambda, so that only one model's tensor is in memory.
    return start + merge_differences(name, [lambda read=read: read() - start for read in reads], options)


def sum_weights(options: MergeOptions) -> tuple[float, ...]:
    """Return the factors of the models' tensors, or differences, whose sum is the result.

    linear: the weighted mean (model soups, Wortsman et al. 2022, arXiv:2203.05482). task_arithmetic: the weighted sum
    of differences (Ilharco et al. 2023, arXiv:2212.04089).
    """
    divisor = math.fsum(options.weights) if options.normalize else 1.0
    return tuple(weight * options.scale / divisor for weight in options.weights)


def slerp_weights(cosine_of_angle: float, t: float) -> tuple[float, float]:
    """Return the factors of two tensors for interpolation on the sphere (Shoemake 1985).

    Nearly parallel tensors are interpolated linearly.
    """
    if abs(cosine_of_angle) > _PARALLEL:
        return 1 - t, t
    angle = math.acos(cosine_of_angle)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def cosine(first: Values, second: Values) -> float:
    """Return the cosine of the angle between two tensors, seen as vectors; 0 if one is zero."""
    # Normalised before they are multiplied, so that the product does not overflow.
    one, other = (values.reshape(-1) / np.float32(_norm(values)) for values in (first, second))
    return float(np.clip(np.dot(one, other), -1, 1))


def _norm(values: Values) -> float:
    norm = float(np.linalg.norm(values))
    return norm if norm > 1e-8 else 1.0


def add_weighted(reads: Sequence[Read], weights: Sequence[float]) -> Values:
    """Return the weighted sum. A tensor of weight 0 is not read, so a single weight of 1 gives a tensor bit for bit."""
    total = None
    for read, weight in zip(reads, weights):
        if weight:
            part = read() * np.float32(weight)
            total = part if total is None else np.add(total, part, out=total)
    return np.zeros_like(reads[0]()) if total is None else total


def merge_differences(name: str, reads: Sequence[Read], options: MergeOptions) -> Values:
    """Return the merged difference of several models from their base, by the methods that have a base.

    ties: the largest values of each difference, if they have the sign of the weighted sum (TIES, Yadav et al. 2023,
    arXiv:2306.01708). dare_linear, dare_ties: random values of each difference, rescaled (DARE, Yu et al. 2024,
    arXiv:2311.03099); dare_ties adds only values that have the sign of the weighted sum.
    """

    def prune(number: int) -> Values:
        difference = reads[number]()
        if not METHODS[options.method].prunes or options.density >= 1:
            return difference
        if options.method == "ties":
            return difference * largest(difference, options.density)
        seeds = [options.seed, zlib.crc32(name.encode()), number]  # hash() differs between processes
        return drop(difference, np.random.default_rng(seeds).random(difference.shape, np.float32) < options.density)

    prunes = [lambda number=number: prune(number) for number in range(len(reads))]
    if options.elects_signs:
        return _add_elected(prunes, options)
    return add_weighted(prunes, sum_weights(options))


def largest(values: Values, density: float) -> Bool[np.ndarray, "..."]:
    """Return a mask of a share of the values, at least one: the largest magnitudes, and of equal ones the first."""
    magnitudes = np.abs(values).reshape(-1)
    count = max(1, int(density * magnitudes.size))
    least = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    mask = magnitudes > least
    # If the least value is 0, the values that are missing are zeros, which stay zeros without the mask.
    if least > 0:
        mask[np.flatnonzero(magnitudes == least)[: count - np.count_nonzero(mask)]] = True
    return mask.reshape(values.shape)


def drop(values: Values, kept: Bool[np.ndarray, "..."]) -> Values:
    """Set values to zero and rescale the others, so that the sum of the magnitudes stays.

    The paper divides by the density, which is the same in expectation.
    """
    rest = values * kept
    before, after = float(np.abs(values).sum()), float(np.abs(rest).sum())
    return rest if min(before, after) < _SMALL else rest * np.float32(before / after)


def _add_elected(reads: Sequence[Read], options: MergeOptions) -> Values:
    """Return the weighted sum, or mean, of the differences that have the sign of the weighted sum of all."""
    parts = [read() * np.float32(weight) for read, weight in zip(reads, options.weights)]
    positive = functools.reduce(np.add, parts) >= 0
    elected, divisor = np.zeros_like(parts[0]), np.zeros_like(parts[0])
    for part, weight in zip(parts, options.weights):
        counts = np.where(positive, part > 0, part < 0)
        np.add(elected, part, out=elected, where=counts)
        np.add(divisor, np.float32(weight), out=divisor, where=counts)
    if options.normalize:
        elected /= np.where(divisor == 0, np.float32(1), divisor)
    return elected * np.float32(options.scale)


def cast(values: Values, dtype: np.dtype, where: str) -> np.ndarray:
    """Return merged values in the dtype of a file.

    Raises:
        UserError: some are not finite, or too large for it. `where`: file and tensor, for the message.
    """
    with np.errstate(over="ignore"):  # said below
        converted = values.astype(dtype)
    if not np.isfinite(converted).all():
        raise UserError(f"{where}: merged values are not finite, or too large for {dtype.name}")
    return converted
