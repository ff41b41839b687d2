"""Predict the time of a program compiled here with `jaxtune plan`'s time model, for comparison with measurements."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from gpu.workers import Row
from jaxtune.host.process import compiler_options
from jaxtune.plan.calibration import scenarios
from jaxtune.plan.launches import LaunchedProgram, count_executed, read_program
from jaxtune.plan.prediction import xla_options
from jaxtune.plan.rates import Rates, step_ms
from pallas_kernels.aot import dumped_thunks
from pallas_kernels.gpus import GPUS


@dataclass(frozen=True)
class ReadProgram:
    """A compiled program as read by the time model.

    Attributes:
        gpu: name in GPUS.
        program: the program's launches.
        executed: thunks that the program executes.
    """

    gpu: str
    program: LaunchedProgram
    executed: dict[str, int]

    def seconds(self, rates: Rates) -> float:
        """Return the predicted seconds of one run of the program."""
        return step_ms(self.program, self.executed, self.gpu, 1, rates) / 1e3


def known_gpu() -> str | None:
    """Return this device's name in GPUS, None for an unknown GPU. A CPU, which measures nothing, counts as an H100."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "h100"
    return next((name for name, gpu in GPUS.items() if gpu.kind == device.device_kind), None)


def compile_and_read(
    function: Callable[..., Any], *arguments: Any, options: Mapping[str, Any] = {}, **jit_options: Any
) -> tuple[jax.stages.Compiled, ReadProgram | None]:
    """Compile `function` with a run's compiler options and further `options`, and read it if the GPU is known."""
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
    return compiled, ReadProgram(gpu, program, count_executed(thunks, program.trips))


def compare_prediction(read: ReadProgram, seconds: float, measured: Mapping[str, float] = {}) -> Row:
    """Return the microseconds predicted with assumed and, if given, `measured` rates, and the errors in percent."""
    row: Row = {}
    for prefix, values in (("", {}), ("calibrated_", measured)):
        if prefix and not values:
            continue
        made = {name: 1e6 * read.seconds(rates) for name, rates in scenarios(values).items()}
        row[f"{prefix}predicted_microseconds"] = made["central"]
        row[f"{prefix}range_microseconds"] = [made["optimistic"], made["pessimistic"]]
        row[f"{prefix}error_percent"] = 100 * (made["central"] / (1e6 * seconds) - 1)
    return row
