"""Fixtures of the environment tests."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from megatron_rl.environments.loader import ignore
from megatron_rl.environments.loading import survey
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.wire import Address, read_address
from megatron_rl.errors import ConfigError
from tests.support.dataset_files import REWARDS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def hostile_path() -> Iterator[None]:
    """Makes ``hostile_environments`` importable, here and in server processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


@pytest.fixture(scope="module")
def server(
    hostile_path: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentServerProcess]:
    """One server process for all tests of a module."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "list.yaml"
    config.write_text(
        "- environment: arithmetic\n"
        "  args: {train_tasks: 50, test_tasks: 7, demonstrations: 30}\n"
        "- environment: hostile_environments:Steady\n"
        "- environment: hostile_environments:Rewards\n"
        "- environment: hostile_environments:Distinct\n"
        "  grade_deadline: 1.0\n"
        "- environment: hostile_environments:BadRows\n"
    )
    with EnvironmentServerProcess(config, folder, start_timeout=30) as process:
        yield process


@pytest.fixture(scope="module")
def address(server: EnvironmentServerProcess) -> Address:
    """Where that server listens."""
    return read_address(server.address_file)


@pytest.fixture(scope="module")
def call(address: Address) -> Callable[..., tuple[int, Any]]:
    """Sends one request and returns the status and the parsed answer."""

    def send(method: str, path: str, body: object = None, headers: dict | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(urlsplit(address.url).netloc, timeout=10)
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        kind = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, kind | (token_of(address) if headers is None else headers))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.headers["Content-Type"] != "application/json":
            return response.status, {"message": text.decode()}
        return response.status, json.loads(text, parse_constant=pytest.fail)

    return send


def token_of(address: Address) -> dict[str, str]:
    """The header that carries the token."""
    return {"Authorization": f"Bearer {address.token}"}


def problems_of(path: Path) -> list[str]:
    """What is wrong with the list at ``path``, its environments and all their tasks."""
    try:
        survey(ignore, str(path))
    except ConfigError as error:
        return error.lines
    return []


@pytest.fixture
def transcript_json() -> Callable[[str], dict[str, Any]]:
    """The JSON item of a grade request for the given text."""

    def item(text: str) -> dict[str, Any]:
        return {
            "task": {"id": "train-0", "prompt": "2+2=", "data": {"answer": 4}},
            "transcript": {"text": text, "finish_reason": "stop", "num_tokens": len(text)},
        }

    return item


def is_gone(pid: int, or_ended: bool = False) -> bool:
    """Waits for the end of a process that was killed; ``or_ended``: its parent may still have to ask for its status."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return True
        if or_ended and status == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a file of rewards."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    return tmp_path
