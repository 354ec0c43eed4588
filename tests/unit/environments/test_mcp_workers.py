"""Tool servers in the workers of an environment server: calls are answered there, and nothing outlives a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.environments.__main__ import main
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.mcp.client import ToolServer
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.tools import CallFailed
from megatron_rl.registry import PARSERS
from megatron_rl.types import Grade, Turn
from tests.support import mcp_server
from tests.unit.environments.conftest import is_gone
from tests.unit.environments.test_mcp import ROWS, connected, said

ROOT = Path(__file__).parents[3]
HERMES = PARSERS.get("hermes")


class Running:
    """An environment server with one environment, which has a tool server."""

    def __init__(self, process: EnvironmentServerProcess) -> None:
        self.process = process
        self._client = EnvironmentClient(process.address_file, timeout=300)
        [self.served] = self._client.environments()
        self.task = self._client.fetch_tasks("dataset", "train")[0]

    def call(self, *calls: tuple[str, dict]) -> list[str]:
        """What the model reads after a turn with these calls."""
        grade = self.say(HERMES.write(calls), None)
        assert not grade.failed, grade.message
        return [message["content"] for message in grade.continuation.messages]

    def say(self, text: str, state: object, number: int = 0) -> Grade:
        item = (self.task, state, Turn(text, "stop", len(text), number, False))
        return asyncio.run(self._client.grade("dataset", [item]))[0]


@contextlib.contextmanager
def running(folder: Path, deadline: float = 60):
    (folder / "sums.jsonl").write_text(ROWS)
    args = {"path": str(folder / "sums.jsonl"), "template": "{question}", "answer": "sum", "reward": "exact"}
    mcp = {"command": [sys.executable, mcp_server.__file__], "deadline": deadline}
    entry = {"environment": "dataset", "args": {**args, "held_out": 8}, "mcp": mcp}
    (folder / "list.yaml").write_text(json.dumps([entry]))
    with EnvironmentServerProcess(folder / "list.yaml", folder, start_timeout=300) as process:
        yield Running(process)


def family(environment: Running) -> list[int]:
    """Process ids: of a tool server, of a process that it started in a group of its own, and of the worker."""
    [text] = environment.call(("family", {}))
    server, child = map(int, text.split())
    return [server, child, psutil.Process(server).ppid()]


def test_a_conversation_with_tools_is_graded_and_its_failures_are_counted(tmp_path):
    with running(tmp_path, deadline=15) as environment:
        assert environment.served.max_turns == 8
        assert [tool["function"]["name"] for tool in environment.served.chat.tools][:2] == ["add", "say"]
        calls = HERMES.write([("die", {}), ("add", {"a": 1, "b": "?"})])
        first = environment.say(calls, None)
        second = environment.say(HERMES.write([("hang", {})]), first.continuation.state, 1)
        last = environment.say(environment.task.data["gold"], second.continuation.state, 2)
        processes = family(environment)
    assert "ended with status 3" in first.continuation.messages[0]["content"]
    assert "did not answer in time" in second.continuation.messages[0]["content"]
    assert last.reward == 1.0
    assert {"tool_calls": 3.0, "bad_tool_calls": 3.0}.items() <= last.metrics.items()
    assert all(map(is_gone, processes)), "the server of environments has ended"


@pytest.mark.parametrize("victim", ["the environment server", "the worker"])
def test_nothing_is_left_of_a_tool_server_whose_user_is_killed(tmp_path, victim):
    with running(tmp_path) as environment:
        processes = family(environment)
        os.kill(environment.process.pid if victim == "the environment server" else processes[-1], signal.SIGKILL)
        if victim == "the worker":  # of which the next sample tells
            assert environment.call(("add", {"a": 1, "b": 2})) == ["3"]
        assert all(map(is_gone, processes))


def test_the_example_passes_the_self_test_with_its_tool(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["test", "examples/mcp/environments.yaml"]) == 0
    assert "gold answers    ok" in capsys.readouterr().out


def test_the_self_test_of_a_list_names_the_entry_whose_server_is_no_good(capsys, tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text(f"- environment: shop\n  mcp: {{command: [{sys.executable}, nowhere.py]}}\n")
    assert main(["test", str(path)]) == 1
    said = capsys.readouterr().err
    *_, line = said.splitlines()
    assert line.startswith("error: mcp of shop (") and line.endswith("ended with status 2; run it by hand to see why")
    assert "can't open file" in said
    assert main(["test", str(path), "--option", "a=1"]) == 1
    assert "--option a=1 is for an environment's name" in capsys.readouterr().err


SDK_SERVER = """
import sys
import time
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    '''Adds two numbers.'''
    return a + b


@server.tool()
def fail(why: str) -> str:
    raise ValueError(why)


options = {"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}
server.run(transport=sys.argv[1], **options)
"""


@pytest.mark.long
@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_a_server_made_by_the_official_sdk_is_called(tmp_path, transport):
    pytest.importorskip("mcp.server.mcpserver", reason="needs the package mcp, 2.0 or later")
    module = tmp_path / "sums.py"
    module.write_text(SDK_SERVER)
    with contextlib.ExitStack() as stack:
        keys: dict[str, object] = {"command": [sys.executable, str(module), "stdio"], "deadline": 60}
        if transport != "stdio":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            process = stack.enter_context(subprocess.Popen([sys.executable, str(module), transport, str(port)]))
            stack.callback(process.kill)
            keys = {"url": f"http://127.0.0.1:{port}/mcp", "deadline": 60}
        server = stack.enter_context(connected(**keys))
        add, _ = listed_in_time(server)
        assert add["function"]["name"] == "add" and add["function"]["description"] == "Adds two numbers."
        assert add["function"]["parameters"]["properties"]["a"]["type"] == "integer"
        assert said(server, "add", a=37, b=5) == "42"
        with pytest.raises(CallFailed, match="it is closed"):
            said(server, "fail", why="it is closed")
        assert said(server, "add", a=1, b=2) == "3"


def listed_in_time(server: ToolServer) -> list:
    """The tools of a server that may still be starting."""
    give_up = time.monotonic() + 120
    while True:
        with contextlib.suppress(CallFailed):
            return server.tools()
        assert time.monotonic() < give_up, "the server has not begun to listen"
        time.sleep(0.2)
