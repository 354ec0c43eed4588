"""Tools of an MCP server: what a call gives, what is a failed call and nothing worse, what a list is refused for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.environments.config import load_environment_specs
from megatron_rl.environments.mcp.client import ToolServer
from megatron_rl.environments.mcp.settings import ServerSettings
from megatron_rl.environments.mcp.transports import ServerFault
from megatron_rl.environments.selftest import play
from megatron_rl.environments.tools import CallFailed
from megatron_rl.errors import ConfigError
from megatron_rl.registry import PARSERS
from megatron_rl.types import Turn
from tests.support import mcp_server
from tests.unit.environments.conftest import is_gone

SERVER = str(Path(mcp_server.__file__))
HERMES = PARSERS.get("hermes")


def entry(*manners: str, **keys: object) -> dict:
    return {"command": [sys.executable, SERVER, *manners], "deadline": 60, **keys}


def settings(**keys: object) -> dict:
    problems: list[str] = []
    read = ServerSettings.of_entry({"mcp": keys}, problems)
    assert not problems
    return read.for_workers()


def connected(**keys: object) -> contextlib.closing[ToolServer]:
    return contextlib.closing(ToolServer(settings(**keys)))


def said(server: ToolServer, name: str, **arguments: object) -> str:
    """What a call of a turn of its own gives."""
    server.begin_turn()
    return server.call(name, arguments)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server over HTTP."""
    address = tmp_path_factory.mktemp("mcp") / "address"
    with subprocess.Popen([sys.executable, SERVER, "--http", str(address)], stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + 120
        while not address.exists() and time.monotonic() < give_up:
            time.sleep(0.02)
        yield address.read_text()
        process.kill()


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[ToolServer]:
    """The same tools by both ways."""
    keys = entry() if request.param == "stdio" else {"url": request.getfixturevalue("url"), "deadline": 60}
    with connected(**keys) as made:
        yield made


def test_tools_are_listed_page_by_page_as_schemas(server):
    tools = server.tools()
    assert tools[0] == {
        "type": "function",
        "function": {"name": "add", "description": "Adds two numbers.", "parameters": mcp_server.ADD},
    }
    names = [tool["function"]["name"] for tool in tools]
    assert names[: len(mcp_server.TOOLS)] == [tool["name"] for tool in mcp_server.TOOLS]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 37, "b": 5}, "42"),
        ("say", {"text": "ünï\n" * 50_000}, "ünï\n" * 50_000),
        ("picture", {}, "[image: not shown]"),
        ("structured", {}, '{"sum": 3}'),
    ],
)
def test_a_result_is_text(server, name, arguments, result):
    assert said(server, name, **arguments) == result


@pytest.mark.parametrize(
    ("name", "is_fault", "words"),
    [
        ("fails", False, "^there is no such file$"),
        ("refuses", False, "refuses tools/call: not with me"),
        ("lies", True, "the tool server failed: "),
        ("flood", True, "more than 1 MiB"),
    ],
)
def test_a_failed_call_is_told_and_the_next_one_works(server, name, is_fault, words):
    with pytest.raises(CallFailed, match=words) as failure:
        said(server, name)
    assert isinstance(failure.value, ServerFault) == is_fault
    assert said(server, "add", a=1, b=2) == "3"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("die", "ended with status 3"),
        ("endless", "more than 1 MiB"),
        ("nonsense", "the tool server failed: JSONDecodeError"),
        ("deep", "nested too deeply"),
    ],
)
def test_after_a_fault_a_new_process_is_started(name, words):
    with connected(**entry()) as server:
        before = said(server, "pid")
        with pytest.raises(ServerFault, match=words):
            said(server, name)
        assert said(server, "pid") != before
        assert is_gone(int(before))


def test_a_server_that_was_killed_costs_one_call():
    with connected(**entry()) as server:
        before = int(said(server, "pid"))
        os.kill(before, 9)
        assert is_gone(before, or_ended=True)  # from Python 3.12 on asyncio asks with the next call
        with pytest.raises(ServerFault, match="ended with status -9"):
            said(server, "pid")
        assert int(said(server, "pid")) != before


@pytest.mark.parametrize("name", ["hang", "drip"])
def test_a_hang_costs_the_calls_of_its_turn_and_no_later_one(name, url):
    keys = {"url": url} if name == "drip" else entry()
    given = settings(**{**keys, "deadline": 0.5})
    with contextlib.closing(ToolServer(given)) as server:
        server.begin_turn()
        for call in (name, "pid"):
            with pytest.raises(ServerFault, match="did not answer in time"):
                server.call(call, {})
        given["deadline"] = 60  # the machine may be busy
        assert said(server, "pid").isdigit()


