"""Prices of a GPU for an hour: typical prices, or the ones that --price gives.

The table has list prices in US dollars of a provider that rents single GPUs by the hour: RunPod's community cloud, read
from its page on 2026-09-25 (A100 and H100 with SXM), and for the RTX 5090 Akash, read on 2026-09-20. RunPod's own data
centers took 1.1 to 2.2 times as much that day, large providers more than four times, and prices change by the month. So
check before renting, and give yours: --price=2.50, or --price=h100=2.50,l40s=0.80 for several kinds of GPU.
"""

from dataclasses import dataclass

from jaxtune.errors import UserError
from pallas_kernels.gpus import GPUS

DATE = "September 2026"
TYPICAL = {
    "rtx4090": 0.34,
    "rtx5090": 0.67,
    "l40s": 0.79,
    "a100": 1.39,
    "h100": 2.69,
    "h200": 3.59,
    "b200": 5.98,
}


@dataclass(frozen=True)
class Price:
    """The price of a GPU for an hour, in any currency, and whether it is the table's."""

    per_hour: float
    typical: bool = False

    def __str__(self) -> str:
        where = f", a low list price of {DATE} in US dollars: check before renting, --price=... replaces it"
        return f"{self.per_hour:g}{where if self.typical else ''}"


def read_prices(text: str | None, gpus: list[str]) -> dict[str, Price]:
    """The price of each GPU, by name; `text`: the value of --price."""
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
