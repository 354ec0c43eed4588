"""What the server did since it started, for ``GET /v1/counters``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from megatron_rl.types import GradeResult

MAX_VERDICTS = 32
"""Different verdicts counted by name for an environment; an author may write anything into them."""
OTHER = "other"


class Counters:
    """Named counts that many threads raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter({"requests": 0, "turned_away": 0})
        self._verdicts: dict[str, Counter[str]] = {}

    def add(self, name: str, number: int = 1) -> None:
        """Raises one count."""
        with self._lock:
            self._counts[name] += number

    def add_results(self, environment: str, results: Iterable[GradeResult]) -> None:
        """Counts verdicts of graded samples, and error codes of the others."""
        with self._lock:
            verdicts = self._verdicts.setdefault(environment, Counter())
            for result in results:
                name = (result.verdict or "graded") if result.status == "ok" else f"error:{result.code}"
                verdicts[name if name in verdicts or len(verdicts) < MAX_VERDICTS else OTHER] += 1

    def counts(self) -> dict[str, int]:
        """The counts of requests."""
        with self._lock:
            return dict(self._counts)

    def verdicts(self) -> dict[str, dict[str, int]]:
        """Of every environment that graded something: how often it said what."""
        with self._lock:
            return {name: dict(counter) for name, counter in self._verdicts.items()}
