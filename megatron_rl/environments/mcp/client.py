"""The tool server of one worker: connected at the first call, and anew after a fault."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from typing import Any

from megatron_rl.environments.mcp.transports import Http, Message, Process, ServerFault
from megatron_rl.environments.tools import CallFailed
from megatron_rl.errors import one_line
from megatron_rl.json_text import dumps

BEGIN = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "megatron-rl", "version": "0"}}
START_SECONDS = 30.0
"""For a start and the handshake; a launcher such as npx may look for newer packages first."""
MOST_PAGES = 100


class ToolServer:
    """Calls the tools of one server within the time of a turn; not for several threads."""

    def __init__(self, settings: Message) -> None:
        """``settings`` are those of ``ServerSettings.for_workers``."""
        self._settings, self._numbers, self._loop = settings, itertools.count(1), asyncio.Runner()
        self._transport: Process | Http | None = None
        self._ends: float | None = None

    def begin_turn(self) -> None:
        """Give the calls that follow the time of a turn, which begins with the first one."""
        self._ends = None

    def call(self, name: str, arguments: Message) -> str:
        """Return a tool's result as text; ``CallFailed`` says why there is none. A later call may succeed."""
        if self._ends is None:  # how long a server takes to start is no matter of the model's calls
            self._ends = 0.0  # should it not start, there is no other try in this turn
            self._within(time.monotonic() + START_SECONDS, self._connect())
            self._ends = time.monotonic() + self._settings["deadline"]
        text, is_error = self._within(self._ends, self._call(name, arguments))
        if is_error:
            raise CallFailed(text)
        return text

    def tools(self) -> list[Message]:
        """List the tools as schemas; ``CallFailed`` says why there is no list."""
        return self._within(time.monotonic() + START_SECONDS, self._list())

    def close(self) -> None:
        """End the connection, and a server that was started."""
        if isinstance(self._transport, Process):
            self._loop.run(self._transport.close())
        self._loop.close()
        self._transport, self._loop = None, asyncio.Runner()

    def _within(self, ends: float, work: Coroutine[Any, Any, Any]) -> Any:
        """What ``work`` returns in time; after a fault there is no connection any more."""
        try:
            return self._loop.run(asyncio.wait_for(work, ends - time.monotonic()))
        except CallFailed as failure:
            if isinstance(failure, ServerFault):
                self.close()
            raise
        except TimeoutError:
            self.close()
            raise ServerFault("the tool server did not answer in time") from None
        except Exception as error:  # of an answer that lacks what every answer has, or is no JSON
            self.close()
            raise ServerFault(one_line(f"the tool server failed: {type(error).__name__}: {error}")) from error

    async def _connect(self) -> None:
        if self._transport is None:
            self._transport = Http(self._settings) if self._settings["url"] else Process(self._settings)
            # what is used here is the same in all versions
            self._transport.version = str((await self._ask("initialize", BEGIN))["protocolVersion"])
            await self._transport.exchange({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _ask(self, method: str, parameters: Message) -> Message:
        message = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": parameters}
        answer = await self._transport.exchange(message)
        if "error" in answer:
            kind = CallFailed if method == "tools/call" else ServerFault
            raise kind(f"the tool server refuses {method}: {one_line(str(answer['error']['message']))}")
        return answer["result"]

    async def _list(self) -> list[Message]:
        """The tools as in OpenAI's API."""
        await self._connect()
        found, more = [], {}
        for _ in range(MOST_PAGES):
            page = await self._ask("tools/list", more)
            for tool in page["tools"]:
                about = {"description": tool["description"]} if tool.get("description") else {}
                function = {"name": tool["name"], **about, "parameters": tool["inputSchema"]}
                found.append({"type": "function", "function": function})
            if page.get("nextCursor") is None:
                return found
            more = {"cursor": page["nextCursor"]}
        raise ServerFault(f"the tool server's list of tools goes on after {MOST_PAGES} pages")

    async def _call(self, name: str, arguments: Message) -> tuple[str, bool]:
        """What the model reads of a result, and whether that is an error. Of an image it reads that there is one."""
        await self._connect()
        result = await self._ask("tools/call", {"name": name, "arguments": dict(arguments)})
        texts = [str(block.get("text", f"[{block['type']}: not shown]")) for block in result["content"]]
        text = "\n".join(texts) if texts else dumps(result.get("structuredContent", ""))
        return text, result.get("isError", False) is not False
