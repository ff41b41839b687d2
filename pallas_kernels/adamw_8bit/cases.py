"""Compile cases of the update: stacks with blocks of 256, of a size that is not a power of two, and of short rows."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit import triton
from pallas_kernels.adamw_8bit.adam import Adam, AdamStep, QuantizedMoment, Updated
from pallas_kernels.case import Case, bind_request

ADAM = Adam(0.9, 0.999, 1e-8)
# Shape, block, and the dtype of parameter and gradient. (4 layers, so that they fit the GPU with the least memory.)
STACKS = (
    ((4, 4096, 12288), (1, 256), "bfloat16"),
    ((4, 4096, 11008), (1, 172), "float32"),
    ((4, 4096, 8), (32, 8), "float32"),
)


def _cases() -> Iterator[Case]:
    for shape, block, dtype in STACKS:
        gradient, before, step = jax.eval_shape(partial(_arguments, shape, block, dtype))
        refuses = bind_request(triton.refuses, triton.request_for(before))
        inputs = f"{block[0]}x{block[1]} {dtype}"
        function = partial(triton.update, adam=ADAM)
        yield Case("adamw_8bit", "triton", "forward", inputs, function, (gradient, before, step), refuses)


def _arguments(shape: tuple[int, int, int], block: tuple[int, int], dtype: str) -> tuple[jax.Array, Updated, AdamStep]:
    (layers, rows, columns), numbers = shape, partial(jnp.zeros, dtype=jnp.float32)
    moment = QuantizedMoment(jnp.zeros(shape, jnp.uint8), numbers((layers, rows // block[0], columns // block[1])))
    step = AdamStep(
        count=jnp.zeros((), jnp.int32),
        rate=numbers(layers),
        decay=numbers(layers),
        factor=numbers(()),
        finite=jnp.zeros((), jnp.bool),
        key=jnp.zeros(2, jnp.uint32),
        origin=jnp.zeros(3, jnp.uint32),
    )
    parameter = jnp.zeros(shape, dtype)
    return parameter, (parameter, moment, moment), step


CASES = tuple(_cases())
