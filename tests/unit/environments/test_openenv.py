"""The bridge to OpenEnv: against a server of ours, and against OpenEnv's own where there is one.

    python3 -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv==0.10.0
    OPENENV_PYTHON=/tmp/openenv/bin/python python -m pytest tests/unit/environments/test_openenv.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_rl.environments.loader import find_environment
from megatron_rl.environments.selftest import always, script_of, scripted_model
from megatron_rl.environments.workers import WorkerPool
from megatron_rl.errors import ConfigError
from megatron_rl.types import HarnessRun
from tests.support.openenv_server import digits_server

EXAMPLES = Path(__file__).parents[3] / "examples/bridges"
PYTHON = os.environ.get("OPENENV_PYTHON")
COMMAND = f"{PYTHON} -m uvicorn --app-dir '{EXAMPLES}' digits_openenv:app --port {{port}}"
needs_openenv = pytest.mark.skipif(not PYTHON, reason="OPENENV_PYTHON names no Python with OpenEnv; see the docstring")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool.for_harnesses(4, [("openenv", {"url": "http://127.0.0.1:1"})])) as made:
        yield made


@pytest.fixture(scope="module", params=["ours", pytest.param("OpenEnv's", marks=needs_openenv)])
def served(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Options that lead to a server."""
    if request.param != "ours":
        yield {"command": COMMAND}
        return
    with digits_server() as url:
        yield {"url": url}


def bridge(**options):
    return find_environment("openenv").from_options(options)


def run(pool, options, script: Callable, *indices, key="a-key"):
    tasks = list(bridge(**options).tasks("train"))
    with scripted_model(script) as model:
        runs = [HarnessRun(tasks[index], 0, model, key) for index in indices]
        return pool.run("openenv", options, runs, 60.0, lambda: False)


def test_tasks_are_the_servers_own(served):
    environment = bridge(**served, reset={"level": 2})
    train, test = (list(environment.tasks(split)) for split in ("train", "test"))
    assert (len(train), len(test)) == (240, 16)
    assert (train[3].id, test[0].id) == ("train-3", "test-0")
    assert train[3].data == {"reset": {"level": 2, "split": "train", "index": 3}}


def test_an_episode_is_worth_the_sum_of_its_steps(served, pool):
    three, five = run(pool, served, always("24x5"), 3, 5)
    assert (three.reward, three.status) == (five.reward, five.status) == (0.5, "done"), three.message
    assert dict(three.metrics) == {"length": 4.0, "steps": 2.0, "bad_actions": 0.0}


def test_an_action_as_json_and_one_that_is_none(served, pool):
    said = ['{"text": "4"}', '{"words": "4"}', "x"]
    (result,) = run(pool, served, script_of(said), 3)
    assert result.reward == 0.5, result.message
    assert dict(result.metrics) == {"length": 1.0, "steps": 3.0, "bad_actions": 1.0}


def test_seeds_are_tasks_where_asked():
    environment = bridge(url="http://127.0.0.1:1", seeds=64)
    tasks = {split: [task.id for task in environment.tasks(split)] for split in ("train", "test")}
    assert sorted(tasks["train"] + tasks["test"]) == sorted(f"seed-{n}" for n in range(64)) and tasks["test"]
    assert next(environment.tasks("train")).data == {"reset": {"seed": int(tasks["train"][0].removeprefix("seed-"))}}


def test_a_full_server_is_waited_for(pool):
    with digits_server(sessions=1) as url:
        results = run(pool, {"url": url}, always("4"), 3, 13, 23, 33)
    assert [result.reward for result in results] == [1.0] * 4


def test_the_session_lives_while_the_model_thinks(pool):
    def slowly(number):
        time.sleep(1.0)
        return "4"

    with digits_server(heartbeat=0.2) as url:
        (result,) = run(pool, {"url": url}, slowly, 3)
    assert result.reward == 1.0, result.message


def test_failures_are_masked_with_their_reason(pool):
    with digits_server(rewarded=False) as url:
        (unpaid,) = run(pool, {"url": url}, always("4"), 3)
    (gone,) = run(pool, {"url": url, "seeds": 20}, always("4"), 0)
    assert "gave no reward" in unpaid.message and "no OpenEnv server answers at" in gone.message
    assert unpaid.code == gone.code == "environment_exception"


def test_max_steps_cut_an_episode(pool):
    with digits_server() as url:
        (result,) = run(pool, {"url": url, "max_steps": 1}, always("4"), 3)
    assert (result.reward, result.status) == (0.5, "cut")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of url"),
        ({"url": "http://x", "command": "y {port}"}, "give one of url"),
        ({"command": "python -m mine"}, "does not say where {port} goes"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        bridge(**options)
    assert len(caught.value.lines) == 1 and words in caught.value.lines[0]


def test_a_command_that_starts_nothing_is_said(monkeypatch):
    from megatron_rl_environments.openenv import server

    monkeypatch.setattr(server, "START_SECONDS", 0.1)
    with pytest.raises(server.ServerFault, match="no OpenEnv server answers"):
        next(bridge(command="false --port {port}").tasks("train"))
