"""Compile cases of the FP8 product: 4096 rows by a 4096 x 4096 weight, with scales in blocks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

from pallas_kernels.case import Case, bind_request
from pallas_kernels.fp8_matmul import mosaic
from pallas_kernels.fp8_matmul.request import BLOCK, request_for
from pallas_kernels.registry import on_hopper

SIZE = 4096


def _cases() -> Iterator[Case]:
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        arguments: tuple[Any, ...] = (
            jax.ShapeDtypeStruct((SIZE, SIZE), dtype),
            jax.ShapeDtypeStruct((SIZE, SIZE), "float8_e4m3fn"),
            jax.ShapeDtypeStruct((SIZE, SIZE // BLOCK), "float32"),
            jax.ShapeDtypeStruct((SIZE // BLOCK, SIZE // BLOCK), "float32"),
        )
        request = request_for(*arguments)
        function = partial(mosaic.multiply, request=request)
        inputs = f"{dtype} by e4m3, in blocks"
        refuses = bind_request(on_hopper(mosaic.refuses), request)
        yield Case("fp8_matmul", "mosaic", "forward", inputs, function, arguments, refuses)


CASES = tuple(_cases())
