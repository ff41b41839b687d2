"""What the time model of `jaxtune plan` says of a program that was compiled here, to stand beside what it takes."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gpu.workers import Row
from jaxtune.host.process import compiler_options
from jaxtune.plan.calibration import scenarios
from jaxtune.plan.launches import Program, executed, read_program
from jaxtune.plan.prediction import xla_options
from jaxtune.plan.rates import Rates, step_ms
from pallas_kernels.aot import dumped_thunks
from pallas_kernels.gpus import GPUS


@dataclass(frozen=True)
class Read:
    """A compiled program as the time model reads it; `gpu` is a name of GPUS."""

    gpu: str
    program: Program
    executed: dict[str, int]

    def seconds(self, rates: Rates) -> float:
        """Of one run of it."""
        return step_ms(self.program, self.executed, self.gpu, 1, rates) / 1e3


def known_gpu() -> str | None:
    """This device's name in GPUS, None for a GPU that is not there. A CPU, where nothing is measured, is an H100."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "h100"
    return next((name for name, gpu in GPUS.items() if gpu.kind == device.device_kind), None)


def compile_and_read(
    function: Callable[..., Any], *arguments: Any, options: Mapping[str, Any] = {}, **jit_options: Any
) -> tuple[jax.stages.Compiled, Read | None]:
    """`function`, compiled as a run compiles its step, with more compiler `options`; and read, if the GPU is known."""
    gpu = known_gpu()
    estimates = xla_options(gpu) if gpu and jax.devices()[0].platform == "gpu" else {}
    options = {**compiler_options(), **estimates, **options}
    with tempfile.TemporaryDirectory(prefix="gpu_suite_") as folder:
        lowered = jax.jit(function, compiler_options=options, **jit_options).lower(*arguments)
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        thunks = dumped_thunks(Path(folder))
    if gpu is None:
        return compiled, None
    program = read_program(compiled.as_text() or "")
    return compiled, Read(gpu, program, executed(thunks, program.trips))


def beside(read: Read, seconds: float, measured: Mapping[str, float] = {}) -> Row:
    """The prediction in microseconds with what is assumed, and with `measured` rates, if any; errors in percent."""
    row: Row = {}
    for prefix, values in (("", {}), ("calibrated_", measured)):
        if prefix and not values:
            continue
        made = {name: 1e6 * read.seconds(rates) for name, rates in scenarios(values).items()}
        row[f"{prefix}predicted_microseconds"] = made["central"]
        row[f"{prefix}range_microseconds"] = [made["optimistic"], made["pessimistic"]]
        row[f"{prefix}error_percent"] = 100 * (made["central"] / (1e6 * seconds) - 1)
    return row
