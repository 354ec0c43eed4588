"""What happened to the environment server and its clients since the last look, for a step's metrics."""

from __future__ import annotations

import logging
from collections import Counter

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.errors import EnvironmentFault

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
        it dies before."""
        totals = self._client.counters()
        if self._server is not None:
            totals |= {"restarts": self._server.restarts, **self._of_server()}
        new = {name: count - self._before[name] for name, count in totals.items()}
        self._before.update(new)
        return new

    def _of_server(self) -> dict[str, int]:
        try:
            answer = self._client.server_counters()
        except EnvironmentFault as fault:
            logger.warning("the environment server's counters cannot be read: %s", fault)
            return {}
        counts = answer["counters"]
        if answer["pid"] != self._pid:  # a new server counts from 0
            self._pid = answer["pid"]
            self._before.update({name: -self._before[name] for name in counts})
        return counts
