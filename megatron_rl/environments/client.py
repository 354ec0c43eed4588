"""The trainer's side of the environment server: grades while it generates, tasks before it starts.

A sample that cannot be graded is data (a ``Grade`` with a code), never an exception and never a silent 0. A
request whose server died is sent again: a grade is a function of its arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from megatron_rl.environments import wire
from megatron_rl.environments.child import LOAD_SECONDS
from megatron_rl.environments.results import MAX_MESSAGE, failed, result_from_json
from megatron_rl.errors import EnvironmentFault
from megatron_rl.json_text import dumps, loads
from megatron_rl.types import Demonstration, Grade, HarnessRun, Item, Split, Task, Transcript

PAGE = 2000
LIST_MARGIN = 30.0
"""Seconds beyond the server's own deadline for reading a split, so that its words arrive."""
QUICK_SECONDS = 5.0
"""For routes that take no time."""
CONCURRENT = 16
"""Grade requests of one client at once; the others wait here, where they start no timeout."""
GROUP_TRIES = 2
"""Of the server, to grade a group together."""
PART = 4 * 2**20
"""Characters of a request's items. The server takes 16 MiB, and every sample brings its task: of published code some
tests have a MiB, of which a group of 16 in one request was refused."""
RUNNING = 32
"""Groups of harnesses of one client at once; the server has a thread for each of eight clients."""
BUSY = (429, 503)
"""Statuses of a server that may grant the same request later."""
LOST = -1
"""In place of a status: the connection ended without an answer."""
BUSY_SECONDS = 1.0
PATIENCE_TIMEOUTS = 20.0
"""A request is sent again for so many timeouts: each of those before it at a busy server may take a whole one."""
ATTEMPTS = 24
"""At a server that does not answer; with their pauses they span 40 s, in which even a busy machine has restarted it."""
LOOKS = 20
"""How often a request that waits looks whether it has waited for too long, until it has; an even number."""
BACKOFF_SECONDS, LONGEST_BACKOFF = 0.1, 2.0
"""The pause doubles from the one to the other."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RequestFailed(EnvironmentFault):
    """A request without a successful answer; ``code`` becomes ``Grade.code`` of the samples."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EnvironmentClient:
    """Talks to the server whose address is in ``address_file``; the file is read anew for every attempt,
    so a server that was restarted elsewhere is found."""

    def __init__(self, address_file: str | Path, *, timeout: float = 60.0, list_timeout: float = LOAD_SECONDS) -> None:
        """``timeout`` bounds how long a grade request waits while the server's workers make no progress: a sample that
        hangs ends at its own deadline. ``list_timeout`` bounds the server's reading of a data set."""
        self._address_file = Path(address_file)
        self._timeout, self._list_timeout = timeout, list_timeout + LIST_MARGIN
        self._counts = Counter({"requests_repeated": 0, "busy_waits": 0, "late_completions": 0})
        self._places, self._runs = asyncio.Semaphore(CONCURRENT), asyncio.Semaphore(RUNNING)

    async def grade(self, environment: str, items: Sequence[Item]) -> list[Grade]:
        """Grade each sample or turn of a conversation, in order; to be awaited on one event loop."""
        body = [wire.item_to_json(item) for item in items]
        results = await self._post(f"{environment}/grade", body, self._places, self._timeout)
        self._counts["late_completions"] += sum(result.status == "timeout" for result in results)
        return results

    async def grade_group(
        self, environment: str, seconds: float, task: Task, transcripts: Sequence[Transcript]
    ) -> list[Grade]:
        """Grade answers to one task together, in order; each of the server's two tries may take ``seconds``."""
        body, path = dumps(wire.group_to_json(task, transcripts)), f"/v1/environments/{environment}/grade_group"
        timeout = self._timeout + GROUP_TRIES * seconds
        return await self._results(path, body.encode(), len(transcripts), self._places, timeout)

    async def run(self, environment: str, runs: Sequence[HarnessRun]) -> list[Grade]:
        """Run a group of a harness, return a grade a sample, in order; when this is cancelled, the samples' processes
        are killed.

        There is no timeout: every sample has the harness's own deadline, which starts when its process does. Nothing
        that has begun is sent again, because it would call the model again: if the server dies the code is
        ``server_unreachable``.
        """
        return await self._post(f"{environment}/run", [wire.run_to_json(run) for run in runs], self._runs, None)

    async def _post(
        self, route: str, items: Sequence[Mapping[str, Any]], places: asyncio.Semaphore, timeout: float | None
    ) -> list[Grade]:
        path = f"/v1/environments/{route}"
        asked = [(f'{{"items": [{",".join(part)}]}}'.encode(), len(part)) for part in _parts(items)]
        parts = await asyncio.gather(*(self._results(path, *part, places, timeout) for part in asked))
        return list(itertools.chain(*parts))

    async def _results(
        self, path: str, body: bytes, count: int, places: asyncio.Semaphore, timeout: float | None
    ) -> list[Grade]:
        """The results of a request for ``count`` samples; all have failed where the answer is no such list."""
        try:
            async with places:
                answer = await self._ask(path, timeout, body)
            rows = wire.read_key(answer, "items", list)
            results = [result_from_json(row, f"items[{index}]") for index, row in enumerate(rows)]
            if len(results) != count:
                raise wire.WireError(f"it has {len(results)} items for {count} samples")
            return results
        except RequestFailed as failure:
            return [failed(failure.code, str(failure)[:MAX_MESSAGE])] * count
        except ValueError as error:
            return [failed("environment_exception", f"the server's answer cannot be read: {error}")] * count

    def fetch_tasks(self, environment: str, split: Split) -> list[Task]:
        """Return all tasks of a split; ``EnvironmentFault`` when they cannot be had."""
        return [wire.task_from_json(row) for row in self._fetch(environment, "tasks", split)]

    def fetch_demonstrations(self, environment: str, split: Split) -> list[Demonstration]:
        """Return all demonstrations of a split in the order of the curriculum; often none."""
        return [wire.demonstration_from_json(row) for row in self._fetch(environment, "demonstrations", split)]

    def environments(self) -> tuple[wire.ServedEnvironment, ...]:
        """List what is served, in the order of the list; ``EnvironmentFault`` if the server does not say."""
        return tuple(map(wire.ServedEnvironment.from_json, self._get("/v1/environments")["items"]))

    def _fetch(self, environment: str, what: str, split: Split) -> Iterator[Any]:
        offset, total = 0, 1
        while offset < total:
            page = self._get(f"/v1/environments/{environment}/{what}?split={split}&offset={offset}&limit={PAGE}")
            total = page["total"]
            yield from page["items"]
            offset += PAGE

    def _get(self, path: str) -> Any:
        return asyncio.run(self._ask(path, self._list_timeout))

    def health(self, timeout: float = QUICK_SECONDS) -> bool:
        with contextlib.suppress(EnvironmentFault):
            self._at_once("/v1/health", timeout)
            return True
        return False

    def counters(self) -> dict[str, int]:
        """Count requests sent again, waits for a busy server, and samples whose grader timed out twice, so far."""
        return dict(self._counts)

    def server_counters(self) -> tuple[int, dict[str, int]]:
        """Return the server's process id, and what its workers did; ``EnvironmentFault`` when it does not answer."""
        answer = self._at_once("/v1/counters", QUICK_SECONDS)
        return answer["pid"], answer["counters"]

    def _at_once(self, path: str, timeout: float) -> Any:
        """The answer of a route that takes no time, asked once."""
        _, status, answer = asyncio.run(self._try(path, timeout, None))
        if status != 200:
            raise EnvironmentFault(str(answer))
        return answer

    async def _ask(self, path: str, timeout: float | None, body: bytes | None = None) -> Any:
        """The JSON of a success; ``RequestFailed`` for an answer that will not change, or when no server answers.

        Without a ``timeout`` nothing is sent again that a server may have begun with.
        """
        once = timeout is None
        gives_up = math.inf if once else time.monotonic() + PATIENCE_TIMEOUTS * timeout
        attempt, server, beats = 0, 0, None
        while True:
            attempt += 1
            pid, status, answer = await self._try(path, timeout, body)
            if status == 200:
                return answer
            if pid not in (0, server):  # a new server: that the one before did not answer says nothing about it
                attempt, server = 1, pid
            problem = answer["message"] if isinstance(answer, dict) and "message" in answer else str(answer)
            in_time = time.monotonic() < gives_up
            if once and status in (LOST, *BUSY):
                raise RequestFailed("server_unreachable", problem)
            if status in BUSY and not in_time and (now := await self._beats()) != beats:
                gives_up, beats, in_time = time.monotonic() + PATIENCE_TIMEOUTS * timeout, now, True
            if status in BUSY and in_time:
                self._counts["busy_waits"] += 1
                attempt = 0  # it is there
                await asyncio.sleep(BUSY_SECONDS)
            elif status not in (0, LOST, 401, *BUSY):  # 401: restarted with another token after its address was read
                what = f"the environment server refuses {path} ({status}): {problem}"
                raise RequestFailed("environment_exception", what)
            elif attempt < ATTEMPTS and in_time:
                self._counts["requests_repeated"] += 1
                await asyncio.sleep(min(BACKOFF_SECONDS * 2 ** (attempt - 1), LONGEST_BACKOFF))
            else:
                logger.warning("no answer from the environment server after %d attempts: %s", attempt, problem)
                raise RequestFailed("server_unreachable", problem)

    async def _try(self, path: str, timeout: float | None, body: bytes | None) -> tuple[int, int, Any]:
        """The server's process id, status and answer; where there is none, a status of 0 (nothing was sent) or ``LOST``
        and why."""
        pid = 0
        try:
            address = wire.read_address(self._address_file)
            pid = address.pid
            alive = self._beats if body else None
            return pid, *await _within(timeout, _send(address, path, body), alive)
        except wire.ServerGivenUp as fault:
            raise RequestFailed("server_unreachable", str(fault)) from None
        except TimeoutError:
            raise RequestFailed("timeout", f"no answer within {timeout:g} s") from None
        except (aiohttp.ClientConnectorError, EnvironmentFault) as error:
            return pid, 0, str(error)
        except (aiohttp.ClientError, OSError) as error:
            return pid, LOST, str(error) or type(error).__name__

    async def _beats(self) -> tuple[int, int] | None:
        """The server's process id and a number that rises while its workers make progress; None without an answer."""
        with contextlib.suppress(RequestFailed):
            pid, status, answer = await self._try("/v1/counters", QUICK_SECONDS, None)
            return (pid, answer["beats"]) if status == 200 else None


