"""The client against servers that are absent, slow, dying or lying."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp
import pytest

from megatron_rl.environments import client as client_module
from megatron_rl.environments.client import EnvironmentClient
from megatron_rl.environments.wire import Address, read_address, write_address, write_private
from megatron_rl.errors import EnvironmentFault
from megatron_rl.types import Task, Transcript

ITEM = (Task("train-0", "2+2=", {"answer": 4}), Transcript("abc", "stop", 3))


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # of 5, further connections wait a second


class Stub:
    """An HTTP server that answers POSTs with what ``answers`` says in turn; None drops the connection.

    Each answer takes ``seconds``.
    """

    def __init__(self, *answers: tuple[int, str] | None, seconds: float = 0.0) -> None:
        self.bodies: list[dict] = []
        self.before_answer = self.beats = None
        self.most_at_once = 0
        now, lock, stub = set(), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                if stub.beats and self.path == "/v1/counters":
                    self.answer(200, json.dumps({"beats": next(stub.beats)}))
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                stub.bodies.append(json.loads(body) if body else {})
                if stub.before_answer:
                    stub.before_answer()
                answer = answers[min(len(stub.bodies), len(answers)) - 1]
                with lock:
                    now.add(self)
                    stub.most_at_once = max(stub.most_at_once, len(now))
                time.sleep(seconds)
                now.discard(self)
                if answer is None:
                    self.close_connection = True
                    return
                self.answer(*answer)

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address(f"http://127.0.0.1:{self.server.server_port}", "token", os.getpid())


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Makes a stub server and a client of it."""
    made = []

    def make(
        *answers: tuple[int, str] | None, seconds: float = 0.0, attempts: int = 24, **options: object
    ) -> tuple[Stub, EnvironmentClient]:
        monkeypatch.setattr("megatron_rl.environments.client.BACKOFF_SECONDS", 0.001)
        monkeypatch.setattr("megatron_rl.environments.client.ATTEMPTS", attempts)
        server = Stub(*answers, seconds=seconds)
        made.append(server)
        write_address(tmp_path / "address.json", server.address)
        return server, EnvironmentClient(tmp_path / "address.json", **options)

    yield make
    for server in made:
        server.server.shutdown()
        server.server.server_close()


def grade(client: EnvironmentClient, count: int = 1, environment: str = "steady"):
    return asyncio.run(client.grade(environment, [ITEM] * count))


def ok(*rewards: object) -> tuple[int, str]:
    items = [{"status": "ok", "reward": reward, "metrics": {}} for reward in rewards]
    return 200, json.dumps({"items": items})


def test_grades_come_back_in_order(server):
    texts = ["a", "raise", "abcd"]
    items = [(ITEM[0], Transcript(text, "stop", 1)) for text in texts]
    client = EnvironmentClient(server.address_file)
    first, second, third = asyncio.run(client.grade("steady", items))
    assert (first.reward, third.reward) == (1.0, 4.0)
    assert (second.failed, second.code, second.reward) == (True, "environment_exception", None)


def test_a_group_that_is_too_large_for_a_request_goes_in_several(server, monkeypatch):
    sent, send = [], aiohttp.ClientSession.request
    monkeypatch.setattr(
        aiohttp.ClientSession, "request", lambda *given, data: (sent.append(data), send(*given, data=data))[1]
    )
    task = replace(ITEM[0], data={"tests": "x" * 2000})
    items = [(task, Transcript(text, "stop", 1)) for text in ("a", "abcd", "ab", "abc", "")]
    for part, sizes in ((client_module.PART, [5]), (5000, [1, 2, 2]), (1, [1] * 5)):
        monkeypatch.setattr(client_module, "PART", part)
        results = asyncio.run(EnvironmentClient(server.address_file).grade("steady", items))
        assert [result.reward for result in results] == [1.0, 4.0, 2.0, 3.0, 0.0]
        assert sorted(body.count(b"transcript") for body in sent) == sizes
        sent.clear()


def together(client: EnvironmentClient, *texts: str, environment: str = "distinct"):
    answers = [Transcript(text, "stop", 1) for text in texts]
    return asyncio.run(client.grade_group(environment, 1.0, ITEM[0], answers))


