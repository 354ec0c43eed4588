"""Posts items to the environment server and gets their results, through restarts and busy times.

Three kinds of waiting are kept apart: for the answer of a request that was taken (``timeout``), for a server that
does not answer (``attempts``, for each server anew), and for one that asks to come back later (``patience``, which
bounds all of it).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from megatron_rl.environments.address import BUSY, Address, error_message, read_address
from megatron_rl.environments.wire import dumps, loads
from megatron_rl.errors import EnvironmentFault

CONCURRENT = 16
"""Requests of one client at once; the others wait here, where it costs nothing and starts no timeout."""
PATIENCE_TIMEOUTS = 20.0
"""A busy server is asked again for so many timeouts: each of the requests before may take a whole one."""
LONGEST_BACKOFF = 2.0
"""Two dozen attempts then span 40 s, in which even a busy machine has restarted a server."""
SHORTEST_RETRY_AFTER, LONGEST_RETRY_AFTER = 0.05, 30.0

logger = logging.getLogger(__name__)


class RequestFailed(Exception):
    """No results for the items of a request."""

    def __init__(self, code: str, message: str) -> None:
        """``code`` is what ``GradeResult.code`` says of its samples."""
        super().__init__(message)
        self.code = code


class ExchangeCounts:
    """How often a request was sent again, and why; read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter({"requests_repeated": 0, "busy_waits": 0})

    def add(self, name: str) -> None:
        """Raises one count."""
        with self._lock:
            self._counts[name] += 1

    def as_dict(self) -> dict[str, int]:
        """All counts since the start."""
        with self._lock:
            return dict(self._counts)


class Exchange:
    """One client's POST requests; many may run at once on one event loop."""

    def __init__(
        self,
        address_file: Path,
        timeout: float,
        attempts: int,
        backoff: float,
        revive: Callable[[], None] | None,
        answered: Callable[[], None] | None,
    ) -> None:
        """See ``EnvironmentClient``."""
        self.counts = ExchangeCounts()
        self._address_file = address_file
        self._timeout = timeout
        self._attempts = attempts
        self._backoff = backoff
        self._revive = revive
        self._answered = answered
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def post(self, environment: str, action: str, items: Sequence[Any]) -> Any:
        """The parsed answer to ``items``; ``RequestFailed`` when there is none."""
        # the same id on every attempt: a request whose answer was lost is not worked on twice
        body = dumps({"request_id": uuid.uuid4().hex, "items": list(items)}).encode()
        path = f"/v1/environments/{quote(environment, safe='')}/{action}"
        async with self._place():
            status, answer = await self._send(path, body)
        if status != 200:
            message = f"the environment server refuses the request ({status}): {error_message(answer)}"
            raise RequestFailed("environment_exception", message)
        if self._answered is not None:
            self._answered()
        try:
            return loads(answer)
        except ValueError as error:
            message = f"the server's answer cannot be read: {error}"
            raise RequestFailed("environment_exception", message) from error

    async def _send(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The first answer that will not change: not that the server is busy, or wants another token."""
        patience_ends = time.monotonic() + PATIENCE_TIMEOUTS * self._timeout
        attempt, problem, pid = 0, "", 0
        while attempt < self._attempts and (not attempt or time.monotonic() < patience_ends):
            if attempt:
                self.counts.add("requests_repeated")
            try:
                if attempt:
                    await self._wait_for_server(attempt)
                address = read_address(self._address_file)
                if address.pid != pid:  # a new server: that the one before did not answer says nothing about it
                    attempt, pid = min(attempt, 1), address.pid
                status, answer, retry_after = await self._post(address, path, body)
            except TimeoutError:  # before ClientError: aiohttp's timeouts are both
                raise RequestFailed("timeout", f"no answer within {self._timeout:g} s") from None
            except (aiohttp.ClientError, EnvironmentFault, OSError) as error:
                problem = str(error) or type(error).__name__
                attempt += 1
                continue
            if status in BUSY:
                problem = error_message(answer)
                if time.monotonic() + retry_after > patience_ends:
                    break
                self.counts.add("busy_waits")
                await asyncio.sleep(retry_after)
                attempt = 0  # it is there
            elif status == 401:  # the server was restarted with another token after its address was read
                problem = error_message(answer)
                attempt += 1
            else:
                return status, answer
        logger.warning("no answer from the environment server after %d attempts: %s", attempt, problem)
        raise RequestFailed("server_unreachable", problem)

    async def _wait_for_server(self, attempt: int) -> None:
        await asyncio.sleep(min(self._backoff * 2 ** (attempt - 1), LONGEST_BACKOFF))
        if self._revive is not None:
            await asyncio.to_thread(self._revive)

    async def _post(self, address: Address, path: str, body: bytes) -> tuple[int, bytes, float]:
        """Status, body, and the seconds after which a busy server may be asked again.

        A session per request costs 0.4 ms; a kept one would be tied to one event loop and, after a
        pause, meet connections that the server has dropped.
        """
        headers = {**address.headers, "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        connector = aiohttp.UnixConnector(address.socket_path) if address.socket_path else None
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session,
            session.post(address.base_url + path, data=body) as response,
        ):
            return response.status, await response.read(), _seconds(response.headers.get("Retry-After"))

    def _place(self) -> asyncio.Semaphore:
        """A semaphore belongs to the event loop that waits on it; a client may be used on several in turn."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(CONCURRENT))
        return self._places[1]


def _seconds(retry_after: str | None) -> float:
    """The header's value, which may also be a date or missing."""
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        return min(max(float(retry_after), SHORTEST_RETRY_AFTER), LONGEST_RETRY_AFTER)
    return 1.0
