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


@dataclass(frozen=True)
class Adam:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2) in float32, element by element."""

    beta1: float
    beta2: float
    epsilon: float

    def corrections(self, count: Int[Array, ""]) -> tuple[Float32[Array, ""], Float32[Array, ""]]:
        """What to multiply each moment by, because it started at zero."""
        exponent = (count + 1).astype(jnp.float32)
        return 1 / (1 - self.beta1**exponent), 1 / (1 - self.beta2**exponent)

    def __call__(
        self,
        gradient: Float32[Array, "*shape"],
        parameter: Float32[Array, "*shape"],
        mean: Float32[Array, "*shape"],
        square: Float32[Array, "*shape"],
        corrections: tuple[Float32[Array, ""], Float32[Array, ""]],
        rate: Float32[Array, "..."],
        decay: Float32[Array, "..."],
    ) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"], Float32[Array, "*shape"]]:
        """The next parameter and moments."""
        mean = self.beta1 * mean + (1 - self.beta1) * gradient
        square = self.beta2 * square + (1 - self.beta2) * (gradient * gradient)
        direction = mean * corrections[0] / (jnp.sqrt(square * corrections[1]) + self.epsilon)
        return parameter - rate * (direction + decay * parameter), mean, square


def inverse(absmax: Float32[Array, "*blocks"]) -> Float32[Array, "*blocks"]:
    """What to multiply the elements of a block by, to lie from -1 to 1; 1 where they are as good as zero."""
    return 1 / jnp.where(absmax < TINY, 1.0, absmax)


def block_of(moment: Moment) -> tuple[int, int]:
    """Rows and columns of a block."""
    (_, rows, columns), (_, down, across) = moment.codes.shape, moment.absmax.shape
    return rows // down, columns // across
