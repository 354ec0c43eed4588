"""Harnesses over REST: what the trainer's client asks, and what it does not ask twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.scripted import always, scripted_model
from megatron_rl.types import HarnessRun, Task, Transcript


@pytest.fixture(scope="module")
def harness_server(
    hostile_path: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentServerProcess]:
    """A server of harnesses and of one grader."""
    folder = tmp_path_factory.mktemp("harnesses")
    config = folder / "list.yaml"
    config.write_text("".join(f"- environment: {name}\n" for name in ("harnesses:Talk", "hostile_environments:Steady")))
    with EnvironmentServerProcess(config, folder, start_timeout=60) as process:
        yield process


@pytest.fixture
def client(harness_server: EnvironmentServerProcess) -> EnvironmentClient:
    return EnvironmentClient(harness_server.address_file)


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """A model that says 3."""
    with scripted_model(always("3")) as url:
        yield url


def sample(url: str, fault: str = "", mark: Path | str = "") -> HarnessRun:
    return HarnessRun(Task("0", "?", {"fault": fault, "mark": str(mark)}), 0, url, "a-key")


def test_the_server_says_what_is_a_harness(client):
    assert [(each.name, each.is_harness) for each in client.environments()] == [("talk", True), ("steady", False)]


def test_a_group_is_run_in_one_request(client, model):
    results = asyncio.run(client.run("talk", [sample(model), sample(model, "nan"), sample(model)]))
    assert [(result.reward, result.code) for result in results] == [(3.0, ""), (None, "invalid_reward"), (3.0, "")]


def test_the_wrong_route_is_refused(client, model):
    (graded,) = asyncio.run(client.grade("talk", [(Task("0", "?"), Transcript("x", "stop", 1))]))
    (ran,) = asyncio.run(client.run("steady", [sample(model)]))
    assert graded.code == ran.code == "environment_exception"
    assert "use its route /run" in graded.message and "no harness" in ran.message