def test_a_ping_is_answered_before_the_answer_comes():
    with connected(**entry()) as server:
        assert json.loads(said(server, "asks")) == {"jsonrpc": "2.0", "id": "p", "result": {}}


def test_banners_and_logs_do_no_harm():
    with connected(**entry("banner", "noisy")) as server:
        assert said(server, "add", a=1, b=1) == "2"


def test_a_server_gets_the_variables_that_are_named_and_no_others(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "1")
    monkeypatch.setenv("SHOP_KEY", "2")
    monkeypatch.setenv("LANG", "C.UTF-8")
    with connected(**entry(variables=["SHOP_KEY"])) as server:
        seen = json.loads(said(server, "variables"))
    assert {name: seen.get(name) for name in ("PATH", "HOME", "LANG", "SHOP_KEY")} == {
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME"), "LANG": "C.UTF-8", "SHOP_KEY": "2",
    }  # fmt: skip
    assert set(seen) <= {"PATH", "HOME", "LANG", "SHOP_KEY", "LC_CTYPE", "PWD", "SHLVL", "_"}


def test_http_has_a_session_that_is_begun_anew_after_it_was_lost(url):
    with connected(url=url, deadline=60) as server:
        version, session = said(server, "version").split(" in ")
        assert version == "2025-06-18"
        with pytest.raises(ServerFault, match="status 404: no such session"):
            said(server, "forget")
        version, another = said(server, "version").split(" in ")
        assert version == "2025-06-18" and another != session
        assert said(server, "stream") == "in parts"
        for name, words in (("teapot", "status 418: short and stout"), ("redirect", "status 307")):
            with pytest.raises(CallFailed, match=words):
                said(server, name)


ROWS = "".join(f'{{"question": "{n}+1?", "sum": {n + 1}}}\n' for n in range(16))
SUMS = """
- environment: dataset
  args: {path: %s, template: "{question}", answer: sum, reward: exact, held_out: 8}
  mcp: %s
"""


def listed(folder: Path, mcp: object, more: str = "") -> Path:
    """A list with one environment that has a server."""
    (folder / "sums.jsonl").write_text(ROWS)
    path = folder / "list.yaml"
    path.write_text(SUMS % (folder / "sums.jsonl", json.dumps(mcp)) + more)
    return path


def test_a_grader_becomes_a_conversation_with_tools(tmp_path):
    [spec] = load_environment_specs(listed(tmp_path, entry(), "  max_turns: 5\n"))
    environment = spec.create()
    served = spec.served(environment)
    assert (served.name, served.max_turns) == ("dataset", 5)
    assert [tool["function"]["name"] for tool in served.chat.tools] == [tool["name"] for tool in mcp_server.TOOLS]
    task = next(iter(environment.tasks("train")))
    with contextlib.closing(environment.mcp_server):
        calls = HERMES.write([("add", {"a": 1, "b": 2}), ("add", {"a": "x", "b": 2}), ("fails", {}), ("lies", {})])
        step = environment.step(task, None, Turn(calls, "stop", 9, 0, False))
        texts = [message["content"] for message in step.messages]
        grade = play(environment, task, [HERMES.write([("add", {"a": 1, "b": 1})]), task.data["gold"]])
    assert texts[0] == "3"
    assert texts[1:3] == ["Error: a is 'x'; it must be of type integer", "Error: there is no such file"]
    assert texts[3].startswith("Error: the tool server failed: ")
    assert step.state == {"tool_calls": 4, "bad_tool_calls": 3}
    assert grade.reward == 1.0
    assert {"tool_calls": 1.0, "bad_tool_calls": 0.0}.items() <= grade.metrics.items()


