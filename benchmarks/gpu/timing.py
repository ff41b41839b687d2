"""Time asynchronous calls of jax and torch."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """An asynchronous call: `run` starts work and returns its result; `wait` returns when the result is ready."""

    run: Callable[[], Any]
    wait: Callable[[Any], Any]


def seconds_per_call(calls: dict[str, Call], blocks: int, block_seconds: float) -> dict[str, float]:
    """Return the median time of each call over blocks of repetitions, long enough to hide the cost of starting a call.

    The blocks of all calls take turns, so that other work on the GPU, and its temperature, affects all calls alike.
    """
    repeats = {}
    for name, call in calls.items():
        call.wait(call.run())  # compiles, loads
        repeats[name] = max(1, round(block_seconds / _block(call, 1)))
    times = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            times[name].append(_block(call, repeats[name]) / repeats[name])
    return {name: statistics.median(measured) for name, measured in times.items()}


def _block(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats - 1):
        call.run()
    call.wait(call.run())
    return time.perf_counter() - begin
