"""Compile cases of grouped products with quantized weights: experts of gpt-oss-20b and Qwen3-30B-A3B."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, bind_request
from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.grouped_quant_matmul import fused
from pallas_kernels.quant_matmul import fused as of_one
from pallas_kernels.quant_matmul.elements import ELEMENTS
from pallas_kernels.quant_matmul.layout import QuantRequest, layout_of

DTYPE = jnp.dtype("bfloat16")
# For a model: number of weights, their rows and columns; rows of x for 2048 tokens, and rows of a block of x.
GPT_OSS, QWEN = (32, 2880, 2880, 12288, 128), (128, 768, 2048, 32768, 64)
# Elements, and rows and columns of a block with one scale. The cases cover: two scales per row of a tile, a table of
# values, blocks of several rows, and one scale per row.
STORED = (("e2m1", 1, 32, GPT_OSS), ("nf4", 1, 64, QWEN), ("e4m3", 128, 128, QWEN), ("int8", 1, 2048, QWEN))


def _cases() -> Iterator[Case]:
    for elements, height, width, (count, rows, columns, m, block) in STORED:
        codes = jax.ShapeDtypeStruct((count, rows, columns // ELEMENTS[elements].packed), jnp.uint8)
        scales = jax.ShapeDtypeStruct((count, rows // height, columns // width), jnp.float32)
        stacked = [jax.ShapeDtypeStruct((count * a.shape[1], a.shape[2]), a.dtype) for a in (codes, scales)]
        layout = layout_of(stacked[0], stacked[1], None, elements)
        blocks: Any = jax.ShapeDtypeStruct((m // block,), jnp.int32)
        first: Any = jax.ShapeDtypeStruct((count + 1,), jnp.int32)
        refuses = bind_request(of_one.refuses, QuantRequest(layout, DTYPE, m // count))
        for direction, size in (("forward", columns), ("backward", rows)):
            x = jax.ShapeDtypeStruct((m, size), DTYPE)
            multiply = partial(fused.multiply, layout=layout, transposed=direction == "backward")
            inputs = f"{elements} {height}x{width} {DTYPE}"
            arguments = (x, codes, scales, Groups(blocks, first))
            yield Case("grouped_quant_matmul", "fused", direction, inputs, multiply, arguments, refuses)


CASES = tuple(_cases())
