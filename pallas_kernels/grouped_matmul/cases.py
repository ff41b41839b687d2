"""Compile cases of grouped products: the experts of Qwen3-30B-A3B, and adapters of rank 16 on them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.grouped_matmul import triton
from pallas_kernels.grouped_matmul.groups import Groups

GROUPS, HIDDEN, SIZE, RANK = 128, 2048, 768, 16
ROWS, BLOCK = 32768, 64  # for 2048 tokens with 8 experts each
SHAPES = {
    "gate": ((SIZE, HIDDEN), jnp.bfloat16),
    "adapter A": ((2 * RANK, HIDDEN), jnp.bfloat16),
    "adapter B": ((SIZE, RANK), jnp.bfloat16),
    "gate float32": ((SIZE, HIDDEN), jnp.float32),
}


def _cases() -> Iterator[Case]:
    blocks: Any = jax.ShapeDtypeStruct((ROWS // BLOCK,), jnp.int32)
    first: Any = jax.ShapeDtypeStruct((GROUPS + 1,), jnp.int32)
    groups = Groups(blocks, first)
    for name, ((out, into), dtype) in SHAPES.items():
        weight = jax.ShapeDtypeStruct((GROUPS, out, into), dtype)
        x, dy = (jax.ShapeDtypeStruct((ROWS, width), dtype) for width in (into, out))
        refuses = bind_request(triton.refuses, weight)
        multiply = partial(triton.multiply, transposed=False)
        yield Case("grouped_matmul", "triton", "forward", name, multiply, (x, weight, groups), refuses)
        transposed = partial(triton.multiply, transposed=True)
        yield Case("grouped_matmul", "triton", "backward", f"dx {name}", transposed, (dy, weight, groups), refuses)
        yield Case("grouped_matmul", "triton", "backward", f"dw {name}", triton.outer, (dy, x, groups), refuses)


CASES = tuple(_cases())
