"""The wall-clock time of a run by category."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class Goodput:
    """Wall-clock time by category since this object was made; time outside of all measurements is `other`.

    A measurement inside another one counts only for the inner category, so that the parts always sum to the whole.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = clock()
        self._now_in = "other"

    @contextlib.contextmanager
    def measure(self, category: str) -> Iterator[None]:
        """Count the time spent in this context for `category`."""
        outer = self._now_in
        self._switch(category)
        try:
            yield
        finally:
            self._switch(outer)

    def beat(self) -> None:
        """Signal progress: call it between the parts of a long measurement."""
        self._switch(self._now_in)

    @property
    def now(self) -> tuple[str, float]:
        """The current category, and the time of its start or last beat. Both stay unchanged during a hang."""
        return self._now_in, self._since

    def seconds(self) -> dict[str, float]:
        """Seconds by category up to now; they sum to the wall-clock time."""
        self.beat()
        return dict(self._seconds)

    def report(self) -> str:
        """One line: the wall-clock time and its parts, the largest first, without parts that round to 0.0 s."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        parts = sorted(((spent, name) for name, spent in seconds.items() if round(spent, 1)), reverse=True)
        listed = ", ".join(f"{name} {spent:.1f} s ({spent / wall:.0%})" for spent, name in parts)
        return f"wall time {wall:.1f} s: {listed}"

    def _switch(self, category: str) -> None:
        now = self._clock()
        self._seconds[self._now_in] += now - self._since
        self._since, self._now_in = now, category
