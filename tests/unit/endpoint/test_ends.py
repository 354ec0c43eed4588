"""Calls without an answer: their client hangs up, their session or the endpoint closes; and who waits for calls."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from megatron_rl.endpoint.calls import Call, Endpoint
from megatron_rl.errors import ConfigError
from tests.support.endpoint import ASK, client, completion, listening, post


def _await(holds) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def _take(endpoint: Endpoint, count: int = 1) -> list[Call]:
    calls: list[Call] = []
    while len(calls) < count:
        endpoint.wait_blocking(60.0)
        calls += endpoint.take()
    return calls


def _connect(endpoint: Endpoint, session: str, **asked: object) -> http.client.HTTPConnection:
    """One that has asked, and may hang up."""
    connection = http.client.HTTPConnection(endpoint.url.removeprefix("http://"))
    body, headers = json.dumps(ASK | asked), {"Authorization": f"Bearer {endpoint.token}"}
    connection.request("POST", f"/sessions/{session}/v1/chat/completions", body, headers)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(tokenizer, caplog, stream):
    """Of two choices one has its answer; the other is cancelled, and an answer on its way is of no use."""
    with listening(tokenizer) as endpoint:
        session = endpoint.open_session("")
        connection = _connect(endpoint, session, stream=stream, n=2)
        first, second = _take(endpoint, 2)
        endpoint.deliver(first.number, completion(tokenizer, "3"))
        _await(lambda: endpoint.num_waiting == 1)
        assert endpoint.take_cancelled() == []
        connection.close()
        _await(lambda: not endpoint.num_waiting)
        assert (endpoint.take_cancelled(), endpoint.take_cancelled()) == ([second.number], [])
        endpoint.progress(second.number, [70, 71])
        endpoint.deliver(second.number, completion(tokenizer, "3"))
        again = _connect(endpoint, session)
        assert _take(endpoint)[0].branch == second.branch == 1, "its numbers are the next one's"
        again.close()
        assert endpoint.close_session(session).calls == (first.number,)
    assert caplog.records == []


def test_who_hangs_up_before_its_call_was_taken(tokenizer):
    with listening(tokenizer) as endpoint:
        connection = _connect(endpoint, endpoint.open_session(""))
        _await(lambda: endpoint.num_waiting)
        connection.close()
        _await(lambda: not endpoint.num_waiting)
        assert (endpoint.take(), endpoint.take_cancelled()) == ([], [])


def test_a_call_that_waits_when_its_session_closes(tokenizer):
    with listening(tokenizer) as endpoint, ThreadPoolExecutor(2) as pool:
        session, other = endpoint.open_session(""), endpoint.open_session("")
        late, stays = (
            pool.submit(post, endpoint, ASK, f"/sessions/{each}/v1/chat/completions") for each in (session, other)
        )
        calls = _take(endpoint, 2)
        assert endpoint.close_session(session).calls == ()
        assert late.result(30).status_code == 410
        assert endpoint.take_cancelled() == [call.number for call in calls if call.session == session]
        for call in calls:
            endpoint.deliver(call.number, completion(tokenizer, "3"))
        assert stays.result(30).status_code == 200
        assert len(endpoint.close_session(other).calls) == 1


def test_calls_that_wait_when_the_endpoint_closes(tokenizer):
    with listening(tokenizer) as endpoint, ThreadPoolExecutor(2) as pool:
        plain = pool.submit(post, endpoint, ASK | {"n": 2})
        streamed = pool.submit(lambda: [*client(endpoint).chat.completions.create(**ASK, stream=True)])
        _await(lambda: endpoint.num_waiting == 3)
        endpoint.close()
        assert plain.result(30).status_code == 503
        assert "the endpoint closes" in plain.result().json()["error"]["message"]
        with pytest.raises(openai.APIError, match="the endpoint closes"):
            streamed.result(30)
        assert endpoint.take() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{endpoint.url}/health")


def test_an_address_that_is_taken(endpoint, tokenizer):
    port = int(endpoint.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        Endpoint(tokenizer, max_sequence_length=9, max_new_tokens=9, port=port).start()


def test_waiting_wakes_at_a_call(tokenizer):
    async def wait() -> float:
        began = time.monotonic()
        await endpoint.wait(0.01)  # nobody asks
        assert endpoint.take() == []
        await endpoint.wait(30.0)
        return time.monotonic() - began

    with listening(tokenizer) as endpoint, ThreadPoolExecutor(2) as pool:
        waited = pool.submit(asyncio.run, wait())
        time.sleep(0.2)
        answer = pool.submit(post, endpoint, ASK)
        assert 0.1 < waited.result(60) < 25
        asyncio.run(endpoint.wait(30.0))  # it is there already
        (call,) = endpoint.take()
        endpoint.deliver(call.number, completion(tokenizer, "3"))
        assert answer.result(30).status_code == 200


def test_a_thread_that_waits_wakes_at_a_call(tokenizer):
    with ThreadPoolExecutor(2) as pool, listening(tokenizer) as endpoint:
        began = time.monotonic()
        waited = pool.submit(endpoint.wait_blocking, 60.0)
        time.sleep(0.2)
        pool.submit(post, endpoint, ASK)
        waited.result(50)
        assert time.monotonic() - began < 45
