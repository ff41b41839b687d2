"""What the update is compiled with: stacks with blocks of 256, of a size that is no power of two, and of short rows."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit import triton
from pallas_kernels.adamw_8bit.adam import Adam, Moment, Step
from pallas_kernels.case import Case, asked

ADAM = Adam(0.9, 0.999, 1e-8)
# Shape, block, dtype of the parameter and of its gradient.
STACKS = (
    ((4, 4096, 12288), (1, 256), "bfloat16"),
    ((4, 4096, 11008), (1, 172), "float32"),
    ((4, 4096, 8), (32, 8), "float32"),
)


def _cases() -> Iterator[Case]:
    for shape, block, dtype in STACKS:
        layers, rows, columns = shape
        absmax = jax.ShapeDtypeStruct((layers, rows // block[0], columns // block[1]), jnp.float32)
        moment = Moment(jax.ShapeDtypeStruct(shape, jnp.uint8), absmax)
        parameter = jax.ShapeDtypeStruct(shape, dtype)
        number, by_layer = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((layers,), jnp.float32)
        step = Step(
            count=jax.ShapeDtypeStruct((), jnp.int32),
            rate=by_layer,
            decay=by_layer,
            factor=number,
            finite=jax.ShapeDtypeStruct((), jnp.bool),
            key=jax.ShapeDtypeStruct((2,), jnp.uint32),
            origin=jax.ShapeDtypeStruct((3,), jnp.uint32),
        )
        before = parameter, moment, moment
        refuses = asked(triton.refuses, triton.request_for(before))
        inputs = f"{block[0]}x{block[1]} {dtype}"
        function = partial(triton.update, adam=ADAM)
        yield Case("adamw_8bit", "triton", "forward", inputs, function, (parameter, before, step), refuses)


CASES = tuple(_cases())