def test_a_group_is_graded_together_and_fails_together(server):
    client = EnvironmentClient(server.address_file)
    assert [each.reward for each in together(client, "a", "b", "a", "c")] == [0.5, 1.0, 0.5, 1.0]
    lone, *others = together(client, "none", "b", "b")
    assert (lone.code, [each.reward for each in others]) == ("invalid_reward", [0.5, 0.5])
    faults = {"raise": "environment_exception", "few": "environment_exception", "die": "worker_died", "hang": "timeout"}
    for text, code in faults.items():
        assert [(each.reward, each.code) for each in together(client, text, "b", "b")] == [(None, code)] * 3
    [refused] = together(client, "a", environment="steady")
    assert "grades each answer alone; use its route /grade" in refused.message
    assert [each.reward for each in together(client, "a", "a")] == [0.5, 0.5]
    assert asyncio.run(client.grade("distinct", [(ITEM[0], Transcript("a", "stop", 1))]))[0].reward == 1.0
    [served] = [each for each in client.environments() if each.name == "distinct"]
    assert served.group_seconds == 1.0


def test_nothing_to_grade_sends_nothing(tmp_path):
    assert asyncio.run(EnvironmentClient(tmp_path / "absent").grade("steady", [])) == []


def test_tasks_and_demonstrations_are_fetched_page_by_page(server, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.PAGE", 16)
    client = EnvironmentClient(server.address_file)
    tasks = client.fetch_tasks("arithmetic", "train")
    assert len({task.id for task in tasks}) == 50
    assert isinstance(tasks[0], Task)
    assert len(client.fetch_demonstrations("arithmetic", "train")) == 30
    assert client.fetch_demonstrations("arithmetic", "test") == []


def test_an_unknown_environment_is_a_fault_with_the_server_s_words(server):
    client = EnvironmentClient(server.address_file)
    with pytest.raises(EnvironmentFault, match="did you mean 'arithmetic'"):
        client.fetch_tasks("arithmatic", "train")
    [result] = grade(client, environment="arithmatic")
    assert (result.failed, result.code) == (True, "environment_exception")
    assert "404" in result.message


def test_no_server_gives_results_not_exceptions(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.ATTEMPTS", 3)
    client = EnvironmentClient(tmp_path / "absent.json")
    results = grade(client, 2)
    assert [(r.failed, r.code, r.reward) for r in results] == [(True, "server_unreachable", None)] * 2
    assert not client.health()
    write_address(tmp_path / "absent.json", Address("http://127.0.0.1:9", "t", 1))
    assert grade(client)[0].code == "server_unreachable"


def test_a_lost_answer_is_asked_for_again(stub):
    server, client = stub(None, None, ok(0.5))
    assert grade(client)[0].reward == 0.5
    assert server.bodies == server.bodies[:1] * 3


def test_completions_whose_grader_ran_out_of_time_are_counted(stub):
    item = {"status": "ok", "reward": 0.0, "metrics": {}, "verdict": "timeout"}
    _, client = stub((200, json.dumps({"items": [item, item]})))
    assert [result.status for result in grade(client, 2)] == ["timeout"] * 2
    assert client.counters()["late_completions"] == 2


def test_attempts_end(stub):
    server, client = stub(None, attempts=3)
    assert grade(client)[0].code == "server_unreachable"
    assert len(server.bodies) == 3


def test_a_server_that_was_given_up_is_asked_no_more(stub, tmp_path):
    """Its supervisor, which may be another rank's, says so in the address file."""
    server, client = stub(None, attempts=10)
    server.before_answer = lambda: write_private(tmp_path / "address.json", '{"fault": "dead for good"}')
    [result] = grade(client)
    assert (result.code, result.message) == ("server_unreachable", "dead for good")
    assert len(server.bodies) == 1
    with pytest.raises(EnvironmentFault, match="dead for good"):
        client.environments()


def test_attempts_are_counted_for_each_server_anew(stub, tmp_path):
    """Another rank restarts it; this one only sees the address change."""
    server, client = stub(*[None] * 12, ok(0.5), attempts=3)
    pids = iter(range(10**6, 10**7))

    def another() -> None:
        write_address(tmp_path / "address.json", replace(server.address, pid=next(pids)))

    server.before_answer = another
    assert grade(client)[0].reward == 0.5
    assert len(server.bodies) == 13


def test_an_old_token_is_read_again(stub):
    server, client = stub((401, '{"message": "a valid bearer token is required"}'), ok(1))
    assert grade(client)[0].reward == 1.0
    assert len(server.bodies) == 2


def test_a_slow_grade_is_a_timeout_and_is_not_repeated(server):
    client = EnvironmentClient(server.address_file, timeout=0.2)
    items = [(ITEM[0], Transcript("sleep", "stop", 1))]
    [result] = asyncio.run(client.grade("steady", items))
    assert (result.failed, result.code) == (True, "timeout")


BUSY = (429, '{"message": "come back later"}')
UNABLE = (503, '{"message": "no grading worker could be started"}')


def test_a_busy_server_is_asked_again_and_costs_no_attempt(stub, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.BUSY_SECONDS", 0.0)
    server, client = stub(None, *[BUSY] * 10, UNABLE, None, ok(0.5), attempts=2)
    assert grade(client)[0].reward == 0.5
    assert len(server.bodies) == 14
    assert client.counters() == {"requests_repeated": 2, "busy_waits": 11, "late_completions": 0}


def test_a_server_that_stays_busy_is_given_up(stub, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.PATIENCE_TIMEOUTS", 0.02)
    monkeypatch.setattr("megatron_rl.environments.client.BUSY_SECONDS", 0.1)
    server, client = stub(BUSY, timeout=30.0)
    [result] = grade(client)
    assert (result.code, result.message) == ("server_unreachable", "come back later")
    assert len(server.bodies) > 1


def test_a_pause_of_the_event_loop_is_no_timeout(stub):
    """A long step of the engine: the answer came meanwhile."""
    server, client = stub(ok(1.0), seconds=0.2, timeout=0.8)

    async def paused():
        asked = asyncio.create_task(client.grade("toy", [ITEM]))
        while not server.bodies:
            await asyncio.sleep(0.01)
        time.sleep(1.5)
        return await asked

    assert [grade.reward for grade in asyncio.run(paused())] == [1.0]
    assert len(server.bodies) == 1


def test_a_client_sends_a_few_requests_at_once_and_starts_no_timeout_for_the_others(stub, monkeypatch):
    """Eight requests of half a second, two at a time, take longer than the timeout of one."""
    monkeypatch.setattr("megatron_rl.environments.client.CONCURRENT", 2)
    server, client = stub(ok(1.0), seconds=0.5, timeout=1.9)

    async def many(count: int):
        return await asyncio.gather(*[client.grade("steady", [ITEM]) for _ in range(count)])

    begin = time.monotonic()
    assert [result.reward for [result] in asyncio.run(many(8))] == [1.0] * 8
    assert time.monotonic() - begin > 1.9
    assert server.most_at_once == 2


def test_a_list_is_asked_for_again_when_the_server_is_gone_or_busy(stub, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.BUSY_SECONDS", 0.0)
    rows = (200, '{"items": [{"id": "a", "prompt": "?", "data": {}}], "total": 1}')
    server, client = stub(None, UNABLE, (401, "{}"), rows, (404, '{"message": "unknown environment"}'))
    assert [task.id for task in client.fetch_tasks("x", "train")] == ["a"]
    assert len(server.bodies) == 4
    with pytest.raises(EnvironmentFault, match="unknown environment"):
        client.fetch_tasks("x", "train")


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e999", "true", '"1"', "null"])
def test_rewards_are_checked_on_this_side_too(stub, reward):
    _, client = stub((200, f'{{"items": [{{"status": "ok", "reward": {reward}, "metrics": {{}}}}]}}'))
    [result] = grade(client)
    assert result.failed
    assert result.reward is None
    assert result.code in ("invalid_reward", "environment_exception")


@pytest.mark.parametrize(
    "answer",
    [
        ok(1.0),
        ok(1.0, 1.0, 1.0),
        (200, "<html>"),
        (200, "[]"),
        (200, '{"items": [{}, {}]}'),
        (500, "oops"),
        (200, '{"items": [1, 2]}'),
        (413, '{"message": "too large"}'),
    ],
)
def test_answers_that_make_no_sense_become_errors(stub, answer):
    _, client = stub(answer)
    results = grade(client, 2)
    assert [result.failed for result in results] == [True, True]


def test_a_damaged_address_file_is_a_fault(tmp_path):
    path = tmp_path / "address.json"
    for text in ("", "{}", '{"url": 1, "token": "t", "pid": 2}'):
        path.write_text(text)
        with pytest.raises(EnvironmentFault, match="is not the address"):
            read_address(path)


def test_a_busy_server_is_waited_for_while_its_workers_make_progress(stub, monkeypatch):
    monkeypatch.setattr("megatron_rl.environments.client.PATIENCE_TIMEOUTS", 0.02)
    monkeypatch.setattr("megatron_rl.environments.client.BUSY_SECONDS", 0.1)
    server, client = stub(*[BUSY] * 8, ok(0.5), timeout=10.0)
    server.beats = itertools.count()
    assert grade(client)[0].reward == 0.5
    assert next(server.beats) > 1