def test_tools_are_added_to_those_of_an_environment(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text(f"- environment: shop\n  mcp: {json.dumps(entry())}\n")
    [spec] = load_environment_specs(path)
    environment = spec.create()
    assert [tool["function"]["name"] for tool in environment.tools][:3] == ["search", "python", "add"]
    assert not environment.in_process
    task = next(iter(environment.tasks("train")))
    good, price = next(iter(task.data["prices"].items()))
    with contextlib.closing(environment.mcp_server):
        calls = HERMES.write([("search", {"query": good}), ("add", {"a": 2, "b": 2}), ("long", {})])
        texts = [each["content"] for each in environment.step(task, None, Turn(calls, "stop", 9, 0, False)).messages]
    assert texts[:2] == [str(price), "4"]
    assert texts[2] == "y" * 10_000 + " ... (cut)"


@pytest.mark.parametrize(
    ("mcp", "problem"),
    [
        ([], "mcp is []; write {command: [python, server.py]} or {url: http://127.0.0.1:PORT/PATH}"),
        ({"command": ["a"], "url": "b"}, "write {command: [python, server.py]}"),
        ({"command": "python a.py"}, "mcp has the command 'python a.py'; give a list of words"),
        ({"command": ["no-such-program"]}, "'no-such-program', which is not found; install it, or give its path"),
        ({"command": ["sh"], "deadlin": 1}, "mcp has the unknown key 'deadlin'; did you mean 'deadline'?"),
        ({"command": ["sh"], "deadline": 0}, "mcp has the deadline 0; give seconds, above 0 and up to 600"),
        ({"command": ["sh"], "variables": ["NOT_SET_HERE"]}, "'NOT_SET_HERE', which is not set; export it"),
        *(({"url": url}, "give one of this machine, http://127.0.0.1:PORT/PATH") for url in (
            "http://example.com/mcp", "https://127.0.0.1/mcp", "http://10.0.0.1/", "http://127.0.0.1@example.com/",
            "http://127.0.0.1:x/", "ftp://127.0.0.1/", "http:///mcp", 7,
        )),
    ],
)  # fmt: skip
def test_a_list_with_a_wrong_key_is_refused(tmp_path, mcp, problem):
    path = listed(tmp_path, mcp)
    with pytest.raises(ConfigError) as error:
        load_environment_specs(path)
    [line] = error.value.lines
    assert line.startswith(f"{path}:2: ") and problem in line


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("calculator\n  mcp: {command: [sh]}", "calculator is given mcp, but answers calls itself; leave mcp out"),
        ("judge\n  args: {path: x}\n  mcp: {command: [sh]}", "judge is given mcp, but answers calls itself"),
        ("shop\n  in_process: true\n  mcp: {command: [sh]}", "whose calls wait; leave in_process out"),
        ("arithmetic\n  max_turns: 3", "arithmetic is given max_turns, but grades the first turn; leave it out"),
    ],
)
def test_an_environment_that_cannot_have_a_server_is_refused(tmp_path, lines, problem):
    path = tmp_path / "list.yaml"
    path.write_text(f"- environment: {lines}\n")
    with pytest.raises(ConfigError, match=problem):
        load_environment_specs(path)


@pytest.mark.parametrize(
    ("manners", "problem"),
    [
        ("broken", "the tool server ended with status 1; run it by hand to see why"),
        ("twins", "tool 1 has the name 'add' of an earlier one; names must be unique"),
        ("circle", "list of tools goes on after 100 pages"),
        ("odd", "tool 0 has the name 'no good name'; give 1 to 64 letters"),
        ("deaf", "did not answer in time; run it by hand"),
    ],
)
def test_a_server_that_is_no_good_is_refused_before_a_run(tmp_path, monkeypatch, manners, problem):
    if manners == "deaf":
        monkeypatch.setattr("megatron_rl.environments.mcp.client.START_SECONDS", 0.3)
    [spec] = load_environment_specs(listed(tmp_path, entry(manners)))
    with pytest.raises(ConfigError) as error:
        spec.create()
    [line] = error.value.lines
    assert line.startswith("mcp of dataset (") and problem in line


def test_a_url_where_nobody_listens_is_refused_before_a_run(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        [spec] = load_environment_specs(listed(tmp_path, {"url": f"http://127.0.0.1:{closed.getsockname()[1]}/mcp"}))
        with pytest.raises(ConfigError, match="Cannot connect to host .*; start it first"):
            spec.create()


def test_own_and_served_tools_of_one_name_are_refused(tmp_path):
    module = tmp_path / "adds.py"
    module.write_text(
        "from megatron_rl.environments.tools import ToolEnvironment, tool\n"
        "class Adds(ToolEnvironment):\n"
        "    name = 'adds'\n"
        "    def tasks(self, split): return []\n"
        "    def grade(self, task, transcript): return 0.0\n"
        "    @tool\n"
        "    def add(self) -> str: return ''\n"
    )
    path = tmp_path / "list.yaml"
    path.write_text(f"- environment: {module}:Adds\n  mcp: {json.dumps(entry())}\n")
    [spec] = load_environment_specs(path)
    with pytest.raises(ConfigError, match="tool 1 has the name 'add' of an earlier one"):
        spec.create()
