"""Times of asynchronous calls, and the peers of torch that they are compared with."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """`run` starts work and returns its result; `wait` returns when that result is there."""

    run: Callable[[], Any]
    wait: Callable[[Any], Any]


def seconds_per_call(calls: dict[str, Call], blocks: int, block_seconds: float) -> dict[str, float]:
    """Median over blocks of calls, each long enough to hide what starting a call costs.

    Blocks of all of `calls` take turns, so that other work on the GPU, and its temperature, affects all alike.
    """
    repeats = {}
    for name, call in calls.items():
        call.wait(call.run())  # compiles, loads
        repeats[name] = max(1, round(block_seconds / _block(call, 1)))
    times = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            times[name].append(_block(call, repeats[name]) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def _block(call: Call, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats - 1):
        call.run()
    call.wait(call.run())
    return time.perf_counter() - begin
