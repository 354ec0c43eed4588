"""Differences of counts, through restarts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_rl.environments.process import EnvironmentCounters
from megatron_rl.errors import EnvironmentFault


class Client:
    """Says what the test wants; an exception is raised."""

    def __init__(self) -> None:
        self.own = {"requests_repeated": 0, "busy_waits": 0}
        self.answer: object = None

    def counters(self) -> dict[str, int]:
        return dict(self.own)

    def server_counters(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def answer_of(pid: int, graded: int) -> tuple[int, dict[str, int]]:
    return pid, {"graded": graded}


@pytest.fixture
def client() -> Client:
    return Client()


def test_a_step_gets_what_is_new(client):
    counters = EnvironmentCounters(client, SimpleNamespace(restarts=0))
    client.answer = answer_of(1, graded=5)
    assert counters.since_last_call() == {
        "requests_repeated": 0,
        "busy_waits": 0,
        "restarts": 0,
        "graded": 5,
    }
    client.own["busy_waits"] = 2
    client.answer = answer_of(1, graded=8)
    new = counters.since_last_call()
    assert (new["graded"], new["busy_waits"]) == (3, 2)


def test_a_new_server_counts_from_zero(client):
    server = SimpleNamespace(restarts=0)
    counters = EnvironmentCounters(client, server)
    client.answer = answer_of(1, graded=50)
    counters.since_last_call()
    server.restarts, client.answer = 1, answer_of(2, graded=8)
    new = counters.since_last_call()
    assert (new["graded"], new["restarts"]) == (8, 1)


def test_counts_that_cannot_be_read_fail_nothing_and_come_later(client):
    counters = EnvironmentCounters(client, SimpleNamespace(restarts=2))
    client.answer = answer_of(1, graded=5)
    counters.since_last_call()
    client.answer = EnvironmentFault("gone")
    new = counters.since_last_call()
    assert new == {"requests_repeated": 0, "busy_waits": 0, "restarts": 0}
    client.answer = answer_of(1, graded=9)
    assert counters.since_last_call()["graded"] == 4


def test_a_rank_without_a_server_asks_none(client):
    client.answer = AssertionError("not to be asked")
    assert EnvironmentCounters(client, None).since_last_call() == {"requests_repeated": 0, "busy_waits": 0}
