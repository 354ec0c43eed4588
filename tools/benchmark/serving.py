"""Servers under load: requests a second, time to the first token, and CPU seconds, of 1 to 64 streaming clients.

    python -m tools.benchmark.serving --token-file token \\
        --server "ours=megatron-rl serve DIR --port 8101 --token-file token" \\
        --server "transformers=transformers serve --port 8102 --device cpu"

The servers are started together and loaded in turn, with the same prompts. Of a busy machine read the CPU seconds for
1,000 tokens, and ratios of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from megatron_rl.metrics.console import format_table
from tools.benchmark.common import provenance, write_record

START_SECONDS = 300.0
HEADERS = ("server", "clients", "requests / s", "first token ms, p50", "p95", "tokens / s", "CPU s / 1,000 tokens")


@dataclass(frozen=True)
class Server:
    """A server that runs here."""

    name: str
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Of all its processes so far; ended ones aside."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total


@dataclass
class Load:
    """What the clients of one server saw."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""
    tokens: int = 0
    finished: int = 0


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], load: Load, hangs_up: bool) -> None:
    """Stream one answer; whoever ``hangs_up`` leaves at the first token."""
    started, chunks, counted = time.perf_counter(), 0, 0
    async with session.post(f"{url}/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answers {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            data = line.decode().removeprefix("data:").strip()
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
                chunks += 1
                if chunks == 1:
                    load.first.append(time.perf_counter() - started)
                    if hangs_up:
                        response.close()
                        load.tokens += 1
                        return
            counted = (chunk.get("usage") or {}).get("completion_tokens") or counted
    load.tokens += counted or chunks
    load.finished += 1


async def put_under_load(server: Server, arguments: argparse.Namespace, clients: int, hang_up: int) -> Load:
    """Let ``clients`` ask one request after the other; with ``hang_up`` n each n-th of them hangs up."""
    load, numbers = Load(), iter(range(arguments.requests * clients))
    headers = {"Authorization": f"Bearer {arguments.token_file.read_text().strip()}"} if arguments.token_file else {}

    async def client(number: int) -> None:
        for request in numbers:
            message = {"role": "user", "content": f"Tell me a story about the number {request * 37 + clients}."}
            body = {"model": arguments.model, "messages": [message], "temperature": 0.0, "stream": True}
            body |= {"max_tokens": arguments.max_tokens, "stream_options": {"include_usage": True}}
            await ask(session, server.url, body, load, bool(hang_up) and number % hang_up == 0)

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        await asyncio.gather(*map(client, range(clients)))
    return load


def measure(server: Server, arguments: argparse.Namespace, clients: int, hang_up: int = 0) -> dict[str, float]:
    """Return the figures of one server under one load, named like ``HEADERS``."""
    cpu, started = server.cpu_seconds(), time.perf_counter()
    load = asyncio.run(put_under_load(server, arguments, clients, hang_up))
    seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
    cuts = statistics.quantiles(load.first, n=20, method="inclusive") if len(load.first) > 1 else load.first * 19
    figures = (load.finished / seconds, 1e3 * cuts[9], 1e3 * cuts[18], load.tokens / seconds, 1e3 * cpu / load.tokens)
    return dict(zip(HEADERS[2:], figures, strict=True))


@contextlib.contextmanager
def started(name: str, command: str, model: str) -> Iterator[Server]:
    """Start a server and wait until it is healthy; its ``--port`` says where."""
    port = re.search(r"--port[= ](\d+)", command)
    if port is None:
        raise SystemExit(f"the command of {name} has no --port; add one")
    with Path(f"serving_{name}.log").open("w") as log:
        process = subprocess.Popen(shlex.split(command), stdout=log, stderr=subprocess.STDOUT)
    server = Server(name, f"http://127.0.0.1:{port[1]}/v1", psutil.Process(process.pid))
    try:
        ends = time.monotonic() + START_SECONDS
        while not asyncio.run(_listens(server.url)):
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{name} does not serve {model}; see {log.name}")
            time.sleep(1.0)
        yield server
    finally:
        process.terminate()
        process.wait()


async def _listens(url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as session, session.get(url.removesuffix("v1") + "health") as response:
            return response.status == 200
    return False


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table of medians, write the record."""
    parser = argparse.ArgumentParser(prog="serving", description=__doc__.partition("\n")[0])
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND; the command has a --port")
    parser.add_argument("--model", required=True, help="the model's name in requests")
    parser.add_argument("--token-file", type=Path, help="with the API key of the servers that want one")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--hang-up", type=int, default=4, help="at the end, one client in so many hangs up; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    loads = [(clients, 0) for clients in arguments.clients]
    loads += [(max(arguments.clients), arguments.hang_up)] if arguments.hang_up else []
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        commands = [each.split("=", 1) for each in arguments.server]
        servers = [stack.enter_context(started(name, command, arguments.model)) for name, command in commands]
        for server in servers:  # what is compiled or read at the first request
            asyncio.run(put_under_load(server, argparse.Namespace(**vars(arguments) | {"requests": 1}), 1, 0))
        for _ in range(arguments.rounds):
            for clients, hang_up in loads:
                label = f"{clients}, 1 in {hang_up} hangs up" if hang_up else str(clients)
                for server in servers:
                    figures = measure(server, arguments, clients, hang_up)
                    found.setdefault((server.name, label), []).append(figures)
    medians = {key: [statistics.median(each[name] for each in rounds) for name in HEADERS[2:]]
               for key, rounds in found.items()}  # fmt: skip
    print(format_table(HEADERS, [[*key, *(f"{figure:,.3g}" for figure in row)] for key, row in medians.items()]))
    rows = [{"server": name, "clients": label, "rounds": rounds} for (name, label), rounds in found.items()]
    write_record(arguments.json, provenance("serving") | {"rows": rows})


if __name__ == "__main__":
    main()
