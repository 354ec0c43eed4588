"""The trainer's side of the environment server: grades while it generates, tasks before it starts.

A sample that cannot be graded is data (``GradeResult`` with a code), never an exception and never a silent 0:
the caller decides what a failed sample means for a group.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp

from megatron_rl.environments.address import error_message, get_json, read_address
from megatron_rl.environments.wire import (
    demonstration_from_json,
    dumps,
    failed,
    item_to_json,
    loads,
    read_key,
    results_from_json,
    task_from_json,
)
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Demonstration, GradeResult, Item, Split, Task, Transcript, Turn

PAGE = 2000
LONGEST_BACKOFF = 2.0
"""Two dozen attempts then span 40 s, in which even a busy machine has restarted a server."""
LIST_TIMEOUT = 600.0
"""The first page of a split waits for the environment to read its data set."""

logger = logging.getLogger(__name__)


class EnvironmentClient:
    """Talks to the server whose address is in ``address_file``; the file is read anew for every attempt,
    so a server that was restarted elsewhere is found."""

    def __init__(
        self,
        address_file: str | Path,
        *,
        timeout: float = 60.0,
        attempts: int = 24,
        backoff: float = 0.1,
        revive: Callable[[], None] | None = None,
    ) -> None:
        """``timeout`` bounds one grade request. An attempt that cannot reach the server is repeated after
        ``backoff`` seconds, doubled every time up to 2, and after a call of ``revive``, which may restart it
        (``EnvironmentServerProcess.ensure_alive``)."""
        self._address_file = Path(address_file)
        self._timeout = timeout
        self._attempts = attempts
        self._backoff = backoff
        self._revive = revive

    async def grade(self, environment: str, items: Sequence[tuple[Task, Transcript]]) -> list[GradeResult]:
        """One result per item, in order."""
        return await self._judge(environment, "grade", items)

    async def step(self, environment: str, items: Sequence[tuple[Task, Any, Turn]]) -> list[GradeResult]:
        """The environment's answer to each (task, state, turn), in order."""
        return await self._judge(environment, "step", items)

    async def _judge(self, environment: str, route: str, items: Sequence[Item]) -> list[GradeResult]:
        if not items:
            return []
        # the same id on every attempt: a request whose answer was lost is not graded twice
        body = dumps({"request_id": uuid.uuid4().hex, "items": [item_to_json(item) for item in items]}).encode()
        path = f"/v1/environments/{quote(environment, safe='')}/{route}"
        problem = ""
        for attempt in range(self._attempts):
            try:
                if attempt:
                    await self._wait_for_server(attempt)
                status, answer = await self._post(path, body)
            except TimeoutError:  # before ClientError: aiohttp's timeouts are both
                return _all_failed(items, "timeout", f"no grade within {self._timeout:g} s")
            except (aiohttp.ClientError, EnvironmentFault, OSError) as error:
                problem = str(error) or type(error).__name__
                continue
            if status == 401:  # the server was restarted with another token after its address was read
                problem = error_message(answer)
                continue
            return _read_answer(items, status, answer)
        logger.warning("environment server unreachable after %d attempts: %s", self._attempts, problem)
        return _all_failed(items, "server_unreachable", problem)

    def fetch_tasks(self, environment: str, split: Split) -> list[Task]:
        """All tasks of a split; ``EnvironmentFault`` when they cannot be had."""
        return [task_from_json(row) for row in self._fetch(environment, "tasks", split)]

    def fetch_demonstrations(self, environment: str, split: Split) -> list[Demonstration]:
        """All demonstrations of a split in the order of the curriculum; often none."""
        return [demonstration_from_json(row) for row in self._fetch(environment, "demonstrations", split)]

    def max_turns(self, environment: str) -> int:
        """How often the model may speak in a conversation; ``EnvironmentFault`` when the server does not say."""
        path = f"/v1/environments/{quote(environment, safe='')}"
        return read_key(get_json(read_address(self._address_file), path, timeout=30.0), "max_turns", int, "")

    def health(self) -> bool:
        """Whether the server answers."""
        try:
            get_json(read_address(self._address_file), "/v1/health", timeout=5.0)
        except EnvironmentFault:
            return False
        return True

    async def _wait_for_server(self, attempt: int) -> None:
        await asyncio.sleep(min(self._backoff * 2 ** (attempt - 1), LONGEST_BACKOFF))
        if self._revive is not None:
            await asyncio.to_thread(self._revive)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """A session per request costs 0.4 ms; a kept one would be tied to one event loop and, after a
        pause, meet connections that the server has dropped."""
        address = read_address(self._address_file)
        headers = {**address.headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(address.url + path, data=body) as response,
        ):
            return response.status, await response.read()

    def _fetch(self, environment: str, what: str, split: Split) -> Iterator[Any]:
        """The rows of a list, page by page."""
        offset, total = 0, 1
        while offset < total:
            query = urlencode({"split": split, "offset": offset, "limit": PAGE})
            path = f"/v1/environments/{quote(environment, safe='')}/{what}?{query}"
            page = get_json(read_address(self._address_file), path, LIST_TIMEOUT)
            rows, total = read_key(page, "items", list, ""), read_key(page, "total", int, "")
            if not rows and offset < total:
                raise EnvironmentFault(f"{what} of {environment!r} end at row {offset} of {total}")
            yield from rows
            offset += len(rows)


def _read_answer(items: Sequence[object], status: int, answer: bytes) -> list[GradeResult]:
    if status != 200:
        message = f"the environment server refuses the request ({status}): {error_message(answer)}"
        return _all_failed(items, "environment_exception", message)
    try:
        return results_from_json(loads(answer), len(items))
    except ValueError as error:
        return _all_failed(items, "environment_exception", f"the server's answer cannot be read: {error}")


def _all_failed(items: Sequence[object], code: str, message: str) -> list[GradeResult]:
    return [failed(code, message) for _ in items]
