"""What happened to the environment server and its clients since the last look, for a step's metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.errors import EnvironmentFault

NAMES = {
    "graded": "graded",
    "timeouts": "worker_timeouts",
    "deaths": "worker_deaths",
    "respawns": "worker_respawns",
    "retried": "retried",
    "failed": "failed",
    "fork_servers": "fork_servers",
    "turned_away": "turned_away",
}
"""From the server's names to the log's."""
LATE_VERDICT = "timeout"

logger = logging.getLogger(__name__)


class EnvironmentCounters:
    """Differences of one rank's counts; only the rank that keeps the node's server reads the server's."""

    def __init__(self, client: EnvironmentClient, server: EnvironmentServerProcess | None) -> None:
        self._client = client
        self._server = server
        self._before: Counter[str] = Counter()
        self._pid = 0

    def since_last_call(self) -> dict[str, int]:
        """New events by name. A server that cannot be asked has none: its counts come with a later call, unless
        it dies before. Never raises for a server."""
        totals = Counter(self._client.counters())
        if self._server is not None:
            totals["restarts"] = self._server.restarts
            totals.update(self._of_server())
        new = {name: count - self._before[name] for name, count in totals.items()}
        self._before.update(new)
        return new

    def _of_server(self) -> dict[str, int]:
        try:
            answer = self._client.server_counters()
            counts, pid = _named(answer), int(answer["pid"])
        except (EnvironmentFault, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the environment server's counters cannot be read: %s", error)
            return {}
        if pid != self._pid:  # a new server counts from 0
            self._pid = pid
            for name in counts:
                self._before[name] = 0
        return counts


def _named(answer: Mapping[str, Any]) -> dict[str, int]:
    counters = answer["counters"]
    counts = {name: int(counters[key]) for key, name in NAMES.items() if key in counters}
    late = sum(int(verdicts.get(LATE_VERDICT, 0)) for verdicts in answer["verdicts"].values())
    return counts | {"late_completions": late}
