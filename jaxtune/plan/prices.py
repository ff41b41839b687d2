"""Prices of a GPU for an hour: typical ones, or those of --price.

The table is rough: list prices of providers that rent single GPUs by the hour (Lambda, RunPod), in US dollars, rounded,
as of the year below. Prices differ by a factor of two between providers and change by the month, so check before
renting, and give yours: --price=2.50, or --price=h100=2.50,l40s=0.80 if several kinds of GPU are compared.
"""

from dataclasses import dataclass

from jaxtune.errors import UserError
from pallas_kernels.gpus import GPUS

YEAR = 2025
TYPICAL = {
    "rtx4090": 0.70,
    "rtx5090": 0.90,
    "l40s": 0.90,
    "a100": 1.80,
    "h100": 3.00,
    "h200": 3.60,
    "b200": 5.50,
}


@dataclass(frozen=True)
class Price:
    """The price of a GPU for an hour, in any currency, and whether it is the table's."""

    per_hour: float
    typical: bool = False

    def __str__(self) -> str:
        where = f", a rough list price of {YEAR} in US dollars: check before renting, --price=... replaces it"
        return f"{self.per_hour:g}{where if self.typical else ''}"


def read_prices(text: str | None, gpus: list[str]) -> dict[str, Price]:
    """The price of each of these GPUs, by name; `text`: the value of --price."""
    prices = {gpu: Price(TYPICAL[gpu], typical=True) for gpu in gpus}
    if text is None:
        return prices
    if "=" not in text:
        if len(gpus) > 1:
            example = ",".join(f"{gpu}={TYPICAL[gpu]:g}" for gpu in gpus)
            raise UserError(f"--price={text}: {', '.join(gpus)} are compared, so each has its price: --price={example}")
        return {gpus[0]: Price(_number(text, text))}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in gpus:
            raise UserError(f"--price={text}: {name!r} is not among the GPUs of this plan: {', '.join(gpus)}")
        prices[name] = Price(_number(value, text))
    return prices


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        names = next(iter(GPUS))
        raise UserError(f"--price={text}: {value!r} is not a price; write --price=2.50 or --price={names}=2.50")
    return number
