"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Measures phases and hands them out once a step.

    Phases nest, and the outer one includes the inner. A phase that is open several times at once (grades of several
    groups) counts the seconds in which at least one was open. Name a part of another phase ``gen/prefill``: the report
    does not add up names with a slash. ``sync``, such as ``torch.cuda.synchronize``, runs before the clock is read.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sync: Callable[[], None] | None = None
    ) -> None:
        self._clock = clock
        self._sync = sync
        self._seconds: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._started: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body; an exception counts the time spent as well."""
        if not self._open[name]:
            self._started[name] = self._read_clock()
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                self._seconds[name] += self._read_clock() - self._started.pop(name)

    def collect(self) -> dict[str, float]:
        """Return ``timing_s/<phase>`` of the phases that ended since the last call; starts the next step."""
        collected = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return collected

    def _read_clock(self) -> float:
        if self._sync is not None:
            self._sync()
        return self._clock()
