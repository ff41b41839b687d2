"""Report the compiler's figures of every kernel for every kind of GPU, on a machine without a GPU.

    python -m pallas_kernels.report --gpu h100,b200 --kernel flash_attention

This needs the `aot` extra. The cases of an op are `CASES` in its `cases.py`.
"""

import argparse
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import jax

from pallas_kernels import aot
from pallas_kernels.case import Case
from pallas_kernels.gpus import GPUS, Device

_OPS = sorted(file.parent.name for file in Path(__file__).parent.glob("*/cases.py"))
CASES: tuple[Case, ...] = tuple(case for op in _OPS for case in import_module(f"pallas_kernels.{op}.cases").CASES)


def cases_for(gpu: str) -> list[Case]:
    """Return the cases that can run on a GPU of `gpus.GPUS`."""
    device = Device("gpu", GPUS[gpu].kind, GPUS[gpu].capability)
    return [case for case in CASES if case.refuses(device) is None]


@cache
def compiled(case: Case, gpu: str) -> aot.Compiled:
    """Compile a case for a GPU, once per process."""
    return aot.compile_for(gpu, case.function, *case.arguments)


COLUMNS = "{:8} {:48} {:26} {:>9} {:>7} {:>10} {:>15} {:>7} {:>8} {:>6} {:>7} {:>4} {:>9}"


def rows(case: Case, gpu: str) -> list[str]:
    """Return a line of the table for each kernel of a case."""
    return [
        COLUMNS.format(
            gpu,
            case.label,
            kernel.name,
            kernel.registers,
            kernel.spill_bytes,
            kernel.shared_memory,
            "x".join(map(str, kernel.grid)),
            kernel.threads,
            kernel.mma_sync,
            kernel.wgmma,
            kernel.tcgen05,
            kernel.exponentials,
            f"{kernel.occupancy:.1%}",
        )
        for kernel in compiled(case, gpu).kernels
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Return 1 if a case did not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--gpu", default=",".join(GPUS), help="GPUs, separated by commas; default: %(default)s")
    parser.add_argument("--kernel", default="", help="part of the name of an op, backend, direction or input")
    options = parser.parse_args(arguments)
    if unknown := set(options.gpu.split(",")) - set(GPUS):
        parser.error(f"unknown GPU {', '.join(sorted(unknown))}; choose from {', '.join(GPUS)}")
    if reason := aot.unavailable():
        parser.exit(2, f"pallas_kernels.report: {reason}\n")
    # On a machine with a GPU, old jax would use that GPU's compute capability for the other GPUs.
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}; bytes of spill stores per thread; matrix instructions as written, not as executed;")
    print("exponentials (ex2) per thread in one pass of a loop")
    head = ("GPU", "case", "kernel", "registers", "spill B", "shared B", "grid", "threads")
    print(COLUMNS.format(*head, "mma.sync", "wgmma", "tcgen05", "ex2", "occupancy"))
    failed = False
    for gpu in options.gpu.split(","):
        for case in cases_for(gpu):
            if options.kernel not in str(case):
                continue
            try:
                lines = rows(case, gpu)
            except jax.errors.JaxRuntimeError as error:
                failed = True
                lines = [f"{gpu:8} {case.label}: {str(error).partition(chr(10))[0]}"]
            print(*lines, sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
