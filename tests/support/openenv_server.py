"""An OpenEnv server as a client sees it, with the environment of ``examples/bridges/digits_openenv.py``.

The tests of the bridge run against both, so it says what the real one says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

from aiohttp import web

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class _Digits:
    def __init__(self, sessions: int, heartbeat: float | None, rewarded: bool) -> None:
        self._free, self._heartbeat, self._rewarded = sessions, heartbeat, rewarded

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", lambda _: _json({"status": "healthy"}))
        app.router.add_get("/schema", lambda _: _json({"action": SCHEMA}))
        app.router.add_get("/list_environments", lambda _: _json(["digits"]))
        app.router.add_post("/digits/tasks", self._tasks)
        app.router.add_get("/ws", self._session)
        return app

    async def _tasks(self, request: web.Request) -> web.Response:
        split = (await request.json())["split"]
        size = {"train": 240, "test": 16}[split]
        return web.json_response({"tasks": [{"id": f"{split}-{index}"} for index in range(size)], "env_name": "digits"})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self._heartbeat)
        await socket.prepare(request)
        if not self._free:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            return socket
        self._free -= 1
        number = steps = 0
        try:
            async for received in socket:
                asked = json.loads(received.data)
                data = asked.get("data", {})
                if asked["type"] == "reset":
                    base = 240 if data.get("split") == "test" else 0
                    number, steps = data["index"] + base if "index" in data else data.get("seed", 0), 0
                    answer = {"observation": {"question": str(number)}, "reward": None, "done": False}
                elif asked["type"] == "step" and set(data) != {"text"}:
                    fault = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [{"msg": "no text"}]}
                    await socket.send_json({"type": "error", "data": fault})
                    continue
                else:
                    steps += 1
                    share = sum(letter in "02468" for letter in data["text"]) / max(len(data["text"]), 1) / 2
                    answer = {"observation": {"question": str(number)}, "done": steps == 2}
                    answer |= {"reward": share if self._rewarded else None, "metadata": {"length": len(data["text"])}}
                await socket.send_json({"type": "observation", "data": answer})
        finally:
            self._free += 1
        return socket


async def _json(value: object) -> web.Response:
    return web.json_response(value)


@contextlib.contextmanager
def digits_server(sessions: int = 8, heartbeat: float | None = None, rewarded: bool = True) -> Iterator[str]:
    """Its URL. ``heartbeat``: seconds between two pings, of which it awaits an answer in half the time."""
    loop, started, urls = asyncio.new_event_loop(), threading.Event(), []
    runner = web.AppRunner(_Digits(sessions, heartbeat, rewarded).app())

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    started.wait()
    yield urls[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
