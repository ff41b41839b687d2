"""What the compiler makes of every kernel for every kind of card, on a machine without one.

    python -m pallas_kernels.report --gpu h100,b200 --kernel flash_attention

Needs the `aot` extra. A new op adds its cases to `CASES`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import aot
from pallas_kernels.flash_attention import mosaic, mosaic_backward, triton
from pallas_kernels.flash_attention.variant import Request, Variant
from pallas_kernels.fp8_matmul import mosaic as fp8_mosaic
from pallas_kernels.fp8_matmul.request import Request as Fp8Request
from pallas_kernels.gpus import GPUS, Device
from pallas_kernels.quant_matmul import ELEMENTS, fused
from pallas_kernels.quant_matmul import triton as quant_triton
from pallas_kernels.quant_matmul.layout import Request as QuantRequest
from pallas_kernels.quant_matmul.layout import layout_of


@dataclass(frozen=True)
class Case:
    """One function to compile; `refuses(device)` says why its backend cannot run it there, or None."""

    op: str
    backend: str
    inputs: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    refuses: Callable[[Device], str | None]

    def __str__(self) -> str:
        return f"{self.op} {self.backend} {self.inputs}"


def _flash_attention(
    backend: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    refuses: Callable[[Device, Request], str | None],
) -> Iterator[Case]:
    """Forward and backward over packed rows of 2048 tokens, 8 query heads to 2 key heads, by dtype and head dim."""
    shapes = [(dtype, head_dim, None) for dtype in ("bfloat16", "float32") for head_dim in (64, 80, 96, 128, 192, 256)]
    for dtype, head_dim, soft_cap in [*shapes, ("float16", 128, None), ("bfloat16", 128, 30.0)]:
        rows, length, heads, kv_heads = 2, 2048, 8, 2
        variant = Variant(head_dim**-0.5, soft_cap, True, None, 0)
        request = Request(jnp.dtype(dtype), head_dim, length, length, True, variant, soft_cap is not None, True)
        q = jax.ShapeDtypeStruct((rows, length, heads, head_dim), dtype)
        k = jax.ShapeDtypeStruct((rows, length, kv_heads, head_dim), dtype)
        bound = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        per_query = jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
        sinks = None if soft_cap is None else jax.ShapeDtypeStruct((heads,), jnp.float32)
        name = f"{dtype} d={head_dim}" + ("" if soft_cap is None else " soft-cap, sinks")
        case = partial(Case, "flash_attention", backend, refuses=partial(_ask, refuses, request))
        yield case(f"forward {name}", partial(_last, forward, variant), (q, k, k, bound, bound, sinks))
        arguments = (q, k, k, bound, bound, per_query, per_query, q)
        yield case(f"backward {name}", partial(_last, backward, variant), arguments)


def _last(function: Callable[..., Any], variant: Variant, *arguments: Any) -> Any:
    return function(*arguments, variant)


def _ask(refuses: Callable[[Device, Any], str | None], request: Any, device: Device) -> str | None:
    return refuses(device, request)


def _fp8_matmul() -> Iterator[Case]:
    """4096 rows by a 4096 x 4096 weight with scales in blocks, by the dtype of the rows."""
    size, blocks = 4096, 32
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        shapes = ((size, size), dtype), ((size, size), "float8_e4m3fn")
        scales = ((size, blocks), "float32"), ((blocks, blocks), "float32")
        arguments = tuple(jax.ShapeDtypeStruct(*shape) for shape in (*shapes, *scales))
        request = Fp8Request(
            size, size, size, jnp.dtype(dtype), (size, blocks), (blocks, blocks), jnp.dtype("bfloat16")
        )
        function, refuses = partial(fp8_mosaic.multiply, request=request), partial(_ask, fp8_mosaic.refuses, request)
        yield Case("fp8_matmul", "mosaic", f"{dtype} by e4m3, in blocks", function, arguments, refuses)


def _quant_matmul() -> Iterator[Case]:
    """A weight of 4096 x 12288 in every kind of element; products of it with 16 and 256 rows, and of the gradient."""
    rows, columns = 4096, 12288
    blocks = {
        "nf4": (1, 64),
        "fp4": (1, 64),
        "e2m1": (1, 16),
        "int4": (1, 128),
        "e4m3": (128, 128),
        "int8": (1, columns),
    }
    for elements, (height, width) in blocks.items():
        codes = jax.ShapeDtypeStruct((rows, columns // ELEMENTS[elements].packed), jnp.uint8)
        low = elements == "e2m1"
        scales = jax.ShapeDtypeStruct((rows // height, columns // width), jnp.uint8 if low else jnp.float32)
        weight = codes, scales, jax.ShapeDtypeStruct((), jnp.float32) if low else None
        layout, dtype = layout_of(*weight, elements), jnp.dtype("bfloat16")
        name = f"{elements} {height}x{width} {dtype}"
        refuses = partial(_ask, quant_triton.refuses, QuantRequest(layout, dtype))
        function = partial(quant_triton.dequantize, layout=layout, dtype=dtype)
        yield Case("dequantize", "triton", f"weight {name}", function, weight, refuses)
        for m in (16, 256) if elements in ("nf4", "e2m1", "e4m3", "int8") else ():
            refuses = partial(_ask, fused.refuses, QuantRequest(layout, dtype, m))
            for direction, size in (("forward", columns), ("backward", rows)):
                x = jax.ShapeDtypeStruct((m, size), dtype)
                function = partial(fused.multiply, layout=layout, transposed=direction == "backward")
                yield Case("quant_matmul", "fused", f"{direction} m={m} {name}", function, (x, *weight), refuses)


CASES: tuple[Case, ...] = (
    *_flash_attention("triton", triton.forward, triton.backward, triton.refuses),
    *_flash_attention("mosaic", mosaic.forward, mosaic_backward.backward, mosaic.refuses),
    *_fp8_matmul(),
    *_quant_matmul(),
)


def cases_for(gpu: str) -> list[Case]:
    """What can run on a card of `gpus.GPUS`."""
    device = Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability)
    return [case for case in CASES if case.refuses(device) is None]


@cache
def compiled(case: Case, gpu: str) -> aot.Compiled:
    """A case compiled for a card, once a process."""
    return aot.compile_for(gpu, case.function, *case.arguments)


COLUMNS = "{:8} {:44} {:26} {:>9} {:>7} {:>10} {:>15} {:>7} {:>8} {:>6} {:>7} {:>9}"


def rows(case: Case, gpu: str) -> list[str]:
    """A line of the table for each kernel of a case."""
    return [
        COLUMNS.format(
            gpu,
            f"{case.backend} {case.inputs}",
            kernel.name,
            kernel.registers,
            kernel.spill_bytes,
            kernel.shared_memory,
            "x".join(map(str, kernel.grid)),
            kernel.threads,
            kernel.mma_sync,
            kernel.wgmma,
            kernel.tcgen05,
            f"{kernel.occupancy:.1%}",
        )
        for kernel in compiled(case, gpu).kernels
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table. Returns 1 when something did not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--gpu", default=",".join(GPUS), help="cards, by comma; default: %(default)s")
    parser.add_argument("--kernel", default="", help="part of the name of an op, backend, direction or input")
    options = parser.parse_args(arguments)
    if unknown := set(options.gpu.split(",")) - set(GPUS):
        parser.error(f"unknown card {', '.join(sorted(unknown))}; there are {', '.join(GPUS)}")
    if reason := aot.unavailable():
        parser.exit(2, f"pallas_kernels.report: {reason}\n")
    # On a machine with a card, old jax would take that card's compute capability for the others'.
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}; bytes of spill stores a thread; matrix instructions as written, not as executed")
    head = ("card", "case", "kernel", "registers", "spill B", "shared B", "grid", "threads")
    print(COLUMNS.format(*head, "mma.sync", "wgmma", "tcgen05", "occupancy"))
    failed = False
    for gpu in options.gpu.split(","):
        for case in cases_for(gpu):
            if options.kernel not in str(case):
                continue
            try:
                lines = rows(case, gpu)
            except jax.errors.JaxRuntimeError as error:
                failed = True
                lines = [f"{gpu:8} {case.backend} {case.inputs}: {str(error).partition(chr(10))[0]}"]
            print(*lines, sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
