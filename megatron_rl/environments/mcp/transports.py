"""How messages of JSON-RPC 2.0 reach a tool server and come back. What a server sends may raise anything here."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_rl.environments.child import die_with_parent, kill_group
from megatron_rl.environments.tools import CallFailed
from megatron_rl.errors import one_line
from megatron_rl.json_text import check_bounds, dumps, loads

MOST_BYTES = 2**20
"""That a server may send until it has answered a request."""
ENDING_SECONDS = 2.0
Message = Mapping[str, Any]


class ServerFault(CallFailed):
    """The server is to blame; the connection cannot go on."""


class Process:
    """A server that is a child of this process, in a group of its own, and is killed when this process ends."""

    version = ""

    def __init__(self, settings: Message) -> None:
        self._settings, self._process = settings, None

    async def exchange(self, message: Message) -> Message:
        """Send a message and return the answer to a request."""
        received = 0
        if self._process is None:
            await self._start()
        try:
            await self._send(message)
            while "id" in message:
                line = await self._process.stdout.readuntil(b"\n")
                received = _bounded(received + len(line))
                sent = _read(line) if line.lstrip().startswith(b"{") else {}  # some print a banner
                if _answers(sent, message):
                    return sent
                if "id" in sent and sent.get("method") == "ping":  # it must be answered
                    await self._send({"jsonrpc": "2.0", "id": sent["id"], "result": {}})
        except (ConnectionError, EOFError):
            await self._wait()
            raise ServerFault(f"the tool server ended with status {self._process.returncode}") from None
        except asyncio.LimitOverrunError:
            _bounded(MOST_BYTES + 1)
        return {}

    async def close(self) -> None:
        """Kill it with what it started."""
        if self._process is not None:
            kill_group(self._process.pid)
            await self._wait()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._settings["command"], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MOST_BYTES,
            env=self._settings["environment"], start_new_session=True, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip

    async def _send(self, message: Message) -> None:
        self._process.stdin.write(dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):  # what it has put into other groups may hold its pipes
            await asyncio.wait_for(self._process.wait(), ENDING_SECONDS)


class Http:
    """A server that runs already: messages are POSTed to its URL, and no redirection is followed."""

    version = ""

    def __init__(self, settings: Message) -> None:
        self._url, self._session = settings["url"], ""

    async def exchange(self, message: Message) -> Message:
        """Send a message and return the answer to a request."""
        import aiohttp  # takes 0.3 s, of which most servers have no need

        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        headers |= {"MCP-Protocol-Version": self.version} if self.version else {}
        headers |= {"Mcp-Session-Id": self._session} if self._session else {}
        sent, received = {"data": dumps(message), "headers": headers, "allow_redirects": False}, b""
        async with aiohttp.ClientSession() as client, client.post(self._url, **sent) as answer:
            self._session = answer.headers.get("Mcp-Session-Id", self._session)
            is_stream = answer.content_type == "text/event-stream"
            async for chunk in answer.content.iter_any():
                received += chunk
                _bounded(len(received))
                for each in _events(received) if is_stream else ():
                    if _answers(found := _read(each), message):
                        return found  # the stream may stay open
        if answer.status not in (200, 202, 204):
            said = one_line(received.decode(errors="replace"), 200) or "it says no more"
            raise ServerFault(f"the tool server answers with status {answer.status}: {said}")
        if "id" not in message or _answers(whole := _read(received), message):
            return {} if "id" not in message else whole
        raise ServerFault("the tool server gave a request no answer")


def _events(received: bytes) -> list[bytes]:
    """The data of the server-sent events that are complete; that of one may have several lines."""
    events = received.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
    found = [b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:")) for event in events]
    return [data for data in found if data.strip()]


def _read(line: bytes) -> Message:
    value = loads(line)
    check_bounds(value)
    return value


def _bounded(received: int) -> int:
    if received > MOST_BYTES:
        raise ServerFault(f"the tool server sent more than {MOST_BYTES / 2**20:g} MiB, the most that is read")
    return received


def _answers(message: Message, request: Message) -> bool:
    """Whether it is the answer to ``request``; true is no number, though Python's equals 1."""
    return "method" not in message and type(message.get("id")) is int and message["id"] == request["id"]
