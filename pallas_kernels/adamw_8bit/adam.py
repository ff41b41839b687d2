"""What an update by AdamW is made of: the moments in 8 bits, what a step brings, and the arithmetic of an element."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8, UInt32

TINY = float(np.finfo(np.float32).tiny)  # XLA flushes smaller numbers, the subnormal ones, to zero


class Moment(NamedTuple):
    """A moment in 8 bits: value(code) * absmax of its block, which has r x c elements."""

    codes: UInt8[Array, "l o i"]
    absmax: Float32[Array, "l o/r i/c"]


# Parameter, mean of gradients (in the signed dynamic map), mean of their squares (in the unsigned one).
Updated = tuple[Float[Array, "l o i"], Moment, Moment]
SIGNED = (True, False)


class Step(NamedTuple):
    """What a step brings besides gradients, for a stack of matrices or the shard of one."""

    count: Int[Array, ""]  # updates before this one
    rate: Float32[Array, " l"]  # learning rate of each layer
    decay: Float32[Array, " l"]  # weight decay of each layer
    factor: Float32[Array, ""]  # multiplies the gradient
    finite: Bool[Array, ""]  # False: nothing changes
    key: UInt32[Array, "2"]  # of stochastic rounding
    origin: UInt32[Array, "3"]  # layer, row and column in the whole stack of the first element of this shard


class Factors(NamedTuple):
    """What all elements share in a step, so that each is multiplied as seldom as can be."""

    to_mean: Float32[Array, ""]  # of a gradient, its share of the mean
    to_root: Float32[Array, ""]  # of a gradient, the root of its share of the mean of squares
    scale: Float32[Array, ""]  # of the root of the mean of squares in the denominator
    epsilon: Float32[Array, ""]  # added to it


@dataclass(frozen=True)
class Adam:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in float32, element by element."""

    beta1: float
    beta2: float
    epsilon: float

    @property
    def betas(self) -> tuple[float, float]:
        """What is kept of each moment."""
        return self.beta1, self.beta2

    def factors(self, step: Step) -> Factors:
        """With c1 and c2 that correct for moments that started at zero:

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
        """The next parameter and moments; `kept`: the moments before, each times its beta."""
        root = gradient * factors.to_root
        mean, square = kept[0] + gradient * factors.to_mean, kept[1] + root * root
        direction = mean / (jnp.sqrt(square) * factors.scale + factors.epsilon)
        return parameter - rate * (direction + decay * parameter), mean, square


def inverse(absmax: Float32[Array, "*blocks"]) -> Float32[Array, "*blocks"]:
    """What the elements of a block are multiplied by, to lie from -1 to 1; 1 where they are as good as zero."""
    return 1 / jnp.where(absmax < TINY, 1.0, absmax)


def block_of(moment: Moment) -> tuple[int, int]:
    """Rows and columns of a block."""
    (_, rows, columns), (_, down, across) = moment.codes.shape, moment.absmax.shape
    return rows // down, columns // across