def _parts(items: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The items as JSON, for as few requests as ``PART`` lets be."""
    parts: list[list[str]] = []
    size = PART
    for text in map(dumps, items):
        if size + len(text) > PART:
            parts.append([])
            size = 0
        parts[-1].append(text)
        size += len(text)
    return parts


async def _within(
    seconds: float | None, request: Coroutine[Any, Any, T], beats: Callable[[], Awaitable[object]] | None = None
) -> T:
    """Return what ``request`` does, or raise ``TimeoutError`` after ``seconds`` in which the event loop waited for it
    and what ``beats`` returns did not change.

    The loop has its thread in common with the engine. While that computes the prompts of a large model or captures
    graphs, an answer may lie in the socket for longer than any timeout, so a pause of the loop counts as one look.
    """
    if seconds is None:
        return await request
    task, before = asyncio.ensure_future(request), None
    try:
        for look in itertools.count(1):
            done, _ = await asyncio.wait({task}, timeout=seconds / LOOKS)
            if done:
                return task.result()
            if look % (LOOKS // 2) == 0:
                now = beats and await beats()
                if now == before and look >= LOOKS:
                    raise TimeoutError
                before = now
    finally:
        task.cancel()


async def _send(address: wire.Address, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Status and answer of one GET, or POST where there is a ``body``.

    A session per request costs 0.4 ms; a kept one would be tied to one event loop and, after a pause, meet
    connections that the server has dropped.
    """
    headers = {"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
    unix = address.url.startswith("unix:")
    connector = aiohttp.UnixConnector(address.url.removeprefix("unix:")) if unix else None
    url = ("http://localhost" if unix else address.url) + path
    async with (
        aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None), connector=connector) as session,
        session.request("GET" if body is None else "POST", url, data=body) as response,
    ):
        answer = await response.read()
        with contextlib.suppress(ValueError):  # what is no JSON is shown as text
            return response.status, loads(answer)
        return response.status, answer[:200].decode("utf-8", errors="replace")
