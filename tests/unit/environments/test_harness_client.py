"""Harnesses over REST: what the trainer's client asks, and what it does not ask twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.environments.client import RUNNING, EnvironmentClient
from megatron_rl.environments.process import EnvironmentServerProcess
from megatron_rl.environments.selftest import always, scripted_model
from megatron_rl.types import HarnessRun, Task, Transcript
from tests.unit.environments.conftest import is_gone


@pytest.fixture(scope="module")
def harness_server(
    hostile_path: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvironmentServerProcess]:
    """A server of harnesses and of one grader."""
    folder = tmp_path_factory.mktemp("harnesses")
    (folder / "scratch").mkdir()
    config = folder / "list.yaml"
    config.write_text("".join(f"- environment: {name}\n" for name in ("harnesses:Talk", "hostile_environments:Steady")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder / "scratch"))
        with EnvironmentServerProcess(config, folder, start_timeout=60, harness_processes=2) as process:
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


async def begun(mark: Path) -> list[int]:
    """The processes of a sample that hangs: its own and the one that it started."""
    give_up = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)
    return [int(pid) for pid in mark.read_text().split()]


def test_the_processes_of_a_run_that_is_cancelled_are_killed(client, model, tmp_path):
    async def cancelled() -> list[int]:
        asked = asyncio.create_task(client.run("talk", [sample(model, "hang", tmp_path / "mark")] * 3))
        pids = await begun(tmp_path / "mark")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        return pids

    pids = asyncio.run(cancelled())
    assert all(map(is_gone, pids))
    (after,) = asyncio.run(client.run("talk", [sample(model)]))  # the two places are free
    assert after.reward == 3.0


def test_no_more_samples_run_at_once_than_there_may_be(client, model, tmp_path):
    results = asyncio.run(client.run("talk", [sample(model, "together", tmp_path)] * 6))
    assert [result.failed for result in results] == [False] * 6
    assert max(result.reward for result in results) == 2.0


def test_all_groups_of_eight_clients_leave_room_for_graders(harness_server, client, model, tmp_path):
    async def many() -> list[int]:
        clients = [EnvironmentClient(harness_server.address_file) for _ in range(8)]
        groups = [asyncio.create_task(client.run("talk", [sample(model, "hang", tmp_path / "mark")] * 2))]
        pids = await begun(tmp_path / "mark")  # both places are taken: the others wait
        groups += [asyncio.create_task(each.run("talk", [sample(model)])) for each in clients for _ in range(RUNNING)]
        while len(psutil.Process(harness_server.pid).net_connections()) < 8 * RUNNING:
            await asyncio.sleep(0.05)
        for _ in range(5):
            (graded,) = await client.grade("steady", [(Task("0", "?"), Transcript("x", "stop", 1))])
            assert not graded.failed
        assert not any(group.done() for group in groups)
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        return pids

    assert all(map(is_gone, asyncio.run(many())))


def test_what_never_happened_is_counted_too(client):
    counts = client.server_counters()[1]
    assert counts["retried"] == 0 and counts["runs"] > 0


def test_a_sample_whose_server_died_is_not_run_again(harness_server, client, model, tmp_path):
    async def killed() -> tuple[list, list[int]]:
        asked = asyncio.create_task(client.run("talk", [sample(model, "hang", tmp_path / "mark")]))
        pids = await begun(tmp_path / "mark")
        psutil.Process(harness_server.pid).kill()
        return await asked, pids

    (result,), pids = asyncio.run(killed())
    assert (result.code, result.reward) == ("server_unreachable", None)
    assert all(map(is_gone, pids))  # the process that forks them saw to it
    (after,) = asyncio.run(client.run("talk", [sample(model)]))  # of the server in its place, which starts meanwhile
    assert after.reward == 3.0
    scratch = harness_server.log_file.parent / "scratch"
    assert [list(folder.iterdir()) for folder in scratch.glob("grading_*")] == [[]]


def test_the_keys_of_samples_are_in_no_log(harness_server, client, model):
    asyncio.run(client.run("talk", [sample(model, "raise")]))
    assert "a-key" not in harness_server.log_file.read_text()
