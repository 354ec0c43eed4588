"""The trainer's side of the environment server: grades while it generates, tasks before it starts.

A sample that cannot be graded is data (``GradeResult`` with a code), never an exception and never a silent 0:
the caller decides what a failed sample means for a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from megatron_rl.environments.address import ServerError, get_json, read_address
from megatron_rl.environments.exchange import LONGEST_BACKOFF, Exchange, RequestFailed
from megatron_rl.environments.loading.supervise import LOAD_SECONDS
from megatron_rl.environments.wire import (
    demonstration_from_json,
    failed,
    item_to_json,
    read_key,
    results_from_json,
    task_from_json,
)
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Demonstration, GradeResult, Item, Split, Task, Transcript, Turn

PAGE = 2000
LIST_MARGIN = 30.0
"""Seconds beyond the server's own deadline for reading a split, so that its words arrive."""
COUNTERS_TIMEOUT = 2.0


@dataclass(frozen=True)
class ServedEnvironment:
    """An environment of the server's list."""

    name: str
    weight: float
    """Share of the training prompts, relative to the others."""
    evaluation_only: bool
    max_turns: int
    """How often the model may speak in a conversation."""


class EnvironmentClient:
    """Talks to the server whose address is in ``address_file``; the file is read anew for every attempt,
    so a server that was restarted elsewhere is found."""

    def __init__(
        self,
        address_file: str | Path,
        *,
        timeout: float = 60.0,
        list_timeout: float = LOAD_SECONDS,
        attempts: int = 24,
        backoff: float = 0.1,
        revive: Callable[[], None] | None = None,
        answered: Callable[[], None] | None = None,
    ) -> None:
        """``timeout`` bounds one grade request from its sending to its answer, ``list_timeout`` the server's reading
        of a data set. An attempt that cannot reach the
        server is repeated after ``backoff`` seconds, doubled every time up to 2, and after a call of ``revive``,
        which may restart it (``EnvironmentServerProcess.ensure_alive``); ``answered`` is called after every
        answer. A server that is busy is asked again for twenty timeouts."""
        self._address_file = Path(address_file)
        self._list_timeout = list_timeout + LIST_MARGIN
        self._attempts = attempts
        self._backoff = backoff
        self._revive = revive
        self._exchange = Exchange(self._address_file, timeout, attempts, backoff, revive, answered)

    async def grade(self, environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[GradeResult]:
        """One result per item, in order."""
        return await self._judge(environment, "grade", items)

    async def step(self, environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[GradeResult]:
        """The environment's answer to each (task, state, turn), in order."""
        return await self._judge(environment, "step", items)

    async def _judge(self, environment: str, route: str, items: Sequence[Item]) -> list[GradeResult]:
        if not items:
            return []
        try:
            answer = await self._exchange.post(environment, route, [item_to_json(item) for item in items])
            return results_from_json(answer, len(items))
        except RequestFailed as failure:
            return _all_failed(items, failure.code, str(failure))
        except ValueError as error:
            return _all_failed(items, "environment_exception", f"the server's answer cannot be read: {error}")

    def fetch_tasks(self, environment: str, split: Split) -> list[Task]:
        """All tasks of a split; ``EnvironmentFault`` when they cannot be had."""
        return [task_from_json(row) for row in self._fetch(environment, "tasks", split)]

    def fetch_demonstrations(self, environment: str, split: Split) -> list[Demonstration]:
        """All demonstrations of a split in the order of the curriculum; often none."""
        return [demonstration_from_json(row) for row in self._fetch(environment, "demonstrations", split)]

    def environments(self) -> tuple[ServedEnvironment, ...]:
        """What is served, in the order of the list; ``EnvironmentFault`` when the server does not say."""
        rows = read_key(self._get("/v1/environments"), "items", list, "")
        kinds = {"name": str, "weight": float, "evaluation_only": bool, "max_turns": int}
        return tuple(
            ServedEnvironment(**{key: read_key(row, key, kind, f"items[{index}]") for key, kind in kinds.items()})
            for index, row in enumerate(rows)
        )

    def health(self) -> bool:
        """Whether the server answers."""
        try:
            get_json(read_address(self._address_file), "/v1/health", timeout=5.0)
        except EnvironmentFault:
            return False
        return True

    def counters(self) -> dict[str, int]:
        """How often this client sent a request again, and waited for a busy server, since its start."""
        return self._exchange.counts.as_dict()

    def server_counters(self) -> dict[str, Any]:
        """The answer of ``/v1/counters``; ``EnvironmentFault`` when there is none."""
        return get_json(read_address(self._address_file), "/v1/counters", COUNTERS_TIMEOUT)

    def _fetch(self, environment: str, what: str, split: Split) -> Iterator[Any]:
        """The rows of a list, page by page."""
        offset, total = 0, 1
        while offset < total:
            query = urlencode({"split": split, "offset": offset, "limit": PAGE})
            page = self._get(f"/v1/environments/{quote(environment, safe='')}/{what}?{query}")
            rows, total = read_key(page, "items", list, ""), read_key(page, "total", int, "")
            if not rows and offset < total:
                raise EnvironmentFault(f"{what} of {environment!r} end at row {offset} of {total}")
            yield from rows
            offset += len(rows)

    def _get(self, path: str) -> Any:
        """The answer to a GET; one that was lost with the server, or refused by a busy one, is asked for again."""
        ends = time.monotonic() + self._list_timeout
        for attempt in range(self._attempts):
            try:
                return get_json(read_address(self._address_file), path, max(ends - time.monotonic(), 1.0))
            except EnvironmentFault as fault:
                last = attempt == self._attempts - 1 or time.monotonic() > ends
                if last or (isinstance(fault, ServerError) and not fault.may_pass):
                    raise
            time.sleep(min(self._backoff * 2**attempt, LONGEST_BACKOFF))
            if self._revive is not None:
                self._revive()


def _all_failed(items: Sequence[object], code: str, message: str) -> list[GradeResult]:
    return [failed(code, message) for _ in items]
