"""OpenEnv's protocol: JSON over a WebSocket for an episode, REST for what the server lists.

Spoken with ``aiohttp``: OpenEnv's own package brings a web interface and 115 packages along, where a client needs three
kinds of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp  # whoever lists environments imports this module, and does without

MAX_MESSAGE = 100 * 2**20
"""Bytes, as of OpenEnv's own client: an observation may be an image."""
FULL = "CAPACITY_REACHED"
AGAIN_SECONDS = 0.5
"""Between two tries at a server that is starting, or that has no session to give."""
START_SECONDS = 60.0
MODEL_AT_FAULT = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class Refused(Exception):
    """The action is none that the environment takes; the text is for the model."""


class ServerFault(Exception):
    """The server does not do what it should."""


class Episode:
    """One session of the server, with an environment of its own."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse, action_schema: Mapping[str, Any]) -> None:
        self.action_schema = action_schema
        self._socket = connection
        # one is always under way: it answers the server's pings while the model thinks
        self._next = asyncio.ensure_future(connection.receive())

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a ``reset`` or a ``step``: observation, reward, done, perhaps metadata.

        Raises:
            Refused: the server says that the action is at fault.
            ServerFault: it says something else, or nothing.
        """
        with contextlib.suppress(ConnectionError):  # its last words are still to be read
            await self._socket.send_json({"type": kind, "data": dict(data)})
        received = await self._next
        if received.type.name != "TEXT":
            raise ServerFault(f"the server ended the session at a {kind} ({received.data or received.type.name})")
        self._next = asyncio.ensure_future(self._socket.receive())
        answer = received.json()
        if answer["type"] == "error":
            code, message = answer["data"].get("code"), answer["data"].get("message", "")
            details = "; ".join(str(each.get("msg")) for each in answer["data"].get("errors", ()))
            said = f"{message} {details}".strip()
            raise Refused(said) if kind == "step" and code in MODEL_AT_FAULT else ServerFault(f"{code}: {said}")
        return answer["data"]

    async def close(self) -> None:
        """Ends the session."""
        self._next.cancel()
        await self._socket.close()


class Server:
    """A server that runs at ``url``, or that ``command`` starts where one is needed."""

    def __init__(self, url: str, command: str) -> None:
        self._url, self._command = url, command

    async def tasks(self, split: str) -> Sequence[Any]:
        """What the server lists for a split; ``ServerFault`` where it lists nothing."""
        import aiohttp

        async with self._reachable() as (url, http):
            try:
                (name,) = await _json(http.get(f"{url}/list_environments"))
                return (await _json(http.post(f"{url}/{name}/tasks", json={"split": split})))["tasks"]
            except aiohttp.ClientResponseError as error:
                why = f"{error.status} from {error.request_info.url.path}"
                advice = "give seeds, such as seeds: 4096"
                raise ServerFault(f"the server lists no {split} tasks ({why}); {advice}") from error

    @contextlib.asynccontextmanager
    async def episode(self, reset: Mapping[str, Any]) -> AsyncIterator[tuple[Episode, dict[str, Any]]]:
        """A session and what its reset gave; waits for one where the server has no more to give."""
        async with self._reachable() as (url, http):
            schema = (await _json(http.get(f"{url}/schema")))["action"]
            episode, result = await self._begin(url, http, schema, reset)
            try:
                yield episode, result
            finally:
                await episode.close()

    async def _begin(
        self, url: str, http: aiohttp.ClientSession, schema: Mapping[str, Any], reset: Mapping[str, Any]
    ) -> tuple[Episode, dict[str, Any]]:
        while True:
            episode = Episode(await http.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE), schema)
            try:
                return episode, await episode.ask("reset", reset)
            except ServerFault as fault:
                await episode.close()
                if not str(fault).startswith(FULL):
                    raise
                await asyncio.sleep(AGAIN_SECONDS)

    @contextlib.asynccontextmanager
    async def _reachable(self) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        """Its URL, while it runs, and a client; ``ServerFault`` where nobody answers."""
        import aiohttp

        with contextlib.ExitStack() as stack:
            url = self._url or stack.enter_context(_started(self._command))
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
                await _answers(http, url, START_SECONDS if self._command else 0.0)
                yield url, http


async def _answers(http: aiohttp.ClientSession, url: str, seconds: float) -> None:
    """Waits for the server, so many seconds at most."""
    import aiohttp

    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while True:
        try:
            await _json(http.get(f"{url}/health"))
            return
        except aiohttp.ClientError as error:
            if loop.time() >= ends:
                raise ServerFault(f"no OpenEnv server answers at {url}: {error}") from error
            await asyncio.sleep(AGAIN_SECONDS)


async def _json(request: Any) -> Any:
    async with request as response:
        response.raise_for_status()
        return await response.json()


@contextlib.contextmanager
def _started(command: str) -> Any:
    """The URL of a server on a free port, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # it may be of another virtual environment, for which our modules are the wrong ones
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = shlex.split(command.replace("{port}", str(port)))
    with subprocess.Popen(words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
