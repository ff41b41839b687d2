"""The parts of an AdamW update: 8-bit moments, the inputs of a step, and the arithmetic of an element.

Shapes: l layers, o rows, i columns, r x c elements of a block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8, UInt32

TINY = float(np.finfo(np.float32).tiny)  # XLA flushes smaller (subnormal) numbers to zero


class QuantizedMoment(NamedTuple):
    """A moment in 8 bits. An element is value(code) * absmax of its block, which has r x c elements."""

    codes: UInt8[Array, "l o i"]
    absmax: Float32[Array, "l o/r i/c"]


# Parameter, mean of gradients (in the signed dynamic map), mean of squared gradients (in the unsigned map).
Updated = tuple[Float[Array, "l o i"], QuantizedMoment, QuantizedMoment]
SIGNED = (True, False)


class AdamStep(NamedTuple):
    """The inputs of a step other than the gradient, for a stack of matrices or the shard of a stack.

    Attributes:
        count: number of updates before this one.
        rate: learning rate of each layer.
        decay: weight decay of each layer.
        factor: multiplies the gradient.
        finite: False: nothing changes.
        key: key of stochastic rounding.
        origin: layer, row and column, in the whole stack, of this shard's first element.
    """

    count: Int[Array, ""]
    rate: Float32[Array, " l"]
    decay: Float32[Array, " l"]
    factor: Float32[Array, ""]
    finite: Bool[Array, ""]
    key: UInt32[Array, "2"]
    origin: UInt32[Array, "3"]


class Factors(NamedTuple):
    """Scalars that all elements share in a step, combined so that an element needs few multiplications.

    Attributes:
        to_mean: factor of a gradient in the mean.
        to_root: factor of a gradient whose square is added to the mean of squares.
        scale: factor of the root of the mean of squares in the denominator.
        epsilon: added to the denominator.
    """

    to_mean: Float32[Array, ""]
    to_root: Float32[Array, ""]
    scale: Float32[Array, ""]
    epsilon: Float32[Array, ""]


@dataclass(frozen=True)
class Adam:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in float32, element by element."""

    beta1: float
    beta2: float
    epsilon: float

    @property
    def betas(self) -> tuple[float, float]:
        """The decay rate of each moment."""
        return self.beta1, self.beta2

    def factors(self, step: AdamStep) -> Factors:
        """Compute the factors of a step, bias correction included.

        With c1 and c2 as the corrections for moments that started at zero,
        c1 * mean / (sqrt(c2 * square) + epsilon) = mean / (scale * sqrt(square) + epsilon / c1).
        """
        exponent = (step.count + 1).astype(jnp.float32)
        unbiased, unbiased_square = 1 - self.beta1**exponent, 1 - self.beta2**exponent  # 1 / c1 and 1 / c2
        return Factors(
            to_mean=(1 - self.beta1) * step.factor,
            to_root=(1 - self.beta2) ** 0.5 * step.factor,
            scale=unbiased / jnp.sqrt(unbiased_square),
            epsilon=self.epsilon * unbiased,
        )

    def __call__(
        self,
        gradient: Float32[Array, "*shape"],
        parameter: Float32[Array, "*shape"],
        kept: tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]],
        factors: Factors,
        rate: Float32[Array, "..."],
        decay: Float32[Array, "..."],
    ) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"], Float32[Array, "*shape"]]:
        """Return the next parameter and moments; `kept`: the previous moments, each times its beta."""
        root = gradient * factors.to_root
        mean, square = kept[0] + gradient * factors.to_mean, kept[1] + root * root
        direction = mean / (jnp.sqrt(square) * factors.scale + factors.epsilon)
        return parameter - rate * (direction + decay * parameter), mean, square


def inverse(absmax: Float32[Array, "*blocks"]) -> Float32[Array, "*blocks"]:
    """Return the factor that brings the elements of a block into [-1, 1]; 1 for a block of (almost) zeros."""
    return 1 / jnp.where(absmax < TINY, 1.0, absmax)


def block_of(moment: QuantizedMoment) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    (_, rows, columns), (_, down, across) = moment.codes.shape, moment.absmax.shape
    return rows // down, columns // across
