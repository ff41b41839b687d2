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
from pallas_kernels.gpus import GPUS, Device


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


def _ask(refuses: Callable[[Device, Request], str | None], request: Request, device: Device) -> str | None:
    return refuses(device, request)


CASES: tuple[Case, ...] = (
    *_flash_attention("triton", triton.forward, triton.backward, triton.refuses),
    *_flash_attention("mosaic", mosaic.forward, mosaic_backward.backward, mosaic.refuses),
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
