"""Rates that were measured on a GPU, in place of the time model's assumptions.

`benchmarks/gpu_suite.py --only assumptions` measures them; its result file is the calibration. Calibrations in the
folder `measured` next to this file, named like the GPUs of pallas_kernels.gpus, are used by default.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxtune.errors import UserError
from jaxtune.plan.rates import KERNELS, SCENARIOS, Rates
from pallas_kernels.gpus import GPUS

SHIPPED = Path(__file__).parent / "measured"
PIECE = "assumptions"  # name of the suite's piece
# Rates that can be measured on one GPU, with their plausible ranges; in the units of Rates. The upper bound of a
# kernel's fraction keeps the optimistic scenario below the peak.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "sustained": (0.3, 1.25),  # 1.27 times the table's largest would be the peak
    "narrow": (0.05, 1.0),
    "fp8": (0.8, 2.0),
    "bandwidth": (0.4, 1.0),
    "launch": (0.2, 10.0),
    "l2": (1.0, 5.0),
    "graph": (0.1, 30.0),
    "stream": (0.1, 20.0),
    "sync": (1.0, 200.0),
    **dict.fromkeys(KERNELS, (0.02, 1 / SCENARIOS["optimistic"].kernels)),
}


@dataclass(frozen=True)
class Calibration:
    """Measured rates.

    Attributes:
        values: by name in PLAUSIBLE.
        device: on which they were measured.
        date: the day.
        jax: its version.
        file: the file's name.
    """

    values: Mapping[str, float]
    device: str
    date: str
    jax: str
    file: str

    def __str__(self) -> str:
        return f"measured on {self.device}, {self.date}, jax {self.jax} ({self.file})"


@dataclass(frozen=True)
class Assumption:
    """The central value of one rate, and its source: 'assumed', or the calibration."""

    value: float
    source: str


def find(gpu: str, file: str | None = None) -> Calibration | None:
    """The calibration in `file`; without a file, the shipped one of the GPU, or None: all rates are assumed."""
    path = SHIPPED / f"{gpu}.json" if file is None else Path(file).expanduser()
    if file is None and not path.exists():
        return None
    return read(path, gpu)


def read(file: Path, gpu: str) -> Calibration:
    """Read a calibration from a result file of the suite. Raises UserError if it cannot be trusted."""
    remedy = f"On that GPU, python benchmarks/gpu_suite.py --only {PIECE} --out FILE writes one"
    try:
        piece = json.loads(file.read_text())[PIECE]
        run, values = piece["run"], piece["conclusions"]
        device, date, version, smoke = run["device"], run["date"], run["versions"]["jax"], run["smoke"]
    except (ValueError, TypeError, KeyError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"calibration {file} is not a result of the suite's piece {PIECE}: {what}. {remedy}") from error
    if smoke:
        raise UserError(f"calibration {file} is from a smoke run, which measures nothing. {remedy}")
    if device != GPUS[gpu].kind:
        raise UserError(f"calibration {file} was measured on {device}, and --gpu={gpu} is {GPUS[gpu].kind}. {remedy}")
    if not isinstance(values, dict) or not values:
        raise UserError(f"calibration {file}: conclusions of {PIECE} must be values by name, not {values!r}. {remedy}")
    for name, value in values.items():
        _check(file, name, value)
    return Calibration(values, device, str(date)[:10], version, file.name)


def _check(file: Path, name: str, value: Any) -> None:
    if name not in PLAUSIBLE:
        raise UserError(
            f"calibration {file}: the time model has no rate {name!r}; its rates are {', '.join(PLAUSIBLE)}"
        )
    low, high = PLAUSIBLE[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):  # refuses NaN too
        raise UserError(
            f"calibration {file}: {name} is {value!r}, and must be a number from {low:.4g} to {high:.4g} "
            "(PLAUSIBLE in jaxtune/plan/calibration.py): another value is an error of the measurement or of the model"
        )


def with_value(rates: Rates, name: str, value: float) -> Rates:
    """Rates with one value replaced, by its name in PLAUSIBLE."""
    if name in KERNELS:
        return replace(rates, fractions={**rates.fractions, name: value})
    return replace(rates, **{name: value})


def scenarios(values: Mapping[str, float]) -> dict[str, Rates]:
    """The scenarios around measured values.

    The relative width of the assumed range is kept: the measurement of one operation gives its rate there, but not how
    the rate varies with shape, or with clocks that fall in a long run. Scenarios stay within plausible values.
    """
    result = {}
    for scenario, rates in SCENARIOS.items():
        for name, value in values.items():
            low, high = PLAUSIBLE[name]
            if name not in KERNELS:  # the range of kernels is Rates.kernels
                value *= getattr(SCENARIOS[scenario], name) / getattr(SCENARIOS["central"], name)
            rates = with_value(rates, name, min(max(value, low), high))
        result[scenario] = rates
    return result


def assumptions(gpu: str, calibration: Calibration | None) -> dict[str, Assumption]:
    """The central value of every rate on a GPU, and its source."""
    central = SCENARIOS["central"]
    assumed = {field.name: getattr(central, field.name) for field in fields(Rates)}
    # One scales the kernels' fractions and the other replaces them: neither is a rate by itself.
    del assumed["kernels"], assumed["fractions"]
    capability, _ = GPUS[gpu].capability
    assumed |= {name: rates[capability] for name, rates in KERNELS.items() if capability in rates}
    measured = calibration.values if calibration else {}
    return {
        name: Assumption(measured.get(name, value), str(calibration) if name in measured else "assumed")
        for name, value in assumed.items()
    }
